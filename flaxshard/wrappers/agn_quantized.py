"""Reduces the commits of AGN in fewer bits, with error feedback.

Each replica sends every other replica its part of the gradients, quantized. It
reduces the parts that it receives in float32, quantizes the result, and sends
that to all replicas. What quantization has cut off, in both directions, stays
in the accumulators: the center receives it with later commits.

Error feedback: Seide et al., 1-bit stochastic gradient descent, Interspeech
2014; Karimireddy et al., 2019 (arXiv:1901.09847).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxshard.core import block_quantization
from flaxshard.core import gradients
from flaxshard.core import tracing
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import logical_shards
from flaxshard.wrappers import agn_rows
from flaxshard.wrappers import elementwise
from flaxshard.wrappers.agn_rows import Leaf

PyTree = Any


def reduce_quantized(
  op: str, grads: PyTree, params: PyTree, fmt: str
) -> tuple[PyTree, PyTree]:
  """Sums or averages the gradients of a commit over the replicas.

  Scalars, complex gradients and Flax's statistics are not quantized.

  Args:
    op: `"sum"` or `"mean"`.
    grads: The arrays that this replica commits; None for leaves without.
    params: The center's parameters.
    fmt: A format of `block_quantization`.

  Returns:
    The reduced gradients, and for each the remainder: what this replica adds to
    its next commit. The remainder is None where nothing was quantized.
  """
  if replica_context.num_replicas() == 1:
    return grads, jax.tree.map(lambda _: None, grads)
  treedef: Any = jax.tree.structure(grads)
  leaves = jax.tree_util.tree_leaves_with_path(grads)
  quantized = {i: g for i, (path, g) in enumerate(leaves) if _fits(path, g)}
  others = [None if i in quantized else g for i, (_, g) in enumerate(leaves)]
  reduced = treedef.flatten_up_to(
    replica_context.reduce_gradients(op, treedef.unflatten(others))
  )
  remainders: list[Any] = [None] * len(leaves)
  if quantized:
    all_specs = jax.tree.leaves(logical_shards.gradient_specs(params, grads)[1])
    specs = [all_specs[i] for i in quantized]
    sums, rests = logical_shards.on_logical_devices(
      lambda given: _reduce_parts(op, given, fmt), (specs,), (specs, specs)
    )(replica_context.mark_gradients(list(quantized.values())))
    for i, total, rest in zip(quantized, sums, rests, strict=True):
      reduced[i], remainders[i] = total, rest
  return treedef.unflatten(reduced), treedef.unflatten(remainders)


def keep_remainders(accum: PyTree, remainders: PyTree) -> PyTree:
  """Returns accumulators after a commit: the remainders, elsewhere as given."""
  return jax.tree.map(
    lambda a, r: a if r is None else r.astype(a.dtype),
    accum,
    remainders,
    is_leaf=lambda x: x is None,
  )


def _fits(path: trees.Path, g: jax.Array) -> bool:
  """Returns whether a gradient is quantized."""
  return (
    jnp.issubdtype(g.dtype, jnp.floating)
    and g.ndim > 0
    and g.size > 0
    and not gradients.is_statistic(path)
  )


def _reduce_parts(
  op: str, grads: list[jax.Array], fmt: str
) -> tuple[list[jax.Array], list[jax.Array]]:
  """Returns the reduced gradients and the remainders, on one device."""
  count = replica_context.num_replicas()
  replica = jax.lax.axis_index(mesh_lib.REPLICA)
  splits = [
    Leaf(g.shape, g.dtype, agn_rows.choose_dim(g.shape, count), count)
    for g in grads
  ]
  assert all(leaf.dim != elementwise.WHOLE for leaf in splits)
  rows = [leaf.to_rows(g) for leaf, g in zip(splits, grads, strict=True)]
  sent = _encode(rows, fmt)
  with jax.named_scope(tracing.QUANTIZED_SCOPE):
    received = jax.lax.all_to_all(sent, mesh_lib.REPLICA, 0, 0)
  weight = count if op == "mean" else 1
  # Each replica reduces its part.
  parts = [x.sum(0) / weight for x in _decode(received, splits, fmt)]
  encoded = _encode(parts, fmt)
  with jax.named_scope(tracing.QUANTIZED_SCOPE):
    gathered = jax.lax.all_gather(encoded, mesh_lib.REPLICA)
  totals = _decode(gathered, splits, fmt)
  rests = [
    x - own for x, own in zip(rows, _decode(sent, splits, fmt), strict=True)
  ]
  # The remainder of a part of the mean is that of all replicas: the one that
  # keeps it weighs 1 / count in the next mean.
  rests = [
    rest.at[replica].add((part - own) * weight)
    for rest, part, own in zip(
      rests, parts, _decode(encoded, splits, fmt), strict=True
    )
  ]
  return (
    [
      leaf.from_rows(x).astype(leaf.dtype)
      for leaf, x in zip(splits, totals, strict=True)
    ],
    [
      leaf.from_rows(_drop_nonfinite(x))
      for leaf, x in zip(splits, rests, strict=True)
    ],
  )


def _drop_nonfinite(rest: jax.Array) -> jax.Array:
  """Returns a remainder with zeros where a commit was infinite or NaN.

  Otherwise all later commits would be, also where the center skips this one.
  """
  return jnp.where(jnp.isfinite(rest), rest, 0)


def _encode(rows: list[jax.Array], fmt: str) -> jax.Array:
  """Returns the bytes of all leaves one after another: `[..., bytes]`."""
  return jnp.concatenate([block_quantization.encode(x, fmt) for x in rows], -1)


def _decode(data: jax.Array, splits: list[Leaf], fmt: str) -> list[jax.Array]:
  """Returns the parts of each leaf: `[..., part_size]`."""
  parts, start = [], 0
  for leaf in splits:
    size = block_quantization.num_bytes(leaf.part_size, fmt)
    piece = data[..., start : start + size]
    parts.append(block_quantization.decode(piece, leaf.part_size, fmt))
    start += size
  return parts
