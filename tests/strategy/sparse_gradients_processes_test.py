"""Row-sparse gradients of two processes."""

import pathlib

import numpy as np
import pytest
import sparse_states
import two_processes

_TESTS = str(pathlib.Path(__file__).parents[1])

_SCRIPT = """
sys.path[:0] = [sys.argv[3], sys.argv[4]]
import numpy as np
import flaxshard as fs
import sparse_states

P = jax.sharding.PartitionSpec


def shard(strategy, i, bad=None):
  poison = np.zeros(sparse_states.BATCH, np.float32)
  if bad is not None:
    poison[bad] = np.inf
  batch = {**sparse_states.batch(i), "poison": poison}
  # The half of this process.
  half = slice(8 * rank, 8 * rank + 8)
  return strategy.shard_batch({k: x[half] for k, x in batch.items()})


split = {"replica": 2, "model": 2}
for name, mesh, spec, way in [
  ("split", split, P("model", None), "run"),
  ("jit", {"replica": 4}, P("replica", None), "jit"),
]:
  strategy = fs.Strategy(mesh_shape=mesh)
  state = sparse_states.create(
    strategy, sparse_states.ADAGRAD, [fs.LossScale("dynamic")], spec
  )
  jit = strategy.jit if way == "run" else jax.jit
  step = jit(sparse_states.step_with_poison)
  for i in range(3):
    state, _ = step(state, shard(strategy, i))
  gather = jax.jit(
    lambda x: x, out_shardings=jax.sharding.NamedSharding(strategy.mesh, P())
  )
  table = gather(state.params["table"])
  # An infinity in a row of the other process.
  state, _ = step(state, shard(strategy, 0, bad=1))
  same = bool((gather(state.params["table"]) == table).all())
  assert same and int(state.metrics()["skipped_steps"]) == 1
  np.save(f"{sys.argv[5]}/{name}{rank}.npy", np.asarray(table))
"""


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
  root = str(pathlib.Path(_TESTS).parent)
  two_processes.run(_SCRIPT, _TESTS, root, str(tmp_path))
  wanted = sparse_states.reference(sparse_states.ADAGRAD, 3)["table"]
  for name in ("split", "jit"):
    for rank in range(2):
      table = np.load(tmp_path / f"{name}{rank}.npy")
      np.testing.assert_allclose(table, wanted, rtol=1e-6, atol=1e-6)
