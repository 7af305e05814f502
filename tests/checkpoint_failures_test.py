"""Disks that are full or gone, two writers, programs that just end."""

import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard import lock
from flaxshard import train
from flaxshard.checkpoint import own_item
from flaxshard.checkpoint import pending_saves

_ROOT = pathlib.Path(__file__).parent.parent

_SETUP = """
import os, signal, sys, time
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
import optax
import flaxshard as fs

path = sys.argv[1]

def create(value=1.0, size=3):
  noise = value + jax.random.normal(jax.random.key(0), (size,))
  return fs.TrainState.create(
    apply_fn=None, params={"w": noise}, tx=optax.sgd(0.1)
  )

"""


def create(value=1.0, size=3):
  noise = value + jax.random.normal(jax.random.key(0), (size,))
  return fs.TrainState.create(
    apply_fn=None, params={"w": noise}, tx=optax.sgd(0.1)
  )


def run(code, path, timeout=60):
  return subprocess.run(
    [sys.executable, "-c", _SETUP + code, str(path)],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=timeout,
  )


@pytest.fixture
def path(tmp_path):
  return tmp_path / "checkpoints"


def restored(path, step=None, size=3):
  with checkpoint.Checkpointer(path) as checkpointer:
    return checkpointer.restore(create(0.0, size), step)


def assert_holds(path, value, step=None, size=3):
  wanted = create(value, size).params["w"]
  np.testing.assert_array_equal(restored(path, step, size).params["w"], wanted)


# Programs that end without waiting.


def test_a_program_that_just_ends_loses_nothing(path):
  # Nobody holds the checkpointer, either.
  done = run("fs.Checkpointer(path).save(7, create(2.0, 100_000))", path)
  assert done.returncode == 0, done.stderr
  assert done.stderr == ""
  assert sorted(os.listdir(path)) == ["7"]
  assert_holds(path, 2.0, size=100_000)


def test_a_program_that_fails_loses_nothing(path):
  code = "checkpointer = fs.Checkpointer(path)\n"
  code += "checkpointer.save(7, create(2.0, 100_000))\nraise KeyError('later')"
  done = run(code, path)
  assert done.returncode == 1
  assert done.stderr.splitlines()[-1] == "KeyError: 'later'"
  assert sorted(os.listdir(path)) == ["7"]
  assert_holds(path, 2.0, size=100_000)


# A disk that is full.

_FULL = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpointer = fs.Checkpointer(path)
checkpointer.save(1, create())
checkpointer.wait()
none = resource.RLIM_INFINITY
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, none))
state = create(2.0, 100_000)
checkpointer.save(2, state)
for _ in range(1000):
  try:
    checkpointer.check()
  except RuntimeError as e:
    print(f"{type(e).__name__}: {e}")
    break
  time.sleep(0.01)
checkpointer.check()  # told once
print(list(checkpointer.all_steps()), sorted(os.listdir(path)))
# The state is as it was, and the next save as good as any.
resource.setrlimit(resource.RLIMIT_FSIZE, (none, none))
checkpointer.save(3, state)
checkpointer.close()
print(list(checkpointer.all_steps()), sorted(os.listdir(path)))
"""


def test_a_full_disk(path):
  done = run(_FULL, path)
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert lines[0].startswith(
    f"SaveError: step 2 could not be saved in {path}: ValueError: "
  )
  assert "File too large" in lines[0] and "tensorstore_spec" not in lines[0]
  assert "earlier checkpoints are as they were" in lines[1]
  # What was written of it is gone, for it takes the room of others.
  assert lines[2:] == ["[1] ['.lock', '1']", "[1, 3] ['1', '3']"]
  assert_holds(path, 1.0, step=1)
  assert_holds(path, 2.0, step=3, size=100_000)


_FULL_AT_THE_END = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpointer = fs.Checkpointer(path)
checkpointer.save(1, create())
checkpointer.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
checkpointer.save(2, create(2.0, 100_000))
"""


