"""Full disks, read-only disks, and directories without permission.

Each test runs a process in a new mount namespace, with a small tmpfs.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import xla_flags

pytestmark = pytest.mark.slow

_TESTS = pathlib.Path(__file__).parents[1]

_MOUNT = 'mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@"'

_SETUP = """
import os, shutil, subprocess, sys, threading, time
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny
import flaxshard as fs
from flaxshard import checkpoint, train
from flaxshard.train import charts, events, metrics as metrics_lib
from flaxshard.checkpoint import digests, inspection, metadata_item
from flaxshard.checkpoint import orbax_workarounds
from flaxshard.checkpoint import SaveError

disk = sys.argv[1]
path = os.path.join(disk, "checkpoints")
filler = os.path.join(disk, "filler")


def create(value, size=1000):
  noise = value + jax.random.normal(jax.random.key(0), (size,))
  return fs.TrainState.create(
    apply_fn=None, params={"w": noise}, tx=optax.sgd(0.1)
  )


def assert_is(state, value, size=1000):
  wanted = create(value, size).params["w"]
  np.testing.assert_array_equal(state.params["w"], wanted)


def fill(leave=0):
  '''Fills the disk up to a number of bytes.'''
  with open(filler, "ab", buffering=0) as f:
    try:
      for size in (1 << 16, 1 << 12, 1):
        while room() - size >= leave:
          f.write(bytes(size))
    except OSError:
      assert leave == 0


def room():
  found = os.statvfs(disk)
  return found.f_bavail * found.f_frsize


def leave_files(count):
  '''Uses up the inodes of the disk up to a number.'''
  taken = os.path.join(disk, "taken")
  os.makedirs(taken, exist_ok=True)
  names = os.listdir(taken)
  for name in names:
    os.remove(os.path.join(taken, name))
  for i in range(os.statvfs(disk).f_favail - count):
    open(os.path.join(taken, str(i)), "w").close()


def mount(*args):
  subprocess.run(["mount", *args, disk], check=True)


def set_read_only(yes=True):
  '''Mounts over the disk, because files on it may be open.'''
  if yes:
    mount("--bind", disk)
    mount("-o", "remount,bind,ro")
  else:
    subprocess.run(["umount", disk], check=True)


def error_of(do, *args, kind=SaveError):
  '''Returns the message of the error, which must be raised soon.'''
  start = time.monotonic()
  try:
    do(*args)
  except kind as e:
    assert time.monotonic() - start < 30
    return str(e)
  raise AssertionError("nothing was raised")


def error_of_check(checkpointer):
  '''Checks as a loop does whose steps take 10 ms.'''
  def steps():
    for _ in range(1000):
      checkpointer.check()
      time.sleep(0.01)

  return error_of(steps)


def files():
  return sorted(set(os.listdir(path)) - {".lock"})

"""


def _run(code, disk, launcher, timeout=60):
  """Runs a script with a command in front; it must not hang at its end."""
  command = [*launcher, sys.executable, "-c", _SETUP + code, str(disk)]
  done = subprocess.run(
    command,
    cwd=_TESTS.parent,
    env={
      **os.environ,
      "XLA_FLAGS": xla_flags.FAST,
      "PYTHONPATH": os.pathsep.join(map(str, (_TESTS.parent, _TESTS))),
    },
    capture_output=True,
    text=True,
    timeout=timeout,
  )
  assert done.returncode == 0, done.stderr[-4000:]
  return done


def _run_on_disk(code, disk, options, timeout=60):
  """Runs a script with a tmpfs mounted on `disk`."""
  namespace = ["unshare", "-Urm", "sh", "-c", _MOUNT, "sh", options, str(disk)]
  return _run(code, disk, namespace, timeout)


@pytest.fixture(scope="module")
def may_mount(tmp_path_factory):
  """Skips the test if no tmpfs can be mounted in a user namespace."""
  folder = str(tmp_path_factory.mktemp("mount"))
  try:
    done = subprocess.run(
      ["unshare", "-Urm", "sh", "-c", _MOUNT, "sh", "size=4m", folder, "true"],
      capture_output=True,
      text=True,
    )
  except FileNotFoundError as e:
    pytest.skip(f"no mount namespace: {e}")
  if done.returncode:
    pytest.skip(f"no tmpfs in a mount namespace: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path, may_mount):
  return tmp_path


_FILLS_UP = """
size = 300_000  # 1.2 MB of noise, which cannot be compressed

