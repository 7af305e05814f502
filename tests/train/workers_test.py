"""Runs of several workers: processes that JAX does not connect."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny

import flaxshard as fs
from flaxshard import train
from flaxshard.train import charts

_ROOT = pathlib.Path(__file__).parents[2]

# With dropout: the random streams of workers are those of replicas.
_CONFIG = """
import time
import ml_collections

def get_config():
  return ml_collections.ConfigDict(dict(
    model={"name": "cnn", "features": (), "dense": 8, "dropout": 0.5},
    data={"name": "digits"},
    batch_size=16,
    num_train_steps=14,
    learning_rate=1e-2,
    precision="float32",
    wrappers=(("agn", dict(communication_period=4, commit="mean",
                           transport="store")),),
    mesh={"replica": -1, "per_replica": True},
    log_every_steps=2,
    eval_every_steps=14,
    checkpoint_every_steps=6,
    writer="none",
    hooks=(),
  ))

def wait(step, state, metrics):
  time.sleep(0.25)
"""
_AGN = {"communication_period": 4, "commit": "mean"}


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "my_config.py").write_text(_CONFIG)
  return tmp_path


def start(folder, *arguments, **kwargs):
  """Starts a program `flaxshard` in a folder with a config."""
  environ = {**os.environ, "PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu"}
  environ.pop("XLA_FLAGS", None)
  return subprocess.Popen(
    [
      *(sys.executable, "-m", "flaxshard", "--config=my_config.py"),
      *("--workdir=run", *arguments),
    ],
    cwd=folder,
    env=environ,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    **kwargs,
  )


def end(processes, codes=(0,)):
  """Waits for processes; returns what they have printed."""
  outputs = []
  try:
    for process in processes:
      outputs.append(process.communicate(timeout=120)[0])
      assert process.returncode in codes, outputs[-1]
  finally:
    for process in processes:
      process.kill()
  return outputs


def workdir(folder, worker_id):
  return folder / "run" / (f"workers/{worker_id}" if worker_id else "")


def wait_until(condition, what, timeout=120):
  deadline = time.monotonic() + timeout
  while not condition():
    assert time.monotonic() < deadline, f"no {what}"
    time.sleep(0.05)


def wait_for_step(folder, worker_id, step):
  """Waits until a worker has written the row of a step."""
  path = workdir(folder, worker_id) / "metrics.jsonl"
  wait_until(
    lambda: (
      path.exists()
      and any(row["step"] >= step for row in tiny.rows(path.parent))
    ),
    f"step {step} of worker {worker_id}",
  )


def assert_same_center(states):
  for state in states[1:]:
    jax.tree.map(np.testing.assert_array_equal, state.params, states[0].params)


@pytest.mark.slow
def test_two_workers_end_like_two_replicas(folder, monkeypatch):
  [output] = end([start(folder, "--local_processes=2")])
  # Worker 0 alone prints rows and the result.
  assert output.count("step 14: eval_loss=") == 2
  assert output.count("[0]") > output.count("done: step 14: eval_loss=") == 1
  assert "is gone" not in output and "store only" not in output
  loaded = [fs.load(workdir(folder, k)) for k in range(2)]
  assert [x.step for x in loaded] == [14, 14]
  assert_same_center([x.state for x in loaded])
  # Two local steps after the third commit, workers have their own parameters.
  agn = [x.state.wrapper_states["agn"] for x in loaded]
  assert [int(x.commits) for x in agn] == [3, 3]
  local = [np.asarray(x.local_params["head"]["kernel"]) for x in agn]
  assert not np.array_equal(*local)

  monkeypatch.setattr(charts, "plot", lambda *args: None)
  config = fs.config.read(str(folder / "my_config.py"))
  config.wrappers = (("agn", _AGN),)
  config.mesh.replica = 2
  compiled = train.train_and_evaluate(config, str(folder / "compiled"))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    loaded[0].state.params,
    compiled.params,
  )
  for k, kernel in enumerate(local):
    np.testing.assert_allclose(
      kernel,
      compiled.wrapper_states["agn"].local_params["head"]["kernel"][k],
      rtol=1e-5,
      atol=1e-6,
    )
  rows = tiny.rows(workdir(folder, 0))
  wanted = tiny.rows(folder / "compiled")
  assert rows[-1]["eval_loss"] == pytest.approx(wanted[-1]["eval_loss"])
  assert [row["commits"] for row in rows] == [r["commits"] for r in wanted]
  assert [row.get("commit_workers") for row in rows] == [
    None,
    2,
    None,
    2,
    None,
    2,
    None,
  ]


@pytest.mark.slow
def test_a_stopped_run_goes_on(folder):
  slowly = ["--config.hooks=('my_config:wait',)", "--local_processes=2"]
  run = start(folder, *slowly)
  wait_for_step(folder, 1, 6)
  run.send_signal(signal.SIGTERM)
  [output] = end([run], codes=[143])
  assert output.count("SIGTERM: saved step") == 2
  [output] = end([start(folder, "--local_processes=2")])
  loaded = [fs.load(workdir(folder, k)) for k in range(2)]
  assert [x.step for x in loaded] == [14, 14]
  assert_same_center([x.state for x in loaded])
