"""Runs of several workers that `--local_processes` starts."""

import signal

import forked_programs
from forked_programs import wait_until
import jax
import numpy as np
import pytest
import tiny

import flaxshard as fs
from flaxshard import train

pytestmark = pytest.mark.slow

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


@pytest.fixture
def start(tmp_path):
  """Starts two workers in a folder with a config."""
  (tmp_path / "my_config.py").write_text(_CONFIG)
  arguments = ["--config=my_config.py", "--workdir=run", "--local_processes=2"]
  with forked_programs.Programs() as programs:
    yield lambda *more: programs.start(tmp_path, *arguments, *more)


def load_both(folder):
  """Returns what both workers have saved last: the same center."""
  loaded = [fs.load(folder / "run"), fs.load(folder / "run/workers/1")]
  assert [x.step for x in loaded] == [14, 14]
  states = [x.state for x in loaded]
  jax.tree.map(np.testing.assert_array_equal, *(x.params for x in states))
  return states


def test_two_workers_end_like_two_replicas(start, tmp_path):
  output = start().end()
  # Worker 0 alone prints rows and the result.
  assert output.count("step 14: eval_loss=") == 2
  assert output.count("[0]") > output.count("done: step 14: eval_loss=") == 1
  assert "is gone" not in output and "store only" not in output
  states = load_both(tmp_path)
  # Two local steps after the third commit, workers have their own parameters.
  agn = [x.wrapper_states["agn"] for x in states]
  assert [int(x.commits) for x in agn] == [3, 3]
  local = [x.local_params["head"]["kernel"] for x in agn]
  assert not np.array_equal(*local)

  config = fs.config.read(str(tmp_path / "my_config.py"))
  config.wrappers = (("agn", {"communication_period": 4, "commit": "mean"}),)
  config.mesh.replica = 2
  compiled = train.train_and_evaluate(config, str(tmp_path / "compiled"))
  wanted = compiled.wrapper_states["agn"].local_params["head"]["kernel"]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    (states[0].params, local),
    (compiled.params, [*wanted]),
  )
  rows, wanted = tiny.rows(tmp_path / "run"), tiny.rows(tmp_path / "compiled")
  assert rows[-1]["eval_loss"] == pytest.approx(wanted[-1]["eval_loss"])
  assert [row["commits"] for row in rows] == [r["commits"] for r in wanted]
  workers = [row.get("commit_workers") for row in rows]
  assert workers == [None, 2, None, 2, None, 2, None]


def test_a_stopped_run_goes_on(start, tmp_path):
  run = start("--config.hooks=('my_config:wait',)")
  path = tmp_path / "run/workers/1"
  wait_until(
    lambda: path.exists() and any(x["step"] >= 6 for x in tiny.rows(path)),
    "step 6 of worker 1",
    run,
  )
  run.send(signal.SIGTERM)
  assert run.end(code=143).count("SIGTERM: saved step") == 2
  start().end()
  load_both(tmp_path)