def create_more(value):
  # Many writes, of which some go on after one has failed.
  state = create(value, size)
  more = {f"w{i}": jnp.arange(20_000.0) for i in range(30)}
  return state.replace(params=state.params | more)

checkpointer = fs.Checkpointer(path)
checkpointer.save(1, create(1.0))
checkpointer.wait()
state = create_more(2.0)
fill(leave=500_000)
checkpointer.save(2, state)  # fails in the background
error = error_of_check(checkpointer)
assert error.startswith(f"step 2 could not be saved in {path}: "), error
assert "No space left on device" in error, error
checkpointer.check()  # raises once
# What was written of the step is removed.
assert files() == ["1"] and room() > 400_000, (files(), room())
assert list(checkpointer.all_steps()) == [1]
assert_is(checkpointer.restore(create(0.0)), 1.0)
assert_is(state, 2.0, size)

os.remove(filler)
checkpointer.save(2, state)
checkpointer.wait()
assert_is(checkpointer.restore(create_more(0.0)), 2.0, size)
assert_is(checkpointer.restore(create(0.0), step=1), 1.0)

# The program ends without waiting for the last save.
fill()
checkpointer.save(3, state)
"""


def test_disk_fills_up_during_a_save(disk):
  done = _run_on_disk(_FILLS_UP, disk, "size=8m")
  assert f"the last checkpoint in {disk}/checkpoints is lost" in done.stderr


_NO_FILES = """
checkpointer = fs.Checkpointer(path)
checkpointer.save(1, create(1.0))
checkpointer.wait()
threads = threading.active_count()
state = create(2.0)
fill()
leave_files(0)
error = error_of(checkpointer.save, 2, state)
assert error.startswith(f"step 2 could not be saved in {path}: OSError: ")
assert "No space left on device" in error, error
os.remove(filler)
# The inodes run out at different points of a save, which needs 22 or 23: while
# its directories are created, or while its files are written.
for step, count in enumerate((1, 2, 3, 4, 8, 12, 16, 19), start=2):
  leave_files(count)

  def save():
    checkpointer.save(step, state)
    raise SaveError(error_of_check(checkpointer))

  # An error of this step, and not another one of the step before.
  error = error_of(save)
  assert f"{path}/{step}.orbax-checkpoint-tmp" in error, (count, error)
  assert files() == ["1"], (count, files())
  checkpointer.check()
leave_files(1000)
for _ in range(100):
  if threading.active_count() <= threads:
    break
  time.sleep(0.1)
assert threading.active_count() <= threads, threading.enumerate()
checkpointer.save(20, state)
checkpointer.wait()
assert files() == ["1", "20"]
assert_is(checkpointer.restore(create(0.0), step=1), 1.0)
assert_is(checkpointer.restore(create(0.0)), 2.0)
# The files run out while the program ends.
leave_files(12)
checkpointer.save(21, state)
"""


def test_disk_without_inodes(disk):
  done = _run_on_disk(_NO_FILES, disk, "size=8m,nr_inodes=200")
  assert f"the last checkpoint in {disk}/checkpoints is lost" in done.stderr


_READ_ONLY = """
checkpointer = fs.Checkpointer(path)
checkpointer.save(1, create(1.0))
checkpointer.wait()

# Between two saves.
set_read_only()
error = error_of(checkpointer.save, 2, create(2.0))
assert error.startswith(f"step 2 could not be saved in {path}: OSError: ")
assert "Read-only file system" in error, error
assert_is(checkpointer.restore(create(0.0)), 1.0)
set_read_only(False)

