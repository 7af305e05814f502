"""Distributed datasets in two processes, and at the exit of a process."""

import socket
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow

PREAMBLE = """
import sys, time
import jax
import numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
from flaxshard.data import distribute
from flaxshard.data import padding
"""


def start(script, *args):
  return subprocess.Popen(
    [sys.executable, "-c", PREAMBLE + textwrap.dedent(script), *args],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(process):
  try:
    out, err = process.communicate(timeout=60)
  finally:
    process.kill()
  assert process.returncode == 0, err
  return out, err


def test_each_process_feeds_its_replicas():
  with socket.socket() as s:
    s.bind(("localhost", 0))
    port = s.getsockname()[1]
  script = """
    rank = int(sys.argv[2])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, rank)

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
    check(padding.shard_batch(mesh, np.arange(8)), range(8))
    mesh = jax.sharding.Mesh(devices.T, ("replica", "model"))
    try:
      padding.shard_batch(mesh, np.arange(8), jax.sharding.PartitionSpec())
    except ValueError as e:
      assert "'replica'" in str(e)
    else:
      raise AssertionError
    """
  for process in [start(script, str(port), str(rank)) for rank in range(2)]:
    finish(process)


def test_a_process_exits_while_threads_read():
  script = """
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
  out, err = finish(start(script))
  assert out == "done\n"
  assert err == ""
