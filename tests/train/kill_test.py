"""A killed training run ends like an uninterrupted one, bit for bit.

Run as a program, it kills a long run many times.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
import xla_flags

from flaxshard.checkpoint import digests

# Steps are short and each is saved: most kills interrupt a save.
_RUN = """
import json
import os
import sys
import numpy as np
sys.path.insert(0, sys.argv[2])
import jax
import tiny
from flaxshard import train

config = tiny.config(
  num_train_steps=int(sys.argv[3]), checkpoint_every_steps=1,
  eval_every_steps=10**6, log_every_steps=1, max_to_keep=3,
)
state = train.train_and_evaluate(config, sys.argv[1])
leaves = jax.tree.leaves(state)
np.savez(os.path.join(sys.argv[1], "final.npz"), *map(np.asarray, leaves))
"""


def _start(workdir: str, steps: int) -> subprocess.Popen:
  return subprocess.Popen(
    [
      sys.executable,
      "-c",
      _RUN,
      workdir,
      str(pathlib.Path(__file__).parents[1]),
      str(steps),
    ],
    env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags.FAST},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )


def _finish(process: subprocess.Popen) -> None:
  log = process.communicate()[1]
  assert process.returncode == 0, log


def _steps(workdir: str) -> list[int]:
  path = os.path.join(workdir, "checkpoints")
  names = os.listdir(path) if os.path.isdir(path) else []
  return sorted(int(name) for name in names if name.isdecimal())


def _wait_for_step(process: subprocess.Popen, workdir: str, step: int) -> None:
  deadline = time.monotonic() + 120
  while max(_steps(workdir), default=0) < step:
    assert process.poll() is None, process.stderr.read()
    assert time.monotonic() < deadline
    time.sleep(0.002)


def _rows(workdir: str) -> list[dict]:
  lines = pathlib.Path(workdir, "metrics.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  return [{k: v for k, v in r.items() if k != "steps_per_second"} for r in rows]


def kill_and_compare(
  folder: str, kills: int, steps: int, seed: int = 0, report=lambda text: None
) -> None:
  """Kills a run `kills` times and compares its result with another run's."""
  rng = random.Random(seed)
  whole, workdir = (os.path.join(folder, n) for n in ("whole", "killed"))
  _finish(_start(whole, steps))
  for i in range(kills):
    before = max(_steps(workdir), default=0)
    process = _start(workdir, steps)
    if rng.random() < 0.2:
      time.sleep(rng.random() * 4)  # also while it starts and restores
    else:
      _wait_for_step(process, workdir, before + 1)
      time.sleep(rng.random() * 0.3)
    process.send_signal(signal.SIGKILL)
    log = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, (process.returncode, log)
    steps_on_disk = _steps(workdir)
    # The newest three are kept; an older one may be half deleted.
    for step in steps_on_disk[-3:]:
      assert digests.verify(os.path.join(workdir, "checkpoints", str(step)))
    assert max(steps_on_disk, default=0) >= before
    leftovers = sorted(
      path.name
      for path in pathlib.Path(workdir, "checkpoints").glob("*")
      if not path.name.isdecimal()
    )
    report(f"kill {i + 1}: {before} before, {steps_on_disk} now, {leftovers}")
    # A kill while an older step was deleted leaves a part of it.
    damaged = [x for x in leftovers if x.endswith(".damaged")]
    assert all(int(x.partition(".")[0]) <= before - 3 for x in damaged), log
  _finish(_start(workdir, steps))
  with (
    np.load(os.path.join(whole, "final.npz")) as a,
    np.load(os.path.join(workdir, "final.npz")) as b,
  ):
    assert len(a.files) > 10 and a.files == b.files
    for name in a.files:
      np.testing.assert_array_equal(a[name], b[name])
  assert _rows(workdir) == _rows(whole)
  assert [row["step"] for row in _rows(workdir)] == list(range(1, steps + 1))


@pytest.mark.slow
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path):
  kill_and_compare(str(tmp_path), kills=1, steps=8)


if __name__ == "__main__":
  parser = argparse.ArgumentParser()
  parser.add_argument("--kills", type=int, default=30)
  parser.add_argument("--steps", type=int, default=300)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    kill_and_compare(folder, args.kills, args.steps, args.seed, report=print)
  print("the same, bit for bit")
