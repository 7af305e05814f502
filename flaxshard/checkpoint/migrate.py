"""Maps the leaves of a saved train state to the leaves of the wanted one.

The two may differ in layout. Loss scaling and skipping may have been done with
a field of the train state (Flax's `DynamicScale`) or with
`optax.apply_if_finite`, and accumulation with `optax.MultiSteps`. Fields become
the state of a wrapper that knows them. optax's two layers around the whole
optimizer are taken off or put on, as the wanted state has them. Wrapper states
come and go in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

Path = tuple[str, ...]

WRAPPER_STATES = "wrapper_states"
_OPT_STATE: Path = ("opt_state",)
# The array in an nnx.Variable or a nn.Partitioned that was saved as an object.
_BOX = "value"


@dataclasses.dataclass(frozen=True)
class _LayerKind:
  """An optax transformation around a whole optimizer.

  Attributes:
    name: Its name in optax.
    fields: The fields that its state always has, without `inner`.
    inner: The field that holds the state of the optimizer inside.
    optional_fields: The fields that its state may have besides.
    needed_because: Why a state that has this layer cannot be restored without
      it; empty if it can.
  """

  name: str
  fields: frozenset[str]
  inner: str
  optional_fields: frozenset[str] = frozenset()
  needed_because: str = ""


_LAYER_KINDS = (
  _LayerKind(
    "optax.apply_if_finite",
    frozenset({"notfinite_count", "last_finite", "total_notfinite"}),
    "inner_state",
  ),
  _LayerKind(
    "optax.MultiSteps",
    frozenset({"mini_step", "gradient_step", "acc_grads"}),
    "inner_opt_state",
    frozenset({"skip_state"}),
  ),
  _LayerKind(
    "flaxshard.sparse_rows with semantics 'catch_up'",
    frozenset({"step_count", "last_step"}),
    "inner",
    frozenset({"log_decay", "row_log_decay"}),
    "some rows of its tables are not up to date. Restore it into a state with "
    "these semantics, and then use state.settle()",
  ),
)

# A layer: its kind, and how many of that kind are around it.
_Layer = tuple[_LayerKind, int]


@dataclasses.dataclass(frozen=True)
class LeafMapping:
  """Which saved leaf becomes which wanted leaf.

  Attributes:
    sources: The saved path of each wanted leaf that the checkpoint has.
    fresh: The wanted paths that start fresh: those of optimizer layers and of
      wrapper states that the checkpoint lacks.
    dropped: The saved paths that are not read.
    notes: Sentences about it, for the log.
    errors: Sentences about why it cannot be restored.
  """

  sources: Mapping[Path, Path]
  fresh: frozenset[Path]
  dropped: frozenset[Path]
  notes: tuple[str, ...]
  errors: tuple[str, ...] = ()

  def rename(self, saved: Mapping[Path, Any]) -> dict[Path, Any]:
    """Returns the saved leaves, without dropped ones, by their wanted paths.

    A leaf that nothing is mapped to keeps its saved path. Of those that are
    mapped, the given ones are returned.
    """
    mapped = {*self.sources.values(), *self.dropped}
    return {
      **{path: x for path, x in saved.items() if path not in mapped},
      **{
        path: saved[source]
        for path, source in self.sources.items()
        if source in saved
      },
    }


def map_leaves(
  saved: Mapping[Path, Any],
  wanted: Mapping[Path, Any],
  foreign: Mapping[str, Mapping[Path, Path]] | None = None,
) -> LeafMapping:
  """Finds the saved leaf for each wanted one, by their paths alone.

  Args:
    saved: The leaves on disk, by path.
    wanted: The leaves of the train state to restore, by path.
    foreign: By wrapper name: the paths in a plain Flax train state that the
      wrapper can migrate, and the path in its own state that each becomes.

  Returns:
    The mapping. A leaf without a counterpart is in none of its parts.

  Example:
    >>> saved = {("opt_state", "inner_state", "count"): 0, **{
    ...     ("opt_state", name): 0
    ...     for name in ("notfinite_count", "last_finite", "total_notfinite")}}
    >>> map_leaves(saved, {("opt_state", "count"): 0}).sources
    {('opt_state', 'count'): ('opt_state', 'inner_state', 'count')}
  """
  saved_layers, saved_core = _find_layers(saved)
  wanted_layers, wanted_core = _find_layers(wanted)
  sources: dict[Path, Path] = {}
  fresh: set[Path] = set()
  dropped: set[Path] = set()
  notes: list[str] = []
  errors: list[str] = []

  # Each wanted part of the optimizer state, and the saved part for it: the
  # optimizer inside all layers, and every layer that both have.
  parts = {wanted_core: saved_core}
  for layer, at in wanted_layers.items():
    if layer in saved_layers:
      parts[at] = saved_layers[layer]
      continue
    fresh.update(_leaves_of_layer(wanted, layer, at))
    notes.append(f"it has no state of {layer[0].name}: that starts fresh")
  for layer, at in saved_layers.items():
    if layer not in wanted_layers:
      if layer[0].needed_because:
        errors.append(
          f"it was saved with {layer[0].name}: {layer[0].needed_because}."
        )
      dropped.update(_leaves_of_layer(saved, layer, at))
      accumulated = "acc_grads" in layer[0].fields
      notes.append(
        f"{layer[0].name} around its optimizer is taken off, with its counts"
        + (" and accumulated gradients" if accumulated else "")
      )

  for name, paths in (foreign or {}).items():
    field_names = {path[0] for path in paths}
    known = {path for path in saved if path[0] in field_names} == paths.keys()
    if not known or any(path[0] in field_names for path in wanted):
      continue  # another layout, or the wanted state has the field itself
    if not dropped.union(sources.values()).isdisjoint(paths):
      continue  # another wrapper has migrated it
    fields = ", ".join(map(repr, sorted(field_names)))
    prefix = (WRAPPER_STATES, name)
    targets = {(*prefix, *target): path for path, target in paths.items()}
    if targets.keys() <= wanted.keys() and not has_prefix(saved, prefix):
      sources |= targets
      notes.append(f"its field {fields} becomes the state of wrapper {name!r}")
    else:
      dropped.update(paths)
      notes.append(f"it has a field {fields}: left alone")

  for name in sorted(_wrapper_names(wanted) - _wrapper_names(saved)):
    missing = {p for p in wanted if p[:2] == (WRAPPER_STATES, name)}
    if missing.isdisjoint(sources):
      notes.append(f"it has no state of wrapper {name!r}: that starts fresh")
    fresh.update(missing - sources.keys())
  for name in sorted(_wrapper_names(saved) - _wrapper_names(wanted)):
    dropped.update(p for p in saved if p[:2] == (WRAPPER_STATES, name))
    notes.append(f"it has a state of wrapper {name!r}: left alone")

  for path in wanted:
    if path in fresh or path in sources:
      continue
    source = path
    # Longest first: the innermost part that the path lies in.
    for length in range(len(path), 0, -1):
      if path[:length] in parts:
        source = (*parts[path[:length]], *path[length:])
        break
    if source not in saved:
      source = (*source, _BOX)
    if source in saved and source not in dropped:
      sources[path] = source
  return LeafMapping(
    sources, frozenset(fresh), frozenset(dropped), tuple(notes), tuple(errors)
  )


def has_prefix(leaves: Mapping[Path, Any], prefix: Path) -> bool:
  """Returns whether a path of some leaves begins with `prefix`."""
  return any(path[: len(prefix)] == prefix for path in leaves)


def _wrapper_names(leaves: Mapping[Path, Any]) -> set[str]:
  """Returns the names of the wrappers that leaves belong to."""
  return {path[1] for path in leaves if path[0] == WRAPPER_STATES}


def _find_layers(
  leaves: Mapping[Path, Any],
) -> tuple[dict[_Layer, Path], Path]:
  """Returns the layers around an optimizer, and the path of its own state.

  The layers are by their paths, outermost first.
  """
  at = _OPT_STATE
  layers: dict[_Layer, Path] = {}
  while True:
    children = {
      p[len(at)] for p in leaves if len(p) > len(at) and p[: len(at)] == at
    }
    for kind in _LAYER_KINDS:
      allowed = kind.fields | kind.optional_fields | {kind.inner}
      if kind.fields <= children <= allowed:
        count = sum(k is kind for k, _ in layers)
        layers[kind, count] = at
        at = (*at, kind.inner)
        break
    else:
      return layers, at


def _leaves_of_layer(
  leaves: Mapping[Path, Any], layer: _Layer, at: Path
) -> list[Path]:
  """Returns the paths of a layer, without those of the optimizer inside."""
  names = layer[0].fields | layer[0].optional_fields
  return [p for p in leaves if p[: len(at)] == at and p[len(at)] in names]
