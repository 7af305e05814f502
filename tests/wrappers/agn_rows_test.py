"""Parts of trees and rows: every round trip is exact, for any shape."""

import jax
import jax.numpy as jnp
import numpy as np

import flaxshard as fs
from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import agn_rows
from flaxshard.wrappers import elementwise

TREE = {
  "even": np.arange(32.0, dtype=np.float32).reshape(2, 16),
  "uneven": np.arange(7.0, dtype=np.float32),
  "small": np.arange(2.0, dtype=np.float32),
  "scalar": np.float32(3.0),
  "four": np.arange(3 * 5 * 2.0, dtype=np.float32).reshape(3, 1, 5, 2),
}


def test_choose_dim_needs_the_least_padding():
  for shape, dim in (
    ((), elementwise.WHOLE),
    ((0, 4), elementwise.WHOLE),
    ((3, 16), 1),
    ((16, 8), 0),  # the first one without padding
    ((7, 9), 0),  # 8/7 against 16/9
  ):
    assert agn_rows.choose_dim(shape, 8) == dim, shape


def split_tree(count):
  dims = jax.tree.map(lambda x: agn_rows.choose_dim(x.shape, count), TREE)
  return agn_rows.Parts.of(TREE, dims, count)


def test_rows_hold_all_parts():
  count = 8
  split = split_tree(count)

  @jax.jit
  def pack(tree):
    rows = split.to_rows(tree, np.float32)
    parts = [split.slice_part(tree, i) for i in range(count)]
    return (
      rows,
      parts,
      split.from_rows(rows),
      [split.to_row(part, np.float32) for part in parts],
      [split.from_row(row) for row in rows],
    )

  rows, parts, tree, rows_of_parts, parts_of_rows = pack(TREE)
  assert rows.shape == (count, split.width)
  jax.tree.map(np.testing.assert_array_equal, tree, TREE)
  np.testing.assert_array_equal(rows, rows_of_parts)
  jax.tree.map(np.testing.assert_array_equal, parts, parts_of_rows)
  shapes = jax.tree.map(lambda x: x.shape, parts[0])
  assert shapes == jax.tree.map(lambda x: x.shape, split.shapes)


def test_leaves_of_several_dtypes_share_a_row():
  tree = [jnp.arange(4, dtype=jnp.bfloat16), jnp.arange(3.0)]
  split = agn_rows.Parts.of(tree, [0, 0], 2)
  back = split.from_rows(split.to_rows(tree, np.float32))
  assert [x.dtype for x in back] == [x.dtype for x in tree]
  jax.tree.map(np.testing.assert_array_equal, back, tree)


def test_parts_are_gathered_from_the_replicas():
  strategy = fs.Strategy(devices=jax.devices()[:3])

  def fn(tree):
    split = split_tree(replica_context.num_replicas())
    number = fs.get_replica_context().replica_id_in_sync_group
    return split.gather_parts(split.slice_part(tree, number))

  out = strategy.run(fn, args=(TREE,))
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(x, np.stack([y] * 3)),
    jax.tree.map(
      lambda x: x.value, out, is_leaf=lambda x: isinstance(x, fs.PerReplica)
    ),
    TREE,
  )