def test_a_disk_that_is_full_when_the_program_ends(path):
  done = run(_FULL_AT_THE_END, path)
  assert done.returncode == 0
  assert f"the last checkpoint in {path} is lost" in done.stderr
  assert sorted(os.listdir(path)) == ["1"]
  assert_holds(path, 1.0)


_GONE = """
checkpointer = fs.Checkpointer(path)
checkpointer.save(1, create())
checkpointer.wait()
os.rename(path, path + ".away")
open(path, "w").close()
try:
  checkpointer.save(2, create())
  checkpointer.wait()
except RuntimeError as e:
  print(e)
os.remove(path)
os.rename(path + ".away", path)
"""


def test_a_directory_that_is_gone_and_an_end_that_does_not_hang(path):
  done = run(_GONE, path)
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith(
    f"step 2 could not be saved in {path}: NotADirectoryError: "
  )
  assert_holds(path, 1.0)


def fail_at(monkeypatch, step):
  """Has Orbax fail in the middle of a save of one step."""
  original = own_item.Handler.finalize

  def finalize(self, directory):
    if f"{os.sep}{step}." in os.fspath(directory):
      raise OSError(28, "No space left on device")
    return original(self, directory)

  monkeypatch.setattr(own_item.Handler, "finalize", finalize)


def test_leaving_the_context_raises_what_failed(path, monkeypatch):
  fail_at(monkeypatch, 2)
  message = f"step 2 could not be saved in {path}: OSError: .*No space left"
  with pytest.raises(pending_saves.SaveError, match=message) as e:
    with checkpoint.Checkpointer(path) as checkpointer:
      checkpointer.save(1, create(1.0))
      checkpointer.save(2, create(2.0))
  assert isinstance(e.value.__cause__, OSError)
  assert sorted(os.listdir(path)) == ["1"]
  assert_holds(path, 1.0)


def test_an_error_in_the_context_comes_first(path, monkeypatch, caplog):
  fail_at(monkeypatch, 2)
  with pytest.raises(KeyError), checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(2, create())
    raise KeyError
  assert "step 2 could not be saved" in caplog.text


def test_check_does_not_wait(path, monkeypatch):
  """Neither while a save runs nor when none does."""
  original = own_item.Handler.finalize

  def finalize(self, directory):
    time.sleep(0.5)
    return original(self, directory)

  monkeypatch.setattr(own_item.Handler, "finalize", finalize)
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.check()
    checkpointer.save(1, create())
    checkpointer.check()
    assert checkpointer._manager.is_saving_in_progress()


def test_the_loop_stops_at_the_next_step(tmp_path, monkeypatch):
  """Of eight steps, the save of step 2 fails: the run does not go on to 8."""
  fail_at(monkeypatch, 2)
  monkeypatch.setattr(
    checkpoint.Checkpointer, "check", lambda self: self.wait()
  )
  config = tiny.config(checkpoint_every_steps=2, log_every_steps=1)
  where = tmp_path / "checkpoints"
  with pytest.raises(RuntimeError, match=f"step 2 could not .* in {where}:"):
    train.train_and_evaluate(config, str(tmp_path))
  assert [row["step"] for row in tiny.rows(str(tmp_path))] == [1, 2]
  assert os.listdir(where) == []
  # The lock is free again.
  assert ".lock" not in os.listdir(tmp_path)


# Two writers.

