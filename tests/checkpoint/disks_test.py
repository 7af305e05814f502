"""A disk that fills up during a save.

The test runs a process in a new mount namespace, with a small tmpfs.
"""

import os
import pathlib
import subprocess
import sys

import pytest
import xla_flags

_TESTS = pathlib.Path(__file__).parents[1]

_MOUNT = 'mount -t tmpfs -o size=8m tmpfs "$1" && shift && exec "$@"'
_NAMESPACE = ["unshare", "-Urm", "sh", "-c", _MOUNT, "sh"]

_SCRIPT = """
import os, sys, time
import jax.numpy as jnp
import numpy as np
import flaxshard as fs
from checkpoint.failures_test import assert_holds, create

disk = sys.argv[1]
path = os.path.join(disk, "checkpoints")
filler = os.path.join(disk, "filler")


def room():
  found = os.statvfs(disk)
  return found.f_bavail * found.f_frsize


def fill(leave=0):
  # Up to a number of bytes.
  with open(filler, "ab", buffering=0) as f:
    try:
      for size in (1 << 16, 1 << 12, 1):
        while room() - size >= leave:
          f.write(bytes(size))
    except OSError:
      assert leave == 0


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
try:
  for _ in range(1000):  # as a loop whose steps take 10 ms
    checkpointer.check()
    time.sleep(0.01)
except fs.checkpoint.SaveError as e:
  error = str(e)
assert error.startswith(f"step 2 could not be saved in {path}: "), error
assert "No space left on device" in error, error
checkpointer.check()  # raises once
# What was written of the step is removed.
assert set(os.listdir(path)) == {"1", ".lock"} and room() > 400_000
assert list(checkpointer.all_steps()) == [1]
assert_holds(path, 1.0)

os.remove(filler)
checkpointer.save(2, state)
checkpointer.wait()
restored = checkpointer.restore(create_more(0.0))
for name, x in state.params.items():
  np.testing.assert_array_equal(restored.params[name], x)

checkpointer.close()
"""


@pytest.mark.slow
def test_disk_fills_up_during_a_save(tmp_path):
  try:
    done = subprocess.run(
      [*_NAMESPACE, str(tmp_path), "true"], capture_output=True, text=True
    )
  except FileNotFoundError as e:
    pytest.skip(f"no mount namespace: {e}")
  if done.returncode:
    pytest.skip(f"no tmpfs in a mount namespace: {done.stderr.strip()}")
  done = subprocess.run(
    [*_NAMESPACE, str(tmp_path), sys.executable, "-c", _SCRIPT, str(tmp_path)],
    cwd=_TESTS.parent,
    env={
      **os.environ,
      "XLA_FLAGS": xla_flags.FAST,
      "PYTHONPATH": os.pathsep.join(map(str, (_TESTS.parent, _TESTS))),
    },
    capture_output=True,
    text=True,
    timeout=180,
  )
  assert done.returncode == 0, done.stderr[-4000:]
