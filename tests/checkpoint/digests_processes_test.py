"""Digests, and falling back, with two processes that save together."""

import two_processes

SCRIPT = """
import jax.numpy as jnp
import numpy as np
import optax
import pathlib
import flaxshard as fs
from flaxshard.checkpoint import digests
from flaxshard.checkpoint import metadata_item
from jax.experimental import multihost_utils

path = pathlib.Path(sys.argv[3])
strategy = fs.Strategy(mesh_shape={"replica": 4})
def make(value):
  state = fs.TrainState.create(
    apply_fn=None, params={"w": jnp.full(8, value)}, tx=optax.adam(0.1),
    wrappers=[fs.LossScale("dynamic")])
  return jax.device_put(
    state, jax.NamedSharding(strategy.mesh, jax.P()))

with fs.Checkpointer(path) as checkpointer:
  for step in (1, 2, 3):
    checkpointer.save(step, make(float(step)))
  checkpointer.wait()
  multihost_utils.sync_global_devices("saved")
  metadata = metadata_item.read_metadata(path / "3")
  assert (metadata["processes"], metadata["devices"]) == (2, 4), metadata
  assert metadata["mesh"] == {"replica": 4}
  for step in (1, 2, 3):
    assert digests.verify_together(path / str(step))
  # A file of each of the two later steps; who compares it is not said.
  if rank == 0:
    for step, name in ((3, "default/_METADATA"), (2, "wrappers/_METADATA")):
      file = path / str(step) / name
      file.write_bytes(file.read_bytes()[:-1])
  multihost_utils.sync_global_devices("damaged")
  state = checkpointer.restore(make(0.0))
  assert checkpointer.restored_step == 1
  shard = state.params["w"].addressable_data(0)
  np.testing.assert_array_equal(shard, np.ones_like(shard))
  checkpointer.save(2, make(5.0))
  checkpointer.wait()
  multihost_utils.sync_global_devices("saved again")
  assert list(checkpointer.all_steps()) == [1, 2]
  state = checkpointer.restore(make(0.0))
  assert checkpointer.restored_step == 2
names = sorted(p.name for p in path.iterdir() if p.is_dir())
assert names == ["1", "2", "2.damaged", "3.damaged"], names
print("same")
"""


def test_two_processes_pass_over_the_same_steps(tmp_path):
  outs = two_processes.run(SCRIPT, str(tmp_path / "checkpoints"))
  for out, err in outs:
    assert out.splitlines()[-1] == "same"
    assert err.count("passed over") == 2
