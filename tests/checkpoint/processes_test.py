"""Two processes that save together: digests, damage, failures."""

from checkpoint_states import Counter
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import two_processes

import flaxshard as fs

pytestmark = pytest.mark.slow


def create(strategy: fs.Strategy, seed: int) -> fs.TrainState:
  """Returns a state of random numbers that is sharded over the devices."""
  w = jax.random.normal(jax.random.key(seed), (8, 4))
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": w, "half": w.astype(jnp.bfloat16), "b": w[0]},
    tx=optax.adam(0.1),
    wrappers=[fs.LossScale("dynamic")],
  )

  def shard(x):
    x = np.asarray(x)
    spec = jax.P("replica") if x.ndim == 2 else jax.P()
    sharding = jax.NamedSharding(strategy.mesh, spec)
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

  return jax.tree.map(shard, state)


def assert_same(a: fs.TrainState, b: fs.TrainState) -> None:
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert (x.sharding, x.dtype) == (y.sharding, y.dtype)
    for x_shard, y_shard in zip(
      x.addressable_shards, y.addressable_shards, strict=True
    ):
      x_bytes = np.array(x_shard.data).tobytes()
      assert x_bytes == np.array(y_shard.data).tobytes()


_SETUP = """
import json, os, pathlib, resource, time
path = pathlib.Path(sys.argv[3])
from jax.experimental import multihost_utils
import flaxshard as fs
from flaxshard.checkpoint import step_files
from checkpoint.processes_test import assert_same, create
from checkpoint_states import Counter

strategy = fs.Strategy(mesh_shape={"replica": 4})

def error_of(call):
  start = time.monotonic()
  try:
    call()
  except (RuntimeError, ValueError, LookupError) as e:
    # No process waits for one that has failed.
    assert time.monotonic() - start < 15
    return f"{type(e).__name__}: {e}"

def assert_files(*names):
  multihost_utils.sync_global_devices("all processes are here")
  found = sorted(os.listdir(path))
  multihost_utils.sync_global_devices("all processes have looked")
  assert found == sorted(names), (rank, found)
"""

# The disk is "full" for one process only: its files cannot have 20 bytes.
_FAILURES = """
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
none = resource.RLIM_INFINITY
write = step_files.write_digests

def full(step_dir, contents):
  # Only in the save that is to fail.
  if step_dir.name.startswith(f"{step}."):
    raise OSError(28, "No space left on device")
  write(step_dir, contents=contents)

def check_repeatedly():
  for _ in range(1000):
    checkpointer.check()
    time.sleep(0.01)

checkpointer = fs.Checkpointer(path)
checkpointer.save(1, create(strategy, 1))
checkpointer.wait()
cases = (("write 1", "check"), ("write 0", "wait"), ("finalize 0", "save"),
         ("write 1", "close"))
for step, (how, asked) in enumerate(cases, 2):
  kind, failing = how.split()
  if int(failing) == rank and kind == "write":
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, none))
  elif int(failing) == rank:
    step_files.write_digests = full
  checkpointer.save(step, create(strategy, step), data=Counter(step))
  ask = dict(
    check=check_repeatedly, wait=checkpointer.wait, close=checkpointer.close,
    save=lambda: checkpointer.save(step + 1, create(strategy, step)))
  message = error_of(ask[asked])
  step_files.write_digests = write
  resource.setrlimit(resource.RLIMIT_FSIZE, (none, none))
  own = str(rank) == failing
  other = "" if own else f"OtherProcessError: process {failing}: "
  wanted = f"SaveError: step {step} could not be saved in {path}: {other}"
  assert message and message.startswith(wanted), (how, asked, message)
  assert "No space left" in message or "File too large" in message, message
  if asked != "close":
    checkpointer.check()  # raises once
    assert_files(".lock", "1")
assert_files("1")

# Saving works again, and the new step can be restored.
with fs.Checkpointer(path) as checkpointer:
  assert list(checkpointer.all_steps()) == [1]
  checkpointer.save(step, create(strategy, step))
assert_same(
  fs.checkpoint.restore(path, create(strategy, 0)), create(strategy, step))
print("same")
"""


def test_save_that_fails_in_one_process_fails_in_both(programs, tmp_path):
  outs = two_processes.run(
    programs, _SETUP + _FAILURES, str(tmp_path), logs_errors=True
  )
  assert all("same" in out.splitlines() for out in outs)
  # One process restores what two have saved.
  strategy = fs.Strategy(devices=jax.devices()[:4])
  restored = fs.checkpoint.restore(tmp_path, create(strategy, 0))
  assert_same(restored, create(strategy, 5))


