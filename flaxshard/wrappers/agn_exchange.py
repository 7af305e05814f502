"""The exchange of gradients and parameters in a sequential AGN commit."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.wrappers.agn_rows import Leaf
from flaxshard.wrappers.agn_rows import Parts


@dataclasses.dataclass(frozen=True)
class Exchange:
  """Sends the commits of all replicas to where they are applied, and back.

  Every replica receives its part of all commits. It replaces each commit by the
  parameters right after it, in the same memory, and sends them back.

  Attributes:
    grads: The splits of the gradients that are committed.
    params: The splits of the parameters, in the same order. They differ from
      those of the gradients in dtype only.
  """

  grads: tuple[Leaf, ...]
  params: tuple[Leaf, ...]

  def send(self, grads: list[jax.Array]) -> Any:
    """Sends each replica its part of this replica's gradients.

    Returns:
      The parts that this replica received: an array for each large leaf, and
      one row from each replica with the parts of all small leaves.
    """
    large = [
      # In a dtype that holds the parameters exactly as well.
      leaf.send_parts(g.astype(jnp.promote_types(leaf.dtype, param.dtype)))
      for leaf, param, g in zip(self.grads, self.params, grads, strict=True)
      if leaf.is_large
    ]
    if not self._small(self.grads):
      return large, None
    rows = _as_parts(self.grads).to_rows(self._small(grads), self._row_dtype)
    return large, _exchange_rows(rows)

  def read(self, received: Any, k: jax.Array) -> list[jax.Array]:
    """Returns this replica's part of the gradients of replica `k`."""
    large, rows = received
    leaves = [leaf for leaf in self.grads if leaf.is_large]
    return self._merge(
      [
        leaf.read_part(x, k).astype(leaf.dtype)
        for leaf, x in zip(leaves, large, strict=True)
      ],
      [] if rows is None else _as_parts(self.grads).from_row(rows[k]),
    )

  def write(self, received: Any, k: jax.Array, params: list[jax.Array]) -> Any:
    """Replaces the part of the gradients of replica `k` by parameters."""
    large, rows = received
    leaves = [
      (leaf, p)
      for leaf, p in zip(self.params, params, strict=True)
      if leaf.is_large
    ]
    large = [
      leaf.write_part(x, k, p.astype(x.dtype))
      for (leaf, p), x in zip(leaves, large, strict=True)
    ]
    if rows is not None:
      row = _as_parts(self.params).to_row(self._small(params), rows.dtype)
      rows = rows.at[k].set(row)
    return large, rows

  def send_back(self, received: Any) -> list[jax.Array]:
    """Sends each replica the parameters that replaced its gradients."""
    large, rows = received
    leaves = [leaf for leaf in self.params if leaf.is_large]
    large = [
      leaf.send_back(x.astype(leaf.dtype))
      for leaf, x in zip(leaves, large, strict=True)
    ]
    small = []
    if rows is not None:
      # bfloat16 parameters are sent back as bfloat16: half the bytes of
      # float32.
      dtypes = {leaf.dtype for leaf in self._small(self.params)}
      rows = rows.astype(dtypes.pop() if len(dtypes) == 1 else rows.dtype)
      small = _as_parts(self.params).from_rows(_exchange_rows(rows))
    return self._merge(large, small)

  @property
  def _row_dtype(self) -> Any:
    """A dtype that represents every value of a row exactly."""
    dtypes = [leaf.dtype for leaf in (*self.grads, *self.params)]
    return jnp.float64 if jnp.float64 in dtypes else jnp.float32

  def _small(self, leaves: Sequence[Any]) -> list[Any]:
    """Returns the items of a list that belong to small leaves."""
    pairs = zip(self.params, leaves, strict=True)
    return [x for leaf, x in pairs if not leaf.is_large]

  def _merge(self, large: list[Any], small: list[Any]) -> list[Any]:
    """Puts the items of large and small leaves back into one order."""
    items = {True: iter(large), False: iter(small)}
    return [next(items[leaf.is_large]) for leaf in self.params]


def _as_parts(leaves: Sequence[Leaf]) -> Parts:
  """Returns the split of the list of the small leaves among some leaves."""
  small = tuple(leaf for leaf in leaves if not leaf.is_large)
  return Parts(jax.tree.structure([0] * len(small)), small)


def _exchange_rows(rows: jax.Array) -> jax.Array:
  """Sends row i to replica i; row i of the result is from replica i."""
  return jax.lax.all_to_all(rows, mesh_lib.REPLICA, 0, 0)
