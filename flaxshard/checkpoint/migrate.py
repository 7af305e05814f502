"""Maps the leaves of a saved train state to the leaves of the wanted one.

The two may differ in layout. Loss scaling may have been done with a field of
the train state (Flax's `DynamicScale`), which becomes the state of a wrapper
that knows it. Wrapper states come and go.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

Path = tuple[str, ...]

WRAPPER_STATES = "wrapper_states"
# The array in an nnx.Variable or a nn.Partitioned that was saved as an object.
_BOX = "value"


@dataclasses.dataclass(frozen=True)
class LeafMapping:
  """Which saved leaf becomes which wanted leaf.

  Attributes:
    sources: The saved path of each wanted leaf that the checkpoint has.
    fresh: The wanted paths of wrapper states that the checkpoint lacks.
    dropped: The saved paths that are not read.
    notes: Sentences about it, for the log.
  """

  sources: Mapping[Path, Path]
  fresh: frozenset[Path]
  dropped: frozenset[Path]
  notes: tuple[str, ...]

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
  """
  sources: dict[Path, Path] = {}
  fresh: set[Path] = set()
  dropped: set[Path] = set()
  notes: list[str] = []

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
    for source in (path, (*path, _BOX)):
      if path in fresh or path in sources:
        break
      if source in saved and source not in dropped:
        sources[path] = source
        break
  return LeafMapping(
    sources, frozenset(fresh), frozenset(dropped), tuple(notes)
  )


def has_prefix(leaves: Mapping[Path, Any], prefix: Path) -> bool:
  """Returns whether a path of some leaves begins with `prefix`."""
  return any(path[: len(prefix)] == prefix for path in leaves)


def _wrapper_names(leaves: Mapping[Path, Any]) -> set[str]:
  """Returns the names of the wrappers that leaves belong to."""
  return {path[1] for path in leaves if path[0] == WRAPPER_STATES}
