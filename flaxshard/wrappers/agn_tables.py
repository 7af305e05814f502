"""Tables that AGN has to commit as a whole, though their gradients are rows."""

from __future__ import annotations

from typing import Any

import jax

from flaxshard.core import checks
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import parameter_groups
from flaxshard.core import trees
from flaxshard.core.parameter_groups import SparseRows

PyTree = Any


def find_whole(tx: Any, params: PyTree) -> set[trees.Path]:
  """Returns the parameters that an optimizer may change in all rows.

  Args:
    tx: The optax optimizer.
    params: The parameters of a train state.

  Returns:
    Their paths in `params`.
  """
  mask = parameter_groups.sparse_mask(tx, params)
  paths = trees.paths(params)
  if mask is None:
    return set(paths)
  whole = {
    path
    for path, is_table in zip(paths, jax.tree.leaves(mask), strict=True)
    if not is_table
  }
  return whole | _in_params(tx.whole_tables, params)


def find_decaying(tx: SparseRows, params: PyTree) -> list[str]:
  """Returns the tables whose rows decay when they are brought up to date.

  Args:
    tx: The optimizer.
    params: The parameters of a train state.
  """
  return sorted(map(trees.path_string, _in_params(tx.decaying_tables, params)))


def warn_of_whole_tables(outer_tx: Any, tx: SparseRows, params: PyTree) -> None:
  """Warns if `outer_tx` updates tables of `tx` as a whole.

  Args:
    outer_tx: The optimizer of the center.
    tx: The optimizer of the local steps.
    params: The parameters of a train state.
  """
  mask = parameter_groups.sparse_mask(tx, params)
  whole = find_whole(outer_tx, params)
  names = [
    trees.path_string(path)
    for path, is_table in jax.tree_util.tree_leaves_with_path(mask)
    if is_table and path in whole
  ]
  if names:
    checks.warn(
      f"AGN: tx updates {', '.join(names)} by rows, but outer_tx as a whole: "
      "replicas exchange rows, and each commit reads and writes whole tables. "
      "If outer_tx may leave the other rows as they are, give "
      f"outer_tx=flaxshard.sparse_rows(outer_tx, {list(tx.patterns)!r})."
    )


def _in_params(find: Any, params: PyTree) -> set[trees.Path]:
  """Returns the paths that `find` returns, as paths in `params`."""
  optimized = opt_state_lib.optimized_params(params)
  found = find(optimized)
  if optimized is params:
    return found
  # Without the collection of Flax's fp8 layers, the paths are those within the
  # collection of parameters.
  return {path for path in trees.paths(params) if path[1:] in found}
