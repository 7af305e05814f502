"""Runs of the loop whose AGN has its center in a store.

Most have one worker at a time, one after another.
"""

import contextlib
import os
import shutil
import signal

import jax
import numpy as np
import pytest
import tiny
from tiny_runs import assert_evaluated
from tree_equality import assert_trees_close
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard import train
from flaxshard.center import heads
from flaxshard.center.encoding import unpack
from flaxshard.center.store import Objects
from flaxshard.train import commits

pytestmark = pytest.mark.slow

# Worker 1 of two, of which the other one is gone.
LATE = {"worker_id": 1, "num_workers": 2, "deadline": 1.0}


def run(
  workdir, worker_id=0, num_workers=1, deadline=60.0, commit="mean", **fields
):
  transport = {"deadline": deadline, "grace": 0.2}
  agn = {"communication_period": 3, "commit": commit, "transport": transport}
  values = {
    "wrappers": (("agn", agn),),
    "mesh": {"replica": num_workers},
    "optimizer": {"name": "adam"},
    "precision": "float32",
    "checkpoint_every_steps": 100,
    "eval_every_steps": 100,
  }
  return train.train_and_evaluate(
    tiny.config(**{**values, **fields}),
    str(workdir),
    worker_id=worker_id,
    num_workers=num_workers,
    start_timeout=0.2,
  )


def head(workdir):
  return heads.read(Objects(f"{workdir}/center"))


def last_step(workdir):
  rows = tiny.rows(workdir)
  return rows[-1]["step"] if rows else 0


def assert_equal(trees):
  first, *others = map(jax.tree.leaves, trees)
  for other in others:
    assert_trees_equal(other, first)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """The final state and the last evaluation of a run of one worker."""
  workdir = tmp_path_factory.mktemp("undisturbed")
  return run(workdir), tiny.rows(workdir)[-1]["eval_loss"]


# In the middle of a period, at a commit, and at the last step.
@pytest.mark.parametrize("step", [2, 3, 8])
def test_a_lone_worker_that_was_stopped_ends_with_equal_bits(
  tmp_path, undisturbed, step
):
  # Nobody is waited for at the last step, so that it is the end.
  is_last = step == 8
  expected = contextlib.nullcontext() if is_last else pytest.raises(SystemExit)
  is_there = lambda: last_step(tmp_path) >= step - 1
  with tiny.stopped_while(is_there), expected as error:
    run(tmp_path, log_every_steps=1)
  assert is_last or error.value.code == 128 + signal.SIGTERM
  state = run(tmp_path)
  assert_equal([state, undisturbed[0]])
  assert tiny.rows(tmp_path)[-1]["eval_loss"] == undisturbed[1]
  assert head(tmp_path).versions == [2]


def test_a_stop_while_others_are_waited_for_is_no_end(tmp_path, caplog):
  # Worker 1 of 2 never comes. The last row is written before the wait.
  is_done = lambda: worker_phase(tmp_path) == "done"
  with tiny.stopped_while(is_done), pytest.raises(SystemExit) as error:
    run(tmp_path, num_workers=2, checkpoint_every_steps=4)
  assert error.value.code == 128 + signal.SIGTERM
  assert "stopped at the last step" in caplog.text
  assert os.listdir(tmp_path / "checkpoints") == ["4"]
  assert not head(tmp_path).finished
  with pytest.raises(ValueError, match="no checkpoint of step 8"):
    fs.load(tmp_path, 8)
  state = run(tmp_path)
  assert head(tmp_path).finished
  assert tiny.rows(tmp_path)[-1]["step"] == 8
  assert_equal([state.params, fs.load(tmp_path).params])


def worker_phase(workdir):
  content, _ = Objects(f"{workdir}/center").read("worker/0")
  return content and unpack("worker/0", content)["phase"]


def test_who_starts_after_the_end_takes_the_final_center(tmp_path, caplog):
  first = run(tmp_path, **{**LATE, "worker_id": 0}, checkpoint_every_steps=4)
  assert "worker 1 of 2 has not come" in caplog.text
  before = head(tmp_path)
  assert before.finished and before.versions[0]
  with pytest.raises(ValueError) as error:
    run(tmp_path, **LATE, learning_rate=0.5)
  assert "config.learning_rate is 0.5 here, and 0.01 in" in str(error.value)
  assert "\n" not in str(error.value)
  assert not (tmp_path / "workers/1/config.json").exists()
  # Only fields that matter must be equal.
  second = run(tmp_path, **LATE, log_every_steps=3, max_to_keep=1)
  assert head(tmp_path) == before
  assert "worker 1 finds that the run has ended" in caplog.text
  loaded = [fs.load(tmp_path), fs.load(tmp_path / "workers" / "1")]
  assert [x.step for x in loaded] == [8, 8]
  assert_equal([x.params for x in (first, second, *loaded)])
  # It goes on from the last commit, and takes no step of its own.
  assert [int(x.state.step) for x in loaded] == [8, before.step]
  rows = [tiny.rows(x.workdir)[-1] for x in loaded]
  assert rows[0]["eval_loss"] == pytest.approx(rows[1]["eval_loss"])
  # Nor does it train again.
  run(tmp_path, **LATE)
  assert "nothing to train: step 8" in caplog.text
  # A final center that no step has.
  assert "older" not in caplog.text
  final = loaded[0]
  for name in ("8", "4", "."):
    shutil.rmtree(tmp_path / "checkpoints" / name)
    loaded = fs.load(tmp_path)
    assert loaded.step == before.step
    assert_equal([loaded.params, final.params])
    assert_equal([loaded.state.opt_state, final.state.opt_state])
    assert "older than the final center" in caplog.text
  (tmp_path / "center" / "head").unlink()
  with pytest.raises(ValueError, match="no steps"):
    fs.load(tmp_path)


