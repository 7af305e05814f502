"""Distributed datasets in two processes, and at the exit of a process."""

import pytest
import two_processes

pytestmark = pytest.mark.slow

IMPORTS = """
import time
import numpy as np
from flaxshard.data import distribute
"""


SCRIPT = """
def check(array, wanted):
  assert array.shape == (len(wanted),), array.shape
  for shard in array.addressable_shards:
    np.testing.assert_array_equal(shard.data, np.array(wanted)[shard.index])

# The second process has the first replicas.
mesh = jax.sharding.Mesh(np.array(jax.devices())[::-1], ("replica",))
first, last = (0, 3) if rank else (100, 0)
batches = [{"x": np.arange(first, first + n)} for n in (8, last)]
full, short = distribute.DistributedDataset(mesh, batches, batch_size=16)
check(full["x"], [*range(8), *range(100, 108)])
check(full["mask"], [True] * 16)
# The first process has no row to repeat.
check(short["x"], [0, 1, 2, 0, 1, 2, 0, 1] + [0] * 8)
check(short["mask"], [True] * 3 + [False] * 13)

def dataset_fn(context):
  assert context == distribute.InputContext(2, 1 - rank, 8)
  size = context.get_per_replica_batch_size(16)
  for i in range(4):
    yield {"x": np.full(size, 10 * context.input_pipeline_id + i)}

(batch,) = distribute.distribute_datasets_from_function(mesh, dataset_fn)
check(batch["x"], np.repeat([0, 1, 2, 3, 10, 11, 12, 13], 2))

# Each replica has devices in both processes: both pass the same rows.
devices = np.array(jax.devices()).reshape(2, 4).T
mesh = jax.sharding.Mesh(devices, ("replica", "model"))
check(distribute.shard_batch(mesh, np.arange(8)), range(8))
mesh = jax.sharding.Mesh(devices.T, ("replica", "model"))
try:
  distribute.shard_batch(mesh, np.arange(8), jax.sharding.PartitionSpec())
except ValueError as e:
  assert "'replica'" in str(e)
else:
  raise AssertionError
"""


def test_each_process_feeds_its_replicas(programs):
  two_processes.run(programs, IMPORTS + SCRIPT, devices=4)


EXIT = """
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("replica",))
def endless():
  while True:
    yield {"x": np.ones((64, 1000))}
def stuck():
  yield {"x": np.ones(4)}
  time.sleep(1000)
iterators = [iter(distribute.DistributedDataset(mesh, s()))
             for s in (endless, endless, stuck)]
for iterator in iterators:
  next(iterator)
print("done")
"""


def test_a_process_exits_while_threads_read(programs):
  ended = two_processes.run(programs, IMPORTS + EXIT, processes=1, devices=4)
  assert ended == ["done\n"]
