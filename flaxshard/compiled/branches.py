"""Merges equal instructions that stand in all branches of a conditional."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from flaxshard.compiled import hlo

# The branches around an instruction, as in `executions.CallSite.branches`.
Path = tuple[tuple[str, int], ...]


def merge(
  program: hlo.Program, items: Sequence[tuple[Path, Hashable]]
) -> dict[int, Path]:
  """Merges equal items that stand in all branches of a conditional.

  One of them runs at every call: it counts once, as outside of the conditional.

  Args:
    program: The program.
    items: The branches around each item, and a key that equal items share.

  Returns:
    The positions of the items that remain, and the branches that are around
    each: without the conditionals that it runs in always.
  """
  paths = {number: path for number, (path, _) in enumerate(items)}
  keys = [key for _, key in items]
  num_branches = {
    i.name: len(i.called)
    for computation in program.computations.values()
    for i in computation.instructions.values()
    if i.opcode == "conditional"
  }
  # Innermost conditionals first: what runs in all their branches runs always
  # in the branch around them.
  for depth in range(max(map(len, paths.values()), default=0), 0, -1):
    inner = {path for path in paths.values() if len(path) == depth}
    for name, outer in {(path[-1][0], path[:-1]) for path in inner}:
      branches = [(*outer, (name, k)) for k in range(num_branches[name])]
      _merge_one(paths, keys, outer, branches)
  return paths


def _merge_one(
  paths: dict[int, Path],
  keys: list[Hashable],
  outer: Path,
  branches: list[Path],
) -> None:
  """Moves what all branches of a conditional have out of it."""
  counts = {branch: Counter[Hashable]() for branch in branches}
  for number, path in paths.items():
    if path in counts:
      counts[path][keys[number]] += 1
  common = counts[branches[0]].copy()
  for count in counts.values():
    common &= count
  left = {branch: common.copy() for branch in branches}
  for number, path in list(paths.items()):
    if path in left and left[path][keys[number]] > 0:
      left[path][keys[number]] -= 1
      if path == branches[0]:
        paths[number] = outer
      else:
        del paths[number]
