"""Runs of the loop whose AGN has its center in a store, one after another."""

import contextlib
import os
import shutil
import signal

import jax
import numpy as np
import pytest
import tiny

import flaxshard as fs
from flaxshard import train
from flaxshard.center import heads
from flaxshard.center.store import Objects

# Worker 1 of two, of which the other one is gone.
LATE = {"worker_id": 1, "num_workers": 2, "deadline": 1.0}


def create_config(*, deadline=60.0, commit="mean", **fields):
  agn = {
    "communication_period": 3,
    "commit": commit,
    "transport": {"deadline": deadline, "grace": 0.2},
  }
  defaults = {
    "wrappers": (("agn", agn),),
    "optimizer": {"name": "adam"},
    "precision": "float32",
    "checkpoint_every_steps": 100,
    "eval_every_steps": 100,
  }
  return tiny.config(**{**defaults, **fields})


def run(workdir, worker_id=0, num_workers=1, **fields):
  return train.train_and_evaluate(
    create_config(mesh={"replica": num_workers}, **fields),
    str(workdir),
    worker_id=worker_id,
    num_workers=num_workers,
    start_timeout=0.2,
  )


def head(workdir):
  return heads.read(Objects(f"{workdir}/center"))


def assert_equal(states):
  arrays = [jax.tree.leaves(jax.device_get(x)) for x in states]
  for others in arrays[1:]:
    for a, b in zip(arrays[0], others, strict=True):
      np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """The final state and the last row of a run of one worker."""
  workdir = tmp_path_factory.mktemp("undisturbed")
  return run(workdir), tiny.untimed_rows(workdir)[-1]


# In the middle of a period, at a commit, and at the last step.
@pytest.mark.parametrize(
  "step", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 8))]
)
def test_a_lone_worker_that_was_stopped_ends_with_equal_bits(
  tmp_path, undisturbed, step
):
  # Nobody is waited for at the last step, so that it is the end.
  is_last = step == 8
  expected = contextlib.nullcontext() if is_last else pytest.raises(SystemExit)
  is_there = lambda: tiny_step(tmp_path) >= step - 1
  with tiny.stopped_while(is_there), expected as error:
    run(tmp_path, log_every_steps=1)
  assert is_last or error.value.code == 128 + signal.SIGTERM
  state = run(tmp_path)
  assert_equal([state, undisturbed[0]])
  assert (
    tiny.untimed_rows(tmp_path)[-1]["eval_loss"]
    == (undisturbed[1]["eval_loss"])
  )
  assert head(tmp_path).versions == [2]


def tiny_step(workdir):
  rows = tiny.rows(workdir)
  return rows[-1]["step"] if rows else 0


@pytest.mark.slow
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
  from flaxshard.center.encoding import unpack

  content, _ = Objects(f"{workdir}/center").read("worker/0")
  return content and unpack("worker/0", content)["phase"]


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_another_number_of_workers(tmp_path, caplog):
  stopped = tiny.stopped_while(lambda: tiny_step(tmp_path) >= 4)
  with stopped, pytest.raises(SystemExit):
    run(tmp_path, commit="sequential", log_every_steps=1)
  assert (head(tmp_path).versions, head(tmp_path).step) == ([1], 3)
  # Worker 1 joins, and is stopped; worker 0 goes on; both are of two.
  late = {"commit": "sequential", "num_workers": 2}
  stopped = tiny.stopped_while(lambda: tiny_step(tmp_path / "workers/1") >= 6)
  with stopped, pytest.raises(SystemExit):
    run(tmp_path, 1, **late, log_every_steps=1)
  assert "goes on from local step 3" in caplog.text
  run(tmp_path, **late)
  found = head(tmp_path)
  # One update for each commit, those of steps 3 and 6.
  assert found.finished and found.versions == [2]
  assert sorted(found.heads[0].taken.values()) == [3, 6]
  assert fs.load(tmp_path).step == 8


def test_early_stopping_ends_the_run(tmp_path):
  run(
    tmp_path,
    early_stopping={"metric": "eval_accuracy", "min_delta": 1.0, "patience": 1},
    eval_every_steps=2,
  )
  assert head(tmp_path).finished
  assert tiny.rows(tmp_path)[-1]["step"] == 6