# In a save, before its directories are created, and after its files are.
def before_directories():
  wait = orbax_workarounds.wait_at_exit
  def then(*args):
    wait(*args)
    set_read_only()
  orbax_workarounds.wait_at_exit = then
  return lambda: setattr(orbax_workarounds, "wait_at_exit", wait)

def before_the_end():
  finalize = metadata_item.Handler.finalize
  def then(self, directory):
    set_read_only()
    return finalize(self, directory)
  metadata_item.Handler.finalize = then
  return lambda: setattr(metadata_item.Handler, "finalize", finalize)

for when in (before_directories, before_the_end):
  undo = when()
  def save():
    checkpointer.save(2, create(2.0))
    raise SaveError(error_of_check(checkpointer))
  error = error_of(save)
  assert "Read-only file system" in error, error
  undo()
  assert list(checkpointer.all_steps()) == [1]
  set_read_only(False)
  # What could not be removed before is removed now.
  checkpointer.save(3, create(3.0))
  checkpointer.wait()
  assert files() == ["1", "3"], files()
  assert_is(checkpointer.restore(create(0.0)), 3.0)
  checkpointer.close()
  subprocess.run(["rm", "-r", path + "/3"], check=True)
  checkpointer = fs.Checkpointer(path)
checkpointer.save(2, create(2.0))
checkpointer.close()

# The whole disk is read-only: restoring works.
mount("-o", "remount,ro")
for there in (path, os.path.join(disk, "new")):
  error = error_of(fs.Checkpointer, there, kind=ValueError)
  wanted = f"directory={there!r} cannot be written: Read-only file system."
  assert error == wanted, error
error = error_of(train.train_and_evaluate, tiny.config(), disk, kind=ValueError)
wanted = f"workdir={disk!r} cannot be written: Read-only file system."
assert error == wanted, error
assert_is(fs.checkpoint.restore(path, create(0.0)), 2.0)
assert_is(fs.checkpoint.restore(path, create(0.0), step=1), 1.0)
assert inspection.main([path, "--verify"]) == 0
"""


def test_read_only_disk(disk):
  done = _run_on_disk(_READ_ONLY, disk, "size=8m")
  assert done.stdout.count("complete, verified") == 2


_LOOP = """
full_at = None
original = checkpoint.Checkpointer.save

def save(self, step, *args, **kwargs):
  if step == full_at:
    self.wait()
    fill()
  original(self, step, *args, **kwargs)

checkpoint.Checkpointer.save = save
workdir = os.path.join(disk, "run")
path = os.path.join(workdir, "checkpoints")
config = tiny.config(
  num_train_steps=12, checkpoint_every_steps=2, log_every_steps=1,
  eval_every_steps=10**6, writer="tensorboard",
)
full_at = 6
error = error_of(train.train_and_evaluate, config, workdir)
assert error.startswith(f"step 6 could not be saved in {path}: "), error
assert "No space left on device" in error, error
assert files() == ["2", "4"], files()
# Raised at the next step, or when the next checkpoint is due.
assert tiny.rows(workdir)[-1]["step"] in (6, 7, 8)
assert ".lock" not in os.listdir(workdir)

# Once there is room, the run continues from step 4.
full_at = None
os.remove(filler)
state = train.train_and_evaluate(config, workdir)
assert int(state.step) == 12
assert [row["step"] for row in tiny.rows(workdir)] == list(range(1, 13))

# If no checkpoint is due, writing the metrics fails.
other = os.path.join(disk, "other")
show = metrics_lib.format_row
metrics_lib.format_row = lambda *row: fill() or show(*row)
config.update(checkpoint_every_steps=10**6, num_train_steps=200, writer="none")
error = error_of(train.train_and_evaluate, config, other, kind=OSError)
metrics = os.path.join(other, "metrics.jsonl")
assert error == f"[Errno 28] No space left on device: {metrics!r}", error
assert 1 < len(tiny.rows(other)) < 200
"""


def test_loop_on_a_full_disk(disk):
  _run_on_disk(_LOOP, disk, "size=16m", timeout=120)


_WRITERS = """
def write(do):
  for step in range(2, 1000):
    do(step, {"loss": 1.0, "accuracy": 0.5})

