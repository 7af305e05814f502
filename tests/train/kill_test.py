"""A killed training run ends like an uninterrupted one, bit for bit."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny
import xla_flags

from flaxshard.checkpoint import digests

# Each step is saved, so that the kill interrupts a save.
_RUN = """
import os
import sys
import numpy as np
sys.path.insert(0, sys.argv[2])
import jax
import tiny
from flaxshard import train

config = tiny.config(
  checkpoint_every_steps=1, eval_every_steps=10**6, log_every_steps=1,
  max_to_keep=3,
)
state = train.train_and_evaluate(config, sys.argv[1])
leaves = jax.tree.leaves(state)
np.savez(os.path.join(sys.argv[1], "final.npz"), *map(np.asarray, leaves))
"""


def start(workdir) -> subprocess.Popen:
  tests = str(pathlib.Path(__file__).parents[1])
  return subprocess.Popen(
    [sys.executable, "-c", _RUN, str(workdir), tests],
    env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags.FAST},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(process) -> None:
  log = process.communicate()[1]
  assert process.returncode == 0, log


def saved_steps(workdir) -> list[int]:
  path = workdir / "checkpoints"
  names = os.listdir(path) if path.exists() else []
  return sorted(int(name) for name in names if name.isdecimal())


@pytest.mark.slow
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path):
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  finish(start(whole))
  process = start(killed)
  deadline = time.monotonic() + 120
  while max(saved_steps(killed), default=0) < 3:
    assert process.poll() is None, process.stderr.read()
    assert time.monotonic() < deadline
    time.sleep(0.002)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  # The newest three are kept; an older one may be half deleted.
  for step in saved_steps(killed)[-3:]:
    assert digests.verify(str(killed / "checkpoints" / str(step)))
  finish(start(killed))
  with np.load(whole / "final.npz") as a, np.load(killed / "final.npz") as b:
    assert len(a.files) > 10 and a.files == b.files
    for name in a.files:
      np.testing.assert_array_equal(a[name], b[name])
  assert tiny.untimed_rows(killed) == tiny.untimed_rows(whole)
  assert [row["step"] for row in tiny.rows(whole)] == list(range(1, 9))
