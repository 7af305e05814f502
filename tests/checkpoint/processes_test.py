"""Saves of two processes that fail in one, and runs that one has to stop."""

import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import two_processes

import flaxshard as fs

_TESTS = str(pathlib.Path(__file__).parents[1])

# A disk is full for one process alone: its files cannot have 20 bytes.
_SETUP = """
import os, resource, time
sys.path[:0] = [sys.argv[3], os.path.dirname(sys.argv[3])]
path = sys.argv[4]
from flaxshard.checkpoint import digests
from flaxshard.checkpoint import metadata_item
from flaxshard.checkpoint import SaveError
from jax.experimental import multihost_utils

none = resource.RLIM_INFINITY
finalize = metadata_item.Handler.finalize

def full(self, directory):
  # The save before may not have come here.
  if f"/{step}." in os.fspath(directory):
    raise OSError(28, "No space left on device")
  finalize(self, directory)

def break_disk(how):
  if how == "finalize" and rank == 0:
    metadata_item.Handler.finalize = full
  elif how == f"write {rank}":
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, none))

def mend_disk():
  metadata_item.Handler.finalize = finalize
  resource.setrlimit(resource.RLIMIT_FSIZE, (none, none))

def error_of(call):
  try:
    call()
  except SaveError as e:
    return str(e).splitlines()[0]
  return None

def assert_lie_there(*names):
  multihost_utils.sync_global_devices("all have removed what they had to")
  found = sorted(os.listdir(path))
  multihost_utils.sync_global_devices("all have looked")
  assert found == sorted(names), (rank, found)
"""

_FAILURES = """
import jax.numpy as jnp
import numpy as np
import optax
import flaxshard as fs
from checkpoint.processes_test import create, assert_same

strategy = fs.Strategy(mesh_shape={"replica": 4})

def checked():
  for _ in range(1000):
    checkpointer.check()
    time.sleep(0.01)

step = 1
checkpointer = fs.Checkpointer(path)
checkpointer.save(1, create(strategy, 1))
checkpointer.wait()
cases = (("finalize", "check"), ("write 1", "check"), ("write 0", "wait"),
         ("finalize", "save"), ("write 1", "close"))
for how, asked in cases:
  step += 1
  start = time.monotonic()
  break_disk(how)
  checkpointer.save(step, create(strategy, step))
  ask = dict(
    check=checked, wait=checkpointer.wait, close=checkpointer.close,
    save=lambda: checkpointer.save(step + 1, create(strategy, step)))
  told = error_of(ask[asked])
  mend_disk()
  failing = 1 if how == "write 1" else 0
  other = "" if rank == failing else f"RuntimeError: process {failing}: "
  wanted = f"step {step} could not be saved in {path}: {other}"
  assert told and told.startswith(wanted), (how, asked, told)
  assert "No space left" in told or "File too large" in told, told
  assert time.monotonic() - start < 15, (how, asked)
  if asked != "close":
    checkpointer.check()  # told once
    assert_lie_there(".lock", "1")
assert_lie_there("1")

# It goes on, and what was saved since can be read.
with fs.Checkpointer(path) as checkpointer:
  assert list(checkpointer.all_steps()) == [1]
  checkpointer.save(step, create(strategy, step))
  assert_same(
    checkpointer.restore(create(strategy, 0)), create(strategy, step))
  # The newest is empty: the one before it is read, and the empty one kept.
  if rank == 0:
    os.mkdir(os.path.join(path, "9"))
assert_lie_there("1", str(step), "9")
assert_same(
  fs.checkpoint.restore(path, create(strategy, 0)), create(strategy, step))
with fs.Checkpointer(path) as checkpointer:
  assert_same(
    checkpointer.restore(create(strategy, 0)), create(strategy, step))
  checkpointer.save(9, create(strategy, 9))
assert_lie_there("1", str(step), "9", "9.damaged")
# Of one process.
assert_same(
  fs.checkpoint.restore(sys.argv[5], create(strategy, 0)), create(strategy, 5))
print("same")
"""


def create(strategy: fs.Strategy, seed: int) -> fs.TrainState:
  """Returns a state of which each device has a part, and noise in all."""
  w = jax.random.normal(jax.random.key(seed), (8, 4))
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": w, "half": w.astype(jnp.bfloat16), "b": w[0]},
    tx=optax.adam(0.1),
    wrappers=[fs.LossScale("dynamic")],
  )

  def put(x):
    x = np.asarray(x)
    spec = jax.P("replica") if x.ndim == 2 else jax.P()
    sharding = jax.NamedSharding(strategy.mesh, spec)
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

  return jax.tree.map(put, state)


def assert_same(one: fs.TrainState, other: fs.TrainState) -> None:
  for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    assert (x.sharding, x.dtype) == (y.sharding, y.dtype)
    for mine, yours in zip(
      x.addressable_shards, y.addressable_shards, strict=True
    ):
      assert np.array(mine.data).tobytes() == np.array(yours.data).tobytes()


def test_a_save_that_fails_in_one_process_fails_in_both(tmp_path):
  path, of_one = tmp_path / "two", tmp_path / "one"
  strategy = fs.Strategy(devices=jax.devices()[:4])
  with fs.Checkpointer(of_one) as checkpointer:
    checkpointer.save(1, create(strategy, 5))
  outs = two_processes.run(_SETUP + _FAILURES, _TESTS, str(path), str(of_one))
  for out, _ in outs:
    assert out.splitlines()[-1] == "same"
  # Read by one process.
  assert_same(
    fs.checkpoint.restore(path, create(strategy, 0)), create(strategy, 9)
  )


# In the loop. JAX asks for signals once a second.
_LOOP = """
import signal
import tiny
from flaxshard.train import preemption
from flaxshard import train

workdir, path = path, os.path.join(path, "checkpoints")
config = tiny.config(
  num_train_steps=400, checkpoint_every_steps=4, log_every_steps=2,
  eval_every_steps=1000)
agreed = preemption.agree_on_signal
seen = []

step = 8

def finalize_fails(number, signum):
  if number == 3:
    break_disk("finalize")
  seen.append(number)
  time.sleep(0.05)
  return agreed(number, signum)

preemption.agree_on_signal = finalize_fails
told = error_of(lambda: train.train_and_evaluate(config, workdir))
mend_disk()
assert told and told.startswith(f"step 8 could not be saved in {path}"), told
# At a row after the step, the same in both; step 12 would be a save.
assert 8 < seen[-1] <= 12 and seen[-1] % 2 == 0, seen
assert_lie_there("4")

def interrupted(step, signum):
  if step == 6 and rank == 1:
    os.kill(os.getpid(), signal.SIGINT)
  seen.append(step)
  time.sleep(0.05)
  return agreed(step, signum)

del seen[:]
preemption.agree_on_signal = interrupted
with config.unlocked():
  config.log_every_steps = config.checkpoint_every_steps = 1000
try:
  train.train_and_evaluate(config, workdir)
except SystemExit as e:
  assert seen[0] == 5 and 6 < seen[-1] < 100, seen
  assert_lie_there("4", str(seen[-1]))
  print(e.code, seen[-1])
"""


def test_the_loop_stops_in_both_processes(tmp_path):
  (out0, _), (out1, _) = two_processes.run(
    _SETUP + _LOOP, _TESTS, str(tmp_path)
  )
  code0, step0 = out0.splitlines()[-1].split()
  code1, step1 = out1.splitlines()[-1].split()
  assert step0 == step1
  # Ctrl-C came to process 1; process 0 was told.
  assert int(code0) == 128 + signal.SIGTERM
  assert int(code1) == 128 + signal.SIGINT
