"""Train states of another layout: which saved leaf goes where.

Loss scaling and skipping were done with a field `dynamic_scale` (Flax's
ImageNet and WMT examples) or with `optax.apply_if_finite`, accumulation with
`optax.MultiSteps`: here they become the state of `LossScale`, or are taken off
or put around the optimizer, as the wanted state has it.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

Path = tuple[str, ...]

LOSS_SCALE: Path = ("wrapper_states", "loss_scale")
_DYNAMIC_SCALE = "dynamic_scale"
_DYNAMIC_SCALE_LEAVES = {
  (_DYNAMIC_SCALE, "fin_steps"),
  (_DYNAMIC_SCALE, "scale"),
}
_OPT_STATE: Path = ("opt_state",)
# Where the array is in nnx.Variable and nn.Partitioned, if they were saved.
_BOX = "value"


@dataclasses.dataclass(frozen=True)
class _Kind:
  """A transformation of optax around a whole optimizer."""

  name: str
  own: frozenset[str]  # the fields that it always has
  inner: str
  other: frozenset[str] = frozenset()


_KINDS = (
  _Kind(
    "optax.apply_if_finite",
    frozenset({"notfinite_count", "last_finite", "total_notfinite"}),
    "inner_state",
  ),
  _Kind(
    "optax.MultiSteps",
    frozenset({"mini_step", "gradient_step", "acc_grads"}),
    "inner_opt_state",
    frozenset({"skip_state"}),
  ),
)


@dataclasses.dataclass(frozen=True)
class LeafMapping:
  """Which saved leaf goes where.

  Attributes:
    sources: The saved path of each wanted one that is read.
    fresh: The wanted paths that keep what the state has.
    dropped: The saved paths that are not read.
    notes: What to tell about it.
  """

  sources: Mapping[Path, Path]
  fresh: frozenset[Path]
  dropped: frozenset[Path]
  notes: tuple[str, ...]

  def renamed(self, saved: Mapping[Path, Any]) -> dict[Path, Any]:
    """Returns what is saved under the paths where it is to go."""
    taken = {*self.sources.values(), *self.dropped}
    return {
      **{path: x for path, x in saved.items() if path not in taken},
      **{path: saved[source] for path, source in self.sources.items()},
    }


def plan(saved: Mapping[Path, Any], wanted: Mapping[Path, Any]) -> LeafMapping:
  """Finds where the leaves of a saved train state go.

  Args:
    saved: What lies on disk, by path.
    wanted: The leaves to restore; those of a state of `LossScale` under
      `LOSS_SCALE`, if it is to be had from there.

  Returns:
    A plan. What it has no place for is in neither of its parts; shapes and
    dtypes are not compared.

  Example:
    >>> saved = {("opt_state", "inner_state", "count"): 0, **{
    ...     ("opt_state", name): 0
    ...     for name in ("notfinite_count", "last_finite", "total_notfinite")}}
    >>> plan(saved, {("opt_state", "count"): 0}).sources
    {('opt_state', 'count'): ('opt_state', 'inner_state', 'count')}
  """
  has, saved_core = _layers(saved)
  wants, wanted_core = _layers(wanted)
  sources: dict[Path, Path] = {}
  fresh: set[Path] = set()
  dropped: set[Path] = set()
  notes: list[str] = []

  # The parts of the optimizer state: what lies inside of all, and each layer.
  places = {wanted_core: saved_core}
  for layer, at in wants.items():
    if layer in has:
      places[at] = has[layer]
      continue
    fresh.update(_of_layer(wanted, layer, at))
    notes.append(f"it has no state of {layer[0].name}: that starts fresh")
  for layer, at in has.items():
    if layer not in wants:
      dropped.update(_of_layer(saved, layer, at))
      notes.append(
        f"{layer[0].name} around its optimizer is taken off, with its counts"
        + (" and accumulated gradients" if "acc_grads" in layer[0].own else "")
      )

  scale = {p for p in saved if p[0] == _DYNAMIC_SCALE}
  foreign_scale = scale == _DYNAMIC_SCALE_LEAVES and not any(
    p[0] == _DYNAMIC_SCALE for p in wanted
  )
  if foreign_scale:
    dropped.update(scale)
    if any(p[: len(LOSS_SCALE)] == LOSS_SCALE for p in wanted):
      sources[*LOSS_SCALE, "scale"] = (_DYNAMIC_SCALE, "scale")
      sources[*LOSS_SCALE, "good_steps"] = (_DYNAMIC_SCALE, "fin_steps")
      notes.append(
        f"its field {_DYNAMIC_SCALE!r} becomes the state of wrapper "
        "'loss_scale'"
      )
    else:
      notes.append(f"it has a field {_DYNAMIC_SCALE!r}: left alone")

  for path in wanted:
    if path in fresh or path[: len(LOSS_SCALE)] == LOSS_SCALE:
      continue
    source = path
    # The innermost of the places that it lies in.
    for length in range(len(path), 0, -1):
      if path[:length] in places:
        source = (*places[path[:length]], *path[length:])
        break
    if source not in saved:
      source = (*source, _BOX)
    if source in saved and source not in dropped:
      sources[path] = source
  return LeafMapping(
    sources, frozenset(fresh), frozenset(dropped), tuple(notes)
  )


def _layers(
  leaves: Mapping[Path, Any],
) -> tuple[dict[tuple[_Kind, int], Path], Path]:
  """Returns what is around an optimizer, outermost first, and where that is.

  The same kind may be there twice, so the layers are numbered.
  """
  at = _OPT_STATE
  layers: dict[tuple[_Kind, int], Path] = {}
  while True:
    children = {
      p[len(at)] for p in leaves if len(p) > len(at) and p[: len(at)] == at
    }
    for kind in _KINDS:
      if kind.own <= children <= kind.own | kind.other | {kind.inner}:
        count = sum(k is kind for k, _ in layers)
        layers[kind, count] = at
        at = (*at, kind.inner)
        break
    else:
      return layers, at


def _of_layer(
  leaves: Mapping[Path, Any], layer: tuple[_Kind, int], at: Path
) -> list[Path]:
  """Returns the paths of a layer itself, without what is inside of it."""
  return [
    p
    for p in leaves
    if p[: len(at)] == at and p[len(at)] in layer[0].own | layer[0].other
  ]
