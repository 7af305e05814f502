"""PerReplica: rows, arithmetic, and one value for all replicas instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.replicas import values

EIGHT = fs.Strategy()


def test_per_replica_is_a_sequence():
  losses = fs.PerReplica(jnp.array([1.0, 3.0]))
  assert [float(x) for x in losses] == [1.0, 3.0]
  assert len(losses) == 2 and float(losses[-1]) == 3.0
  assert np.mean(losses) == 2.0
  assert np.asarray(losses, np.float64).dtype == np.float64
  tree = fs.PerReplica({"a": jnp.arange(2), "b": jnp.ones((2, 3))})
  assert len(tree) == 2 and tree[1]["b"].shape == (3,)
  with pytest.raises(IndexError, match="got 2"):
    losses[2]


def test_mean_of_a_per_replica():
  x = fs.PerReplica(jnp.array([[1.0, 2.0], [3.0, 6.0]]))
  assert float(x.mean()) == float(np.mean(x)) == 3.0
  assert x.mean(axis=0).tolist() == [2.0, 4.0]
  losses = EIGHT.run(lambda: jnp.float16(60_000))
  assert float(losses.mean()) == 60_000


@pytest.mark.parametrize(
  "convert",
  [float, bool],
)
def test_one_number_of_a_per_replica_loss_raises(convert):
  losses = fs.PerReplica(jnp.ones(8))
  with pytest.raises(TypeError, match=r"8 replicas.* x\.mean\(\) .*x\[0\]"):
    convert(losses)


def test_per_replica_is_a_pytree():
  doubled = jax.tree.map(lambda x: 2 * x, fs.PerReplica(jnp.arange(3)))
  assert isinstance(doubled, fs.PerReplica)
  assert np.asarray(doubled).tolist() == [0, 2, 4]
  assert values.is_per_replica(doubled) and not values.is_per_replica([doubled])


def test_mean_over_replicas_and_broadcast_to_replicas():
  keys = jax.random.split(jax.random.key(0), 8)
  tree = {
    "mean": EIGHT.distribute_values_from_function(
      lambda context: np.full((2, 3), context.replica_id_in_sync_group, "f4")
    ),
    "count": fs.PerReplica(jnp.arange(8)),
    "key": fs.PerReplica(keys),
    "shared": jnp.ones(3),
  }
  merged = values.mean_over_replicas(tree)
  np.testing.assert_array_equal(merged["mean"], np.full((2, 3), 3.5))
  assert int(merged["count"]) == 0
  assert (
    jax.random.key_data(merged["key"]) == jax.random.key_data(keys[0])
  ).all()
  assert merged["shared"] is tree["shared"]

  spread = values.broadcast_to_replicas(merged, tree)
  assert jax.tree.structure(spread) == jax.tree.structure(tree)
  for i in (0, 7):
    np.testing.assert_array_equal(spread["mean"][i], merged["mean"])
    assert spread["key"][i] == merged["key"]
  where = spread["mean"].value.sharding
  assert where == tree["mean"].value.sharding