def test_a_worker_saves_the_final_center_for_worker_0(tmp_path, caplog):
  state = run(tmp_path, **LATE)
  # Warnings are printed by all workers.
  printed = [r.message for r in caplog.records if r.levelname == "WARNING"]
  assert printed[-3:-1] == [
    f"worker 0 is gone: worker 1 saves the final center in {tmp_path}",
    f"done: step 8: {printed[-2].partition('8: ')[2]}",
  ]
  assert "eval_accuracy=" in printed[-2]
  assert_equal([state.params, fs.load(tmp_path).params])
  [row] = tiny.rows(tmp_path)
  assert row == tiny.rows(tmp_path / "workers" / "1")[-1]
  assert row["step"] == 8 and row["eval_accuracy"] > 0


def test_a_stopped_run_goes_on_with_another_number_of_workers(tmp_path, caplog):
  stopped = tiny.stopped_while(lambda: last_step(tmp_path) >= 4)
  with stopped, pytest.raises(SystemExit):
    run(tmp_path, commit="sequential", log_every_steps=1)
  assert (head(tmp_path).versions, head(tmp_path).step) == ([1], 3)
  # Worker 1 joins, and is stopped; worker 0 goes on; both are of two.
  late = {"commit": "sequential", "num_workers": 2}
  stopped = tiny.stopped_while(lambda: last_step(tmp_path / "workers/1") >= 6)
  with stopped, pytest.raises(SystemExit):
    run(tmp_path, 1, **late, log_every_steps=1)
  assert "goes on from local step 3" in caplog.text
  run(tmp_path, **late)
  found = head(tmp_path)
  # One update for each commit, those of steps 3 and 6.
  assert found.finished and found.versions == [2]
  assert sorted(found.heads[0].taken.values()) == [3, 6]
  assert fs.load(tmp_path).step == 8


# Also at the last step.
@pytest.mark.parametrize(("every", "last"), [(2, 6), (3, 8)])
def test_early_stopping_ends_the_run(tmp_path, every, last):
  stopping = {"metric": "eval_accuracy", "min_delta": 1.0, "patience": 1}
  run(tmp_path, early_stopping=stopping, eval_every_steps=every)
  assert head(tmp_path).finished
  assert tiny.rows(tmp_path)[-1]["step"] == last


def test_a_synchronizer_needs_no_devices_of_workers(tmp_path, monkeypatch):
  wrappers = (("cross_shard", {}), ("agn", {"transport": "store"}))
  run(tmp_path, wrappers=wrappers, mesh={"replica": 2, "per_replica": True})
  monkeypatch.setattr(signal, "signal", lambda *handler: None)
  commits.synchronize(str(tmp_path))
  keys = Objects(f"{tmp_path}/center").keys("worker/")
  assert keys == ["worker/0", "worker/synchronizer"]


# With dropout: the random streams of workers are those of replicas.
_CONFIG = """
import tiny

def get_config():
  agn = dict(communication_period=4, commit="mean", transport="store")
  return tiny.config(
    model={"name": "cnn", "features": (), "dense": 8, "dropout": 0.5},
    wrappers=(("agn", agn),), mesh={"replica": -1, "per_replica": True},
    precision="float32", num_train_steps=14, eval_every_steps=14,
    checkpoint_every_steps=6, data={"name": "tiny_runs:digits"})
"""


def test_two_workers_end_like_two_replicas(programs, tmp_path):
  (tmp_path / "my_config.py").write_text(_CONFIG)
  arguments = ["--config=my_config.py", "--workdir=run", "--local_processes=2"]
  output = programs.start(tmp_path, *arguments).end()
  # Worker 0 alone prints rows and the result.
  assert output.count("step 14: eval_loss=") == 2
  assert output.count("[0]") > output.count("done: step 14: eval_loss=") == 1
  assert "is gone" not in output and "store only" not in output
  loaded = [fs.load(tmp_path / "run"), fs.load(tmp_path / "run/workers/1")]
  assert [x.step for x in loaded] == [14, 14]
  assert_equal([x.params for x in loaded])
  # Two local steps after the third commit, workers have their own parameters.
  agn = [x.state.wrapper_states["agn"] for x in loaded]
  assert [int(x.commits) for x in agn] == [3, 3]
  local = [x.local_params["head"]["kernel"] for x in agn]
  assert not np.array_equal(*local)

  config = fs.config.read(str(tmp_path / "my_config.py"))
  config.wrappers = (("agn", {"communication_period": 4, "commit": "mean"}),)
  config.mesh.replica = 2
  compiled = train.train_and_evaluate(config, str(tmp_path / "compiled"))
  wanted = compiled.wrapper_states["agn"].local_params["head"]["kernel"]
  assert_trees_close((loaded[0].params, local), (compiled.params, list(wanted)))
  rows, wanted = tiny.rows(tmp_path / "run"), tiny.rows(tmp_path / "compiled")
  assert rows[-1]["eval_loss"] == pytest.approx(wanted[-1]["eval_loss"])
  # It is the center that is evaluated.
  assert_evaluated(rows[-1], compiled, compiled.params)
  assert [row["commits"] for row in rows] == [r["commits"] for r in wanted]
  workers = [row.get("commit_workers") for row in rows]
  assert workers == [None, 2, None, 2, None, 2, None]
