"""The schedule of AGN's commits: which fragment is committed at which step.

The parameters are divided into fragments: contiguous groups of leaves with
about the same number of bytes. Fragments are numbered from 0, in the order of
the leaves. Fragment p is committed at the local steps s with
`s % period == offset * (p + 1 - fragments) % period`: the last one at the
multiples of the period, each other one `offset` steps before the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import math
from typing import Any

import jax
import jax.numpy as jnp

from flaxshard.core import trees
from flaxshard.core.indexed_slices import is_indexed_slices

PyTree = Any


def offset_of(agn: Any) -> int:
  """Returns the local steps between the commits of consecutive fragments.

  Args:
    agn: An `AGN` wrapper.
  """
  if agn.fragment_offset is None:
    return agn.communication_period // agn.fragments
  return agn.fragment_offset


def phase_of(agn: Any, fragment: int) -> int:
  """Returns the remainder of the local steps at which a fragment is committed.

  Args:
    agn: An `AGN` wrapper.
    fragment: The number of the fragment.

  Example:
    >>> import flaxshard as fs
    >>> agn = fs.AGN(12, fragments=3)
    >>> [phase_of(agn, p) for p in range(3)]
    [4, 8, 0]
  """
  lead = fragment + 1 - agn.fragments
  return offset_of(agn) * lead % agn.communication_period


def groups_of(agn: Any) -> tuple[tuple[int, ...], ...]:
  """Returns the fragments that are committed together, in order of commits.

  Args:
    agn: An `AGN` wrapper.

  Example:
    >>> import flaxshard as fs
    >>> groups_of(fs.AGN(12, fragments=3))
    ((0,), (1,), (2,))
    >>> groups_of(fs.AGN(12, fragments=3, fragment_offset=0))
    ((0, 1, 2),)
  """
  groups: dict[int, tuple[int, ...]] = {}
  for fragment in range(agn.fragments):
    phase = phase_of(agn, fragment)
    groups[phase] = (*groups.get(phase, ()), fragment)
  return tuple(groups.values())


def due(agn: Any, local_step: int) -> tuple[int, ...]:
  """Returns the fragments that are committed after a local step.

  Args:
    agn: An `AGN` wrapper.
    local_step: The number of local steps that have been taken.

  Returns:
    Their numbers; `()` if none is.

  Example:
    >>> import flaxshard as fs
    >>> [due(fs.AGN(4, fragments=2), step) for step in range(1, 5)]
    [(), (0,), (), (1,)]
  """
  if local_step < 1:
    return ()
  remainder = local_step % agn.communication_period
  return tuple(p for p in range(agn.fragments) if phase_of(agn, p) == remainder)


def arriving(agn: Any, local_step: int) -> tuple[int, ...]:
  """Returns the fragments whose commit is applied after a local step.

  They were committed `delay` local steps ago.

  Args:
    agn: An `AGN` wrapper.
    local_step: The number of local steps that have been taken.
  """
  return due(agn, local_step - agn.delay)


def steps_since_last_commit(agn: Any, fragments: Sequence[int]) -> int:
  """Returns the local steps from the last commit to that of some fragments.

  Args:
    agn: An `AGN` wrapper.
    fragments: The fragments that are committed together.

  Example:
    >>> import flaxshard as fs
    >>> agn = fs.AGN(12, fragments=3, fragment_offset=1)
    >>> [steps_since_last_commit(agn, (p,)) for p in range(3)]
    [10, 1, 1]
  """
  phases = sorted({phase_of(agn, p) for p in range(agn.fragments)})
  phase = phase_of(agn, fragments[0])
  before = phases[phases.index(phase) - 1]
  return (phase - before) % agn.communication_period or agn.communication_period


def steps_after_commit(agn: Any, local_step: jax.Array) -> jax.Array:
  """Returns the local steps since the last commit of any fragment.

  Args:
    agn: An `AGN` wrapper.
    local_step: The number of local steps, an int32 scalar.
  """
  phases = jnp.array([phase_of(agn, p) for p in range(agn.fragments)])
  return jnp.min((local_step - phases) % agn.communication_period)


def uncommitted_steps(agn: Any, local_step: int) -> tuple[int, ...]:
  """Returns how many of the last local steps were not committed yet.

  Args:
    agn: An `AGN` wrapper.
    local_step: The number of local steps that have been taken.

  Returns:
    A number for each fragment.

  Example:
    >>> import flaxshard as fs
    >>> uncommitted_steps(fs.AGN(12, fragments=3), 17)
    (1, 9, 5)
  """
  return tuple(
    min(local_step, (local_step - phase_of(agn, p)) % agn.communication_period)
    for p in range(agn.fragments)
  )


def divide(sizes: Sequence[int], parts: int) -> tuple[int, ...]:
  """Divides a sequence into contiguous parts, the largest as small as possible.

  Args:
    sizes: The sizes of the items.
    parts: The number of parts, at most that of the items. None is empty.

  Returns:
    The number of the part of each item.

  Example:
    >>> divide([1, 1, 4, 2, 2], 3)
    (0, 0, 1, 2, 2)
  """
  low, high = max(sizes, default=0), sum(sizes)
  while low < high:
    middle = (low + high) // 2
    if _fill(sizes, middle)[-1] < parts:
      high = middle
    else:
      low = middle + 1
  # Cut parts in two until there are enough: no part becomes larger.
  numbers = list(_fill(sizes, low))
  while numbers and numbers[-1] + 1 < parts:
    cut = _best_cut(sizes, numbers)
    numbers = [n + (i >= cut) for i, n in enumerate(numbers)]
  return tuple(numbers)


def fragments_by_path(tree: PyTree, fragments: int) -> dict[str, int]:
  """Returns the fragment of each leaf, by its path.

  Args:
    tree: `AGNState.grad_accum`, of one replica or of all. None is no leaf.
    fragments: The number of fragments.

  Raises:
    ValueError: There are more fragments than leaves.

  Example:
    >>> import jax.numpy as jnp
    >>> tree = {"a": jnp.ones(2), "b": jnp.ones(1), "c": jnp.ones(1)}
    >>> fragments_by_path(tree, 2)
    {'a': 0, 'b': 1, 'c': 1}
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  if fragments > max(len(leaves), 1):
    raise ValueError(
      f"AGN: fragments={fragments} must be at most the number of parameters "
      f"with a gradient, {len(leaves)}: a parameter is never split."
    )
  sizes = [math.prod(x.shape) * x.dtype.itemsize for _, x in leaves]
  return {
    trees.path_string(path): number
    for (path, _), number in zip(leaves, divide(sizes, fragments), strict=True)
  }