metrics = os.path.join(disk, "metrics.jsonl")
file = metrics_lib.MetricsFile(metrics, 0)
file.write(1, {"loss": 2.0})
threads = threading.active_count()
write_events, close_events = events.event_writer("tensorboard", disk)
write_events(1, {"loss": 2.0})
fill()
full = "[Errno 28] No space left on device"
assert error_of(write, file.write, kind=OSError) == f"{full}: {metrics!r}"
assert error_of(file.close, kind=OSError) == f"{full}: {metrics!r}"
rows = metrics_lib.read_rows(metrics)  # the last line is incomplete
assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
error = error_of(metrics_lib.MetricsFile, metrics, 9, kind=OSError)
assert error == f"{full}: {metrics + '.tmp'!r}"
assert metrics_lib.read_rows(metrics) == rows
png = os.path.join(disk, "training.png")
assert error_of(charts.plot, rows, png, kind=OSError) == f"{full}: {png!r}"
events = os.path.join(disk, "events.out.tfevents")
assert error_of(write, write_events, kind=OSError) == f"{full}: {events!r}"
# No thread is left that could wait forever.
assert threading.active_count() == threads
os.remove(filler)
write(write_events)
close_events()
"""


def test_metrics_writers_name_the_file_on_a_full_disk(disk):
  _run_on_disk(_WRITERS, disk, "size=4m")


_NO_PERMISSION = """
checkpointer = fs.Checkpointer(path)
checkpointer.save(1, create(1.0))
checkpointer.wait()
for folder, _, _ in os.walk(disk):
  os.chmod(folder, 0o555)
error = error_of(checkpointer.save, 2, create(2.0))
assert error.startswith(
  f"step 2 could not be saved in {path}: PermissionError: "
), error
assert_is(checkpointer.restore(create(0.0)), 1.0)
error = error_of(fs.Checkpointer, path, kind=ValueError)
assert error == f"directory={path!r} cannot be written: Permission denied."
for workdir in (disk, os.path.join(disk, "new")):
  error = error_of(
    train.train_and_evaluate, tiny.config(), workdir, kind=ValueError
  )
  assert error == f"workdir={workdir!r} cannot be written: Permission denied."
assert_is(fs.checkpoint.restore(path, create(0.0)), 1.0)
assert inspection.main([path, "--verify"]) == 0
# A step without permission to read is not damaged, and not passed over.
secret = os.path.join(path, "1", "default", "_METADATA")
other = os.path.join(path, "0")
os.chmod(path, 0o755)
shutil.copytree(os.path.join(path, "1"), other)
os.chmod(secret, 0o000)
message = f"{secret} cannot be read: Permission denied."
error = error_of(checkpointer.restore, create(0.0), kind=ValueError)
assert error == message, error
error = error_of(fs.checkpoint.restore, path, create(0.0), kind=ValueError)
assert error == message, error
assert inspection.main([path, "--verify"]) == 2
os.chmod(secret, 0o644)
for folder, _, _ in os.walk(disk):
  os.chmod(folder, 0o755)
shutil.rmtree(other)
checkpointer.save(2, create(2.0))
checkpointer.wait()
assert_is(checkpointer.restore(create(0.0)), 2.0)
"""


def test_directory_without_permission(tmp_path):
  launcher = []
  if os.geteuid() == 0:  # root needs no permission, unless it drops that
    if shutil.which("setpriv") is None:
      pytest.skip("no setpriv, and root may write everywhere")
    launcher = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
  done = _run(_NO_PERMISSION, tmp_path, launcher)
  assert "complete, verified" in done.stdout
