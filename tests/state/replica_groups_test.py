"""States whose groups of replicas diverge."""

import tempfile

import grouped
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import flaxshard as fs
from flaxshard.state import replica_groups

P = jax.sharding.PartitionSpec

pytestmark = pytest.mark.filterwarnings("ignore:CrossShard")


# Values whose bits a sum over replicas would change, or whose dtype it refuses.
ODD = {
  "zero": np.float32(-0.0),
  "nan": np.array([np.nan, np.inf, 1e-45], np.float32),
  "bfloat16": np.array([1.5, -0.0], jnp.bfloat16),
  "float8": np.array([1.5, -0.0], jnp.float8_e4m3fn),
  "complex": np.array([1 - 2j, -0.0], np.complex64),
  "int8": np.array([-128, 127], np.int8),
}


@pytest.fixture(scope="module")
def diverged():
  """Returns a state of two groups, and the shards of replica 0 by leaf."""
  strategy = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  split = jax.NamedSharding(strategy.mesh, P(None, "model"))
  params = {
    "w": jax.device_put(np.ones((5, 64), np.float32), split),
    "b": np.ones(64, np.float32),
  }
  state = grouped.create(
    strategy,
    fs.CrossShard("mean", ((1, 3), (0, 2))),
    params=params,
    tx=optax.sgd(1.0, momentum=0.9),
    rngs={"key": jax.random.key(3), "flag": np.array(True), **ODD},
  )
  state, _ = strategy.run(
    grouped.train_step, args=(state, strategy.shard_batch(grouped.X))
  )
  first = set(strategy.mesh.devices[0].flat)
  wanted = [
    {
      str(s.index): np.asarray(s.data)
      for s in data_of(x).addressable_shards
      if s.device in first
    }
    for x in jax.tree.leaves(carried(state))
  ]
  return state, wanted


def carried(state):
  return state.params, state.opt_state, state.rngs


def data_of(x):
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return jax.random.key_data(x) if is_key else x


def assert_on_all_devices(state, wanted):
  """Checks that every device has the bytes that replica 0 had."""
  for x, parts in zip(jax.tree.leaves(carried(state)), wanted, strict=True):
    shards = data_of(x).addressable_shards
    assert len(shards) == 8
    for shard in shards:
      wanted_bytes = parts[str(shard.index)].tobytes()
      assert np.asarray(shard.data).tobytes() == wanted_bytes


def test_of_first_replica_keeps_every_bit(diverged) -> None:
  state, wanted = diverged
  for x in (state.params["b"], *jax.tree.leaves(state.opt_state)):
    assert len({held.tobytes() for held in grouped.on_each(x)}) > 1
  new = replica_groups.of_first_replica(state)
  assert new.params["w"].sharding == state.params["w"].sharding
  assert_on_all_devices(new, wanted)


def test_checkpoint_has_the_state_of_replica_0(diverged, caplog) -> None:
  state, wanted = diverged
  directory = tempfile.mkdtemp()
  with caplog.at_level("INFO", "flaxshard"):
    with fs.Checkpointer(directory) as checkpointer:
      checkpointer.save(1, state)
      restored = checkpointer.restore(state)
  assert "CrossShard" in caplog.text
  assert "(0, 2)" in caplog.text
  assert_on_all_devices(restored, wanted)
  plain = ocp.StandardCheckpointer().restore(f"{directory}/1/default")
  wanted = grouped.on_each(state.params["b"])[0]
  np.testing.assert_array_equal(plain["params"]["b"], wanted)