def fragment_of(path: trees.Path, numbers: Mapping[str, int]) -> int:
  """Returns the fragment of a parameter.

  Those without an accumulator, as Flax's statistics, are in the last one.

  Args:
    path: The path of the parameter.
    numbers: The result of `fragments_by_path`.
  """
  last = max(numbers.values(), default=0)
  return numbers.get(trees.path_string(path), last)


def select(
  tree: PyTree, numbers: Mapping[str, int], fragments: Sequence[int]
) -> PyTree:
  """Returns a tree like the parameters with the leaves of some fragments.

  Args:
    tree: Gradients, or another tree like the parameters.
    numbers: The fragment of each leaf, from `fragments_by_path`.
    fragments: The numbers of the fragments.

  Returns:
    The tree, with None for all other leaves.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x if fragment_of(path, numbers) in fragments else None,
    tree,
    is_leaf=is_indexed_slices,
  )


def _fill(sizes: Sequence[int], capacity: int) -> list[int]:
  """Returns the part of each item, if each part is filled in turn."""
  numbers, number, filled = [], 0, 0
  for i, size in enumerate(sizes):
    if i and filled + size > capacity:
      number, filled = number + 1, 0
    filled += size
    numbers.append(number)
  return numbers or [0]


def _best_cut(sizes: Sequence[int], numbers: Sequence[int]) -> int:
  """Returns where to cut a part: the first item of the new one."""
  totals: dict[int, int] = {}
  for size, number in zip(sizes, numbers, strict=True):
    totals[number] = totals.get(number, 0) + size
  cuts = [i for i in range(1, len(numbers)) if numbers[i] == numbers[i - 1]]
  # Of the largest part that has several items, near its middle.
  largest = max(totals[numbers[i]] for i in cuts)
  cuts = [i for i in cuts if totals[numbers[i]] == largest]
  cuts = [i for i in cuts if numbers[i] == numbers[cuts[0]]]

  def imbalance(cut: int) -> int:
    before = sum(
      s for i, s in enumerate(sizes[:cut]) if numbers[i] == numbers[cut]
    )
    return abs(largest - 2 * before)

  return min(cuts, key=imbalance)
