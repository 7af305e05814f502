"""Runs whose workdir is in a bucket, with a local server."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import bucket_servers
from etils import epath
import jax
import numpy as np
import pytest
import tiny

import flaxshard as fs
from flaxshard import train
from flaxshard.checkpoint import __main__ as inspection
from flaxshard.checkpoint import steps
from flaxshard.core import files
from flaxshard.train import report

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("servers")]

_DRAW = report.draw
_TESTS = pathlib.Path(__file__).parents[1]
_CONFIG = dict(
  num_train_steps=6,
  log_every_steps=1,
  eval_every_steps=3,
  checkpoint_every_steps=2,
  writer="tensorboard",
  precision="float32",
)

# Trains in this process, or in each of two.
_TRAIN = """
import json, sys
import numpy as np
import jax
workdir, output, tests, config = sys.argv[-4:]
sys.path.insert(0, tests)
import tiny
from flaxshard import train

state = train.train_and_evaluate(tiny.config(**json.loads(config)), workdir)
if jax.process_index() == 0:
  np.savez(output, *map(np.asarray, jax.tree.leaves(state.params)))
"""


@pytest.fixture
def folder(request):
  """A folder of its own for each test."""
  return f"gs://{bucket_servers.BUCKET}/{request.node.name}"


def _arguments(workdir, output):
  return [str(workdir), str(output), str(_TESTS), json.dumps(_CONFIG)]


def _train(workdir):
  """Returns the final parameters of a run in this process."""
  state = train.train_and_evaluate(tiny.config(**_CONFIG), str(workdir))
  return [np.asarray(x) for x in jax.tree.leaves(state.params)]


def _rows(path):
  rows = [
    json.loads(line) for line in epath.Path(path).read_text().splitlines()
  ]
  return [{k: v for k, v in r.items() if k != "steps_per_second"} for r in rows]


@pytest.fixture(scope="module")
def local_run(tmp_path_factory):
  """The final parameters and the rows of a run on the disk."""
  workdir = tmp_path_factory.mktemp("local")
  return _train(workdir), _rows(workdir / "metrics.jsonl")


def _assert_same_arrays(found, expected, **tolerance):
  assert len(found) == len(expected) > 3
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, **tolerance)


def _damage(step_dir):
  """Shortens the largest object of a step; returns its path."""
  found = files.files_in(f"{step_dir}/default")
  sizes = {p: p.stat().length for p in found}
  path = max(sizes, key=sizes.get)
  path.write_bytes(bytes(sizes[path] - 1))
  return path


def _names(folder):
  return sorted(p.name for p in epath.Path(folder).iterdir())


def test_a_killed_run_with_a_damaged_step_ends_like_a_local_run(
  folder, local_run, caplog, tmp_path, monkeypatch
):
  monkeypatch.setattr(report, "draw", _DRAW)
  process = subprocess.Popen(
    [sys.executable, "-c", _TRAIN, *_arguments(folder, "none.npz")],
    env=bucket_servers.child_environment(),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )
  deadline = time.monotonic() + 120
  while not epath.Path(f"{folder}/checkpoints/4/commit_success.txt").exists():
    assert process.poll() is None, process.stderr.read()
    assert time.monotonic() < deadline
    time.sleep(0.05)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  rows = _rows(f"{folder}/metrics.jsonl")
  assert [row["step"] for row in rows][:4] == [1, 2, 3, 4]

  newest = max(steps.find(f"{folder}/checkpoints"))
  path = _damage(f"{folder}/checkpoints/{newest}")
  # The output of a save that was killed.
  half = epath.Path(f"{folder}/checkpoints/{newest + 1}/default/x")
  half.write_bytes(b"half")

  found = _train(folder)
  assert f"{path} has" in caplog.text
  _assert_same_arrays(found, local_run[0], rtol=0)
  assert _rows(f"{folder}/metrics.jsonl") == local_run[1]
  names = _names(folder)
  assert {"config.json", "data.json", "training.png"} < set(names)
  assert [n.partition(".out.")[0] for n in names].count("events") == 2
  assert max(steps.find(f"{folder}/checkpoints")) == 6
  assert f"{newest}.damaged" in _names(f"{folder}/checkpoints")
  assert inspection.main([folder, "--verify"]) == 0
  fs.export(folder, f"{folder}_model")
  assert "model.json" in _names(f"{folder}_model")
  with pytest.raises(ValueError, match="another folder"):
    fs.export(folder, f"{folder}_model")

  # A step that is copied to the disk is a step there.
  for path in files.files_in(f"{folder}/checkpoints/6"):
    copy = tmp_path / "6" / path.relative_to(f"{folder}/checkpoints/6")
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(path.read_bytes())
  assert inspection.main([str(tmp_path), "--verify"]) == 0