_DIGESTS = """
with fs.Checkpointer(path) as checkpointer:
  for step in (1, 2, 3):
    checkpointer.save(step, create(strategy, step))
  checkpointer.wait()
  multihost_utils.sync_global_devices("saved")

  # The files of all processes have digests.
  digests_file = path / "3" / "flaxshard" / "digests.json"
  names = json.loads(digests_file.read_text())["files"]
  for process in (0, 1):
    assert any(f"ocdbt.process_{process}/d/" in name for name in names), names
  metadata = step_files.check(path / "3")
  assert (metadata["processes"], metadata["devices"]) == (2, 4), metadata
  assert metadata["mesh"] == {"replica": 4}
  assert step_files.verify(path / "3")
  multihost_utils.sync_global_devices("verified")

  # Damage a file of each of the two later steps; any process may find it.
  if rank == 0:
    for step, name in ((3, "default/_METADATA"), (2, "wrappers/_METADATA")):
      file = path / str(step) / name
      file.write_bytes(file.read_bytes()[:-1])
  multihost_utils.sync_global_devices("damaged")
  state = checkpointer.restore(create(strategy, 0))
  assert checkpointer.restored_step == 1
  assert_same(state, create(strategy, 1))
  checkpointer.save(2, create(strategy, 5))
  checkpointer.wait()
  multihost_utils.sync_global_devices("saved again")
  assert_same(checkpointer.restore(create(strategy, 0)), create(strategy, 5))
assert_files("1", "2", "2.damaged", "3.damaged")
"""


# Positions of the data: one for all, or one for each process. Both processes
# raise the error that one of them has.
_POSITIONS = """
path = path / "positions"
state = create(strategy, 1)

def position_at(step, is_global=False):
  counter = Counter(None, is_global)
  checkpointer.restore(create(strategy, 0), step, data=counter)
  return counter.position

with fs.Checkpointer(path, digests=False) as checkpointer:
  checkpointer.save(1, state, data=Counter([10], True))
  checkpointer.save(2, state, data=Counter([20 + rank]))
  checkpointer.save(3, state, data=Counter([30 + rank]))
  checkpointer.save(4, state, data=Counter("invalid" if rank else "valid"))
  message = error_of(
    lambda: checkpointer.save(5, state, data=Counter([rank], True)))
  assert all(f" in process {i} (" in message for i in (0, 1)), message
  checkpointer.wait()
  multihost_utils.sync_global_devices("saved positions")
  for step, positions in ((1, [[10]]), (2, [[20], [21]])):
    file = path / str(step) / "input_iterator" / "metadata"
    assert json.loads(file.read_text())["positions"] == positions
  assert position_at(1, is_global=True) == [10]
  assert position_at(2) == [20 + rank]
  # One file for two processes, two different ones for all, and an iterator
  # that refuses the position in process 1.
  for step, is_global, fact in (
      (1, False, "of 1 processes, and this program has 2: "),
      (2, True, "of 2 processes, and this program has 2: "),
      (4, False, "no such position")):
    message = error_of(lambda: position_at(step, is_global=is_global))
    assert message and fact in message, (rank, step, message)
  if rank == 1:
    (path / "3" / "input_iterator" / "metadata").write_text("[31")
    os.rename(path / "4", path / "4.away")
  multihost_utils.sync_global_devices("damaged a position")
with fs.Checkpointer(path, digests=False) as checkpointer:
  assert position_at(None) == [20 + rank]
# Two directories instead of one: with the steps 1, 2 and with 1, 2, 3.
message = error_of(lambda: fs.checkpoint.restore(
  path if rank else path.parent, create(strategy, 0)))
assert "[1, 2] in process 0 " in message, message
assert "[1, 2, 3] in process 1 " in message, message
print("same")
"""


def test_two_processes_verify_and_share_positions(programs, tmp_path):
  outs = two_processes.run(
    programs, _SETUP + _DIGESTS + _POSITIONS, str(tmp_path)
  )
  for out in outs:
    assert "same" in out.splitlines()
    assert out.count("passed over") == 3
  # One process cannot restore the positions of two, unless they are global.
  state = create(fs.Strategy(devices=jax.devices()[:4]), 0)
  with fs.Checkpointer(tmp_path / "positions") as checkpointer:
    counter = Counter(None, position_is_global=True)
    checkpointer.restore(state, 1, data=counter)
    assert counter.position == [10]
    with pytest.raises(ValueError, match=r"of 2 processes, .* has 1: "):
      checkpointer.restore(state, 2, data=Counter(None))