_HOLD = """
from flaxshard import lock
release = lock.acquire("directory", path)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(path):
  """Another process that writes in the directory, and its id."""
  path.mkdir(parents=True)
  process = subprocess.Popen(
    [sys.executable, "-c", _SETUP + _HOLD, str(path)],
    cwd=_ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  process.stdout.readline()
  yield process
  process.kill()
  process.wait()
  process.stdin.close()
  process.stdout.close()


def test_two_processes_cannot_write_in_one_directory(path, holder):
  message = f"directory='{path}' is being written by process {holder.pid} on "
  with checkpoint.Checkpointer(path) as checkpointer:
    with pytest.raises(ValueError, match=message):
      checkpointer.save(1, create())
    assert list(checkpointer.all_steps()) == []
    # A killed process holds nothing, though its file is there.
    holder.kill()
    holder.wait()
    assert (path / ".lock").exists()
    checkpointer.save(1, create())
  assert sorted(os.listdir(path)) == ["1"]


def test_two_checkpointers_of_one_program(path):
  with (
    checkpoint.Checkpointer(path) as one,
    checkpoint.Checkpointer(path) as two,
  ):
    one.save(1, create(1.0))
    two.save(2, create(2.0))
    one.wait()
    two.wait()
    # What is there is left as it is, whoever saved it.
    two.save(1, create(3.0))
    one.save(2, create(3.0))
    assert one.all_steps() == two.all_steps() == [1, 2]
  assert_holds(path, 1.0, step=1)
  assert_holds(path, 2.0, step=2)


def test_reading_needs_no_lock(path):
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(1, create(3.0))
    checkpointer.wait()
    code = "state = fs.Checkpointer(path).restore(create(0.0))\n"
    code += "print(float(state.params['w'].sum()))"
    done = run(code, path)
    assert done.returncode == 0, done.stderr
    wanted = float(create(3.0).params["w"].sum())
    assert float(done.stdout) == pytest.approx(wanted, rel=1e-6)


def test_two_runs_in_one_workdir(path, holder):
  with pytest.raises(ValueError, match=rf"workdir=.* process {holder.pid} on"):
    train.train_and_evaluate(tiny.config(), str(path))
  assert os.listdir(path) == [".lock"]


def test_locks_in_one_process(path):
  path.mkdir()
  one = lock.acquire("directory", str(path), again=True)
  two = lock.acquire("directory", str(path), again=True)
  with pytest.raises(ValueError, match="written by this process"):
    lock.acquire("workdir", str(path))
  one()
  one()  # no harm
  assert os.listdir(path) == [".lock"]
  two()
  assert os.listdir(path) == []
  lock.acquire("workdir", str(path))()


def test_a_file_system_without_locks(path, monkeypatch, caplog):
  def flock(file, how):
    raise OSError(95, "Operation not supported")

  monkeypatch.setattr(lock.fcntl, "flock", flock)
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(1, create())
  assert "cannot be locked (Operation not supported)" in caplog.text
  assert_holds(path, 1.0)


# States that cannot be saved.


def deleted():
  array = jnp.ones(3)
  array.delete()
  return array


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda: np.array([1, None]), "numbers, booleans or .* dtype object"),
    (lambda: np.array(["a"]), "numbers, booleans or .* dtype <U1"),
    (lambda: 3, "must be an array, got 3"),
    (lambda: "text", "must be an array, got 'text'"),
    (lambda: object(), "must be an array, got <object"),
    (lambda: jax.ShapeDtypeStruct((3,), "int8"), "must be an array, got Shape"),
    (lambda: np.ones(2), "is float64, which JAX has only with jax_enable_x64"),
    (deleted, "was deleted: save a state before it is donated"),
    (lambda: jnp.ones((0, 3)), r"has no elements, shape \(0, 3\)"),
  ],
)
def test_a_leaf_that_cannot_be_saved(path, make, message):
  state = create().replace(params={"a": {"b": make()}})
  with checkpoint.Checkpointer(path) as checkpointer:
    with pytest.raises((TypeError, ValueError), match=message) as e:
      checkpointer.save(1, state)
    assert str(e.value).startswith("state[params/a/b]")
    assert os.listdir(path) == []


def test_leaves_that_can_be_saved(path):
  params = {"none": None, "scalar": np.float32(2), "key": jax.random.key(3)}
  state = create().replace(params=params)
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(1, state)
    restored = checkpointer.restore(state).params
  assert restored["none"] is None
  assert float(restored["scalar"]) == 2.0
  keys = map(jax.random.key_data, (restored["key"], params["key"]))
  np.testing.assert_array_equal(*keys)
