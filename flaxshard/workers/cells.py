"""Divides the center of sequential commits into cells, and updates one.

A cell is what one owner has of the fragments that are committed together: the
parameters, their slots and the step counts. All of it changes with each commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from flaxshard.state import host_commits
from flaxshard.workers import encoding
from flaxshard.wrappers import agn_schedule
from flaxshard.wrappers import base

PyTree = Any
Arrays = Mapping[str, Any]
Fragments = tuple[int, ...]
Cell = tuple[int, Fragments]  # the index of the owner's part, and fragments

_PARAMS, _COLLECTIONS = "params/", "collections/"
_LAGS = "fragment_counts/"


class Cells:
  """The cells of a center.

  Args:
    state: The first train state of a worker.
    num_parts: The number of owners.
  """

  def __init__(self, state: PyTree, num_parts: int):
    agn = host_commits.find(state.wrappers)
    assert agn is not None
    num_parts = num_parts if host_commits.is_splittable(state) else 1
    self._template = _make_template(state, agn)
    self.keys: dict[Cell, tuple[str, ...]] = {}
    self.quantized: dict[Fragments, frozenset[str]] = {}
    for fragments in agn_schedule.groups_of(agn):
      found = host_commits.reductions(state, fragments)
      _, commit = jax.eval_shape(
        lambda s, f=fragments: host_commits.take(s, f), state
      )
      sizes = {k: 4 * commit[k].size for k in found if not k.startswith("@")}
      for part, keys in enumerate(_divide(sizes, num_parts)):
        self.keys[part, fragments] = keys
      self.quantized[fragments] = host_commits.quantized_keys(state, fragments)
    self._update = jax.jit(self._update_cell, static_argnums=0)

  def of(self, fragments: Fragments) -> list[Cell]:
    """Returns the cells of the fragments of a commit."""
    return [cell for cell in self.keys if cell[1] == fragments]

  def split(self, center: Any) -> dict[Cell, dict[str, np.ndarray]]:
    """Returns the arrays of all cells of a center."""
    return {
      cell: {
        name: np.asarray(x)
        for name, x in host_commits.get_part(center, keys).items()
      }
      for cell, keys in self.keys.items()
    }

  def join(self, center: Any, cells: Mapping[Cell, Arrays]) -> Any:
    """Returns a center with the arrays of all cells.

    Args:
      center: A center, for its number of commits.
      cells: The result of `split`, or newer arrays.
    """
    merged: dict[str, Any] = {}
    # Of the cells that `merged` is from.
    commits: dict[str, int] = {}
    of_fragments: dict[str, dict[int, Any]] = {}
    for (_, fragments), arrays in cells.items():
      counts = _counts_by_lag(center, arrays)
      for name, x in arrays.items():
        if name in counts:
          for f in fragments:
            of_fragments.setdefault(name, {})[f] = arrays[counts[name]] - x[f]
        elif name in merged and name in counts.values():
          # A step count, which is in every cell.
          merged[name] = np.maximum(merged[name], x)
        elif name != "commits" and int(arrays["commits"]) >= commits.get(
          name, 0
        ):
          # Collections and statistics are in every commit of any fragments, and
          # what belongs to no parameter, such as a PRNG key, in every cell.
          merged[name] = x
          commits[name] = int(arrays["commits"])
    for lags, of_fragment in of_fragments.items():
      newest = merged[
        _counts_by_lag(center, merged | dict.fromkeys([lags]))[lags]
      ]
      merged[lags] = np.array(
        [newest - of_fragment[f] for f in sorted(of_fragment)], np.int32
      )
    return host_commits.put_part(center, merged)

  def update(
    self, cell: Cell, arrays: Arrays, commit: Arrays
  ) -> dict[str, np.ndarray]:
    """Returns the arrays of a cell after one commit.

    Args:
      cell: The cell.
      arrays: Its arrays.
      commit: Its keys of a commit, and those that begin with `@`.
    """
    with encoding.on_host():
      new = self._update(cell, dict(arrays), dict(commit))
    return {name: np.asarray(x) for name, x in new.items()}

  def _update_cell(self, cell: Cell, arrays: Arrays, commit: Arrays) -> Any:
    # Where nothing else is read, XLA leaves the zeros of the template out.
    state = jax.tree.map(
      lambda x: (
        jax.numpy.zeros(x.shape, x.dtype)
        if isinstance(x, jax.ShapeDtypeStruct)
        else x
      ),
      self._template,
    )
    center = host_commits.put_part(host_commits.center_of(state), arrays)
    center = host_commits.update_center(state, center, cell[1], commit)
    return host_commits.get_part(center, self.keys[cell])


def to_list(cell: Cell) -> list[Any]:
  """Returns a cell as a value for a message."""
  return [cell[0], list(cell[1])]


def to_cell(value: list[Any]) -> Cell:
  """Undoes `to_list`."""
  return value[0], tuple(value[1])


def answer_of(arrays: Arrays) -> dict[str, np.ndarray]:
  """Returns the arrays of a cell that a worker continues from: no slots."""
  return {
    name: x
    for name, x in arrays.items()
    if name.startswith((_PARAMS, _COLLECTIONS))
  }


def params_of(arrays: Arrays) -> dict[str, Any]:
  """Returns the parameters among the arrays of a cell, by path."""
  return _without_prefix(arrays, _PARAMS)


def collections_of(arrays: Arrays) -> dict[str, Any]:
  """Returns the collections among the arrays of a cell, by path."""
  return _without_prefix(arrays, _COLLECTIONS)


def _without_prefix(arrays: Arrays, prefix: str) -> dict[str, Any]:
  return {
    name.removeprefix(prefix): x
    for name, x in arrays.items()
    if name.startswith(prefix)
  }


def _divide(sizes: Mapping[str, int], count: int) -> list[tuple[str, ...]]:
  """Divides keys by bytes into at most `count` groups, none of them empty."""
  groups: list[list[str]] = [[] for _ in range(count)]
  totals = [0] * count
  # The largest first, each to the group that has least.
  for key in sorted(sizes, key=lambda k: (-sizes[k], k)):
    smallest = totals.index(min(totals))
    groups[smallest].append(key)
    totals[smallest] += max(sizes[key], 1)
  return [tuple(sorted(group)) for group in groups if group]


def _make_template(state: PyTree, agn: Any) -> PyTree:
  """Returns a state of shapes, with the values of wrappers inside of AGN."""

  def to_shape(x: jax.Array) -> Any:
    # There are no zeros of PRNG keys.
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
      return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype)

  shapes = jax.tree.map(to_shape, state)
  inner = state.wrappers[state.wrappers.index(agn) + 1 :]
  names = [base.name_of(w) for w in inner]
  values = {
    name: jax.tree.map(np.asarray, state.wrapper_states[name]) for name in names
  }
  return shapes.replace(wrapper_states={**shapes.wrapper_states, **values})


def _counts_by_lag(center: Any, arrays: Arrays) -> dict[str, str]:
  """Returns the names of step counts by that of the lags of fragments.

  `AGNState.fragment_counts` says by how much those of each fragment lag.
  """
  field = "outer_opt_state/" if center.outer_opt_state else "opt_state/"
  counts = {
    _LAGS + name.removeprefix(field).replace("/", "-"): name
    for name in arrays
    if name.startswith(field)
  }
  return {lags: name for lags, name in counts.items() if lags in arrays}
