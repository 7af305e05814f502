"""Strategy over the devices of two processes."""

import re

import pytest
import two_processes

SCRIPT = """
import flax.linen as nn
import numpy as np
import optax
import flaxshard as fs

inputs = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
model, key = nn.Dense(8), jax.random.key(0)
strategy = fs.Strategy(mesh_shape={"replica": 2, "model": 2})
assert (strategy.num_hosts, strategy.num_replicas_per_host) == (2, 1)
state = fs.create_train_state(
  model, key, inputs[:1], optax.sgd(0.1),
  wrappers=[fs.LossScale("dynamic")],
  strategy=strategy,
  rules=[("kernel", jax.sharding.PartitionSpec(None, "model"))],
)

def step(state, batch):
  def loss_fn(params):
    return (state.apply_fn({"params": params}, batch["x"]) ** 2).mean()
  return state.minimize(loss_fn)

batch = strategy.shard_batch({"x": inputs[4 * rank : 4 * rank + 4]})
state, losses = strategy.run(step, args=(state, batch))
loss = strategy.reduce("mean", losses)
# On one device, without flaxshard.
wanted = (model.apply(model.init(key, inputs[:1]), inputs) ** 2).mean()
assert abs(float(loss) - float(wanted)) < 1e-5
state, last = strategy.run_steps(step, state, [batch] * 2, reduce="mean")
rows = strategy.gather(strategy.run(lambda b: b["x"], args=(batch,)), 0)
np.testing.assert_array_equal(rows, inputs)
ids = strategy.distribute_values_from_function(
  lambda context: np.int32(context.replica_id_in_sync_group))
(mine,) = strategy.local_results(ids)
assert int(np.asarray(mine.addressable_data(0))) == rank
assert int(strategy.reduce("sum", ids)) == 1
try:
  strategy.run(lambda x: x, args=(np.float32(rank),))
except ValueError as e:
  start = "run: argument 0 must be the same in all processes: "
  assert str(e).startswith(start), e
else:
  raise AssertionError
assert float(loss) > float(last) > 0 and int(state.step) == 3
print("losses", float(loss), float(last))
"""


@pytest.mark.slow
def test_two_processes_equal_one_device(programs):
  printed = "\n".join(two_processes.run(programs, SCRIPT))
  first, second = re.findall("^losses .*", printed, re.M)
  assert first == second
