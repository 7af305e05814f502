"""Restoring into an abstract train state, and the memory that it needs."""

import os
import pathlib
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs

MODEL = nn.Dense(4)
ADAM = optax.adam(0.125)
SCALED = fs.LossScale("dynamic")
AGN = fs.AGN(2, commit="mean")


def strategy_of(replicas):
  return replicas and fs.Strategy(devices=jax.devices()[:replicas])


def create(replicas, wrappers, tx=ADAM, abstract=False, seed=0):
  return fs.create_train_state(
    MODEL,
    jax.random.key(seed),
    jnp.ones((2, 8)),
    tx,
    wrappers=wrappers,
    strategy=strategy_of(replicas),
    abstract=abstract,
  )


def change(state):
  """Returns a state whose leaves all differ from those of a new one."""

  def change_leaf(x):
    new = ~x if x.dtype == bool else x + 3
    return jax.device_put(new, x.sharding)

  return jax.tree.map(change_leaf, state)


def assert_same(given, wanted):
  assert jax.tree.structure(given) == jax.tree.structure(wanted)
  for x, y in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
    assert isinstance(x, jax.Array) and not x.weak_type
    assert (x.dtype, x.sharding) == (y.dtype, y.sharding)
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
  ("saved", "wanted"),
  [
    ((4, (SCALED,)), (4, ())),
    ((None, ()), (None, (SCALED, AGN))),
    pytest.param((8, (AGN,)), (4, (AGN,)), marks=pytest.mark.slow),
  ],
)
def test_restores_into_an_abstract_state(tmp_path, saved, wanted):
  state = change(create(*saved, seed=1))
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, state)
    # A new state has the values that the leaves start with.
    concrete = checkpointer.restore(create(*wanted))
    given = checkpointer.restore(create(*wanted, abstract=True))
  assert_same(given, concrete)
  np.testing.assert_array_equal(given.params["kernel"], state.params["kernel"])


def test_fresh_leaves_share_no_memory_with_those_that_were_read(tmp_path):
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, create(4, ()))
  wrappers = (SCALED, fs.EMA(0.5))
  given = fs.checkpoint.restore(tmp_path, create(4, wrappers, abstract=True))
  step = jax.jit(
    lambda s: s.minimize(lambda p: (p["kernel"] ** 2).sum())[0],
    donate_argnums=0,
  )
  with jax.set_mesh(strategy_of(4).mesh):
    assert int(step(given).step) == 1


# Prints how much memory a restore takes at its peak beyond that before it.
_PROGRAM = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
import optax
import flaxshard as fs

directory, kind, *numbers = sys.argv[1:]
devices, leaves, megabytes = map(int, numbers)
P = jax.sharding.PartitionSpec
strategy = fs.Strategy() if devices > 1 else None

def create(read=lambda shape: np.zeros(shape, np.float32), size=megabytes):
  shape = (8, size * 2**20 // 32)
  params = {f"w{i}": read(shape) for i in range(leaves)}
  if strategy:
    sharding = jax.sharding.NamedSharding(strategy.mesh, P("replica"))
    params = jax.tree.map(lambda x: jax.device_put(x, sharding), params)
  return fs.TrainState.create(
    apply_fn=None, params=params, tx=optax.sgd(0.1),
    wrappers=[fs.LossScale("dynamic")], strategy=strategy)

def peak():
  lines = open("/proc/self/status").read().splitlines()
  (line,) = [line for line in lines if line.startswith("VmHWM")]
  return int(line.split()[1]) / 1024

if kind == "save":
  random = np.random.default_rng(0)
  state = create(lambda shape: random.random(shape, np.float32))
  with fs.Checkpointer(directory) as checkpointer:
    checkpointer.save(1, state)
else:
  with fs.Checkpointer(directory + "_small") as checkpointer:
    # What is imported and compiled once does not count.
    checkpointer.save(1, create(size=1))
    checkpointer.restore(create(size=1))
  large = lambda shape: (shape[0], shape[1] * megabytes) if shape else ()
  state = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      large(x.shape), x.dtype, sharding=x.sharding),
    create(size=1))
  with fs.Checkpointer(directory) as checkpointer:
    open("/proc/self/clear_refs", "w").write("5")  # forgets the peak so far
    before = peak()
    state = jax.block_until_ready(checkpointer.restore(state))
  print(peak() - before)
  random = np.random.default_rng(0)
  for i in range(leaves):
    x = state.params[f"w{i}"]
    np.testing.assert_array_equal(x, random.random(x.shape, np.float32))
"""


def run_program(directory, kind, devices, *numbers):
  flags = f"--xla_force_host_platform_device_count={devices}"
  done = subprocess.run(
    [
      sys.executable,
      "-c",
      _PROGRAM,
      *map(str, (directory, kind, devices, *numbers)),
    ],
    capture_output=True,
    text=True,
    timeout=300,
    env={
      **os.environ,
      "XLA_FLAGS": flags,
      # glibc then returns the memory of large arrays at once.
      "MALLOC_MMAP_THRESHOLD_": "1000000",
    },
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
  not pathlib.Path("/proc/self/clear_refs").exists(), reason="needs Linux"
)
def test_restoring_needs_the_state_and_two_leaves(tmp_path):
  devices, leaves, megabytes = 8, 16, 16
  numbers = (devices, leaves, megabytes)
  run_program(tmp_path / "checkpoints", "save", *numbers)
  needed = float(run_program(tmp_path / "checkpoints", "abstract", *numbers))
  # One leaf is in memory twice more: as on disk, and as it was read. The memory
  # of a busy machine's threads comes on top.
  assert needed < (leaves + 6) * megabytes
