"""States whose groups of replicas diverge."""

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

# Values whose bits a sum over replicas would change, or whose dtype it refuses.
ODD = {
  "zero": np.float32(-0.0),
  "nan": np.array([np.nan, np.inf, 1e-45], np.float32),
  "bfloat16": np.array([1.5, -0.0], jnp.bfloat16),
  "float8": np.array([1.5, -0.0], jnp.float8_e4m3fn),
  "complex": np.array([1 - 2j, -0.0], np.complex64),
  "int8": np.array([-128, 127], np.int8),
  "flag": np.array(True),
  "key": jax.random.key(3),
}


def shards(state):
  """Returns the shards of each array that has a value for each group."""
  arrays = []
  for x in jax.tree.leaves((state.params, state.opt_state, state.odd)):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    arrays.append(jax.random.key_data(x) if is_key else x)
  return [x.addressable_shards for x in arrays]


@pytest.mark.filterwarnings("ignore:CrossShard")
def test_checkpoint_has_every_bit_of_replica_0(tmp_path, caplog):
  strategy = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  split = jax.NamedSharding(strategy.mesh, P(None, "model"))
  state = grouped.create(
    strategy,
    fs.CrossShard("mean", ((1, 3), (0, 2))),
    params={
      "w": jax.device_put(np.ones((5, 64), np.float32), split),
      "b": np.ones(64, np.float32),
    },
    tx=optax.sgd(1.0, momentum=0.9),
    odd=ODD,
  )
  state, _ = strategy.run(
    grouped.train_step, args=(state, strategy.shard_batch(grouped.X))
  )
  of_replicas = grouped.on_each(state.params["b"])
  assert len({x.tobytes() for x in of_replicas}) == 2
  first = set(strategy.mesh.devices[0].flat)
  wanted = [
    {str(s.index): np.asarray(s.data) for s in parts if s.device in first}
    for parts in shards(state)
  ]
  with caplog.at_level("INFO", "flaxshard"):
    with fs.Checkpointer(tmp_path) as checkpointer:
      checkpointer.save(1, state)
      restored = checkpointer.restore(state)
  assert "CrossShard" in caplog.text and "(0, 2)" in caplog.text
  for new in (restored, replica_groups.of_first_replica(state)):
    assert new.params["w"].sharding == state.params["w"].sharding
    for parts, of_first in zip(shards(new), wanted, strict=True):
      assert len(parts) == 8
      for part in parts:
        got = np.asarray(part.data).tobytes()
        assert got == of_first[str(part.index)].tobytes()
  plain = ocp.StandardCheckpointer().restore(tmp_path / "1" / "default")
  np.testing.assert_array_equal(plain["params"]["b"], of_replicas[0])
