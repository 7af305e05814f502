"""Commits from host to host in the loop, with a worker that is made up."""

import json

import jax
import numpy as np
import pytest
import tiny

from flaxshard import train
from flaxshard.processes import cluster
from flaxshard.train import charts
from flaxshard.train import host_commits
from flaxshard.train import preemption
from flaxshard.workers.commit_log import CommitRecord

HOST = (("agn", {"communication_period": 2, "transport": "host"}),)


class Worker:
  """Commits nothing; notes what the loop asks of it."""

  # `missed_steps` after the start, and after the n-th commit.
  missed = (0, {})

  def __init__(
    self, directory, worker_id, num_workers, start_timeout, should_stop
  ):
    self.created = (directory, num_workers, start_timeout)
    self.worker_id, self.num_workers = worker_id, num_workers
    self.should_stop = should_stop
    self.missed_steps = 0
    self.calls = []
    self.new = []

  def __enter__(self):
    Worker.last = self
    return self

  def __exit__(self, *error):
    self.calls.append("leave")

  def start(self, state, facts):
    self.facts = facts
    self.calls.append("start")
    self.missed_steps = Worker.missed[0]
    return state

  def commit(self, state):
    self.calls.append(int(state.step))
    count = sum(isinstance(call, int) for call in self.calls)
    self.missed_steps += Worker.missed[1].get(count, 0)
    if count % 2 == 0:
      self.new.append(record(count // 2))
    return state

  def settle(self, state):
    self.calls.append("settle")
    return state

  def finish(self, state):
    self.calls.append("finish")
    return state

  def records(self):
    records, self.new = self.new, []
    return records


def record(number, **fields):
  values = dict(
    commit=number,
    local_step=2 * number,
    fragments=(0,),
    workers=(0, 1),
    accepted=True,
    staleness=number,
    bytes_sent=500_000,
    bytes_received=0,
    seconds=0.25,
    waited_seconds=0.0,
  )
  return CommitRecord(**{**values, **fields})


@pytest.fixture(autouse=True)
def made_up_worker(monkeypatch):
  monkeypatch.setattr(host_commits, "create_worker", Worker)
  monkeypatch.setattr(charts, "plot", lambda *args: None)
  monkeypatch.setattr(Worker, "missed", (0, {}))


def run(tmp_path, rank=(0, 2), **fields):
  config = tiny.config(**{"wrappers": HOST, "precision": "float32", **fields})
  return train.train_and_evaluate(
    config, str(tmp_path), worker_id=rank[0], num_workers=rank[1]
  )


def test_summary_of_commits():
  records = [record(1), record(2, workers=(0, 1, 2), seconds=0.75)]
  assert host_commits.summarize(records) == {
    "commit_workers": 3,
    "commit_staleness": 1.5,
    "commit_megabytes": 1.0,
    "commit_seconds": 0.5,
  }
  assert host_commits.summarize([]) == {}


def test_the_loop_commits_after_each_step(tmp_path):
  run(tmp_path, rank=(1, 2), log_every_steps=4)
  worker = Worker.last
  assert worker.calls == [
    *("start", 1, 2, 3, 4, "settle", 5, 6, 7, 8, "finish", "leave")
  ]
  assert worker.worker_id == 1
  assert worker.created == (str(tmp_path / "workers"), 2, 300.0)
  assert worker.facts["config"]["batch_size"] == 16
  assert worker.facts["the version of"]["jax"] == jax.__version__
  assert worker.facts["the data"]["train"]["number of examples"] == 1437
  # Worker 1 has a folder of its own.
  folder = tmp_path / "workers" / "1"
  rows = tiny.rows(folder)
  assert [row["step"] for row in rows] == [4, 8]
  assert [row["commit_staleness"] for row in rows] == [1.5, 3.5]
  assert [row["commit_megabytes"] for row in rows] == [1.0, 1.0]
  assert json.loads((folder / "config.json").read_text())["batch_size"] == 16
  assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_worker_that_joins_goes_on_where_the_others_are(
  tmp_path, monkeypatch, caplog
):
  read = []
  skip = host_commits.HostCommits._catch_up

  def note(self, step, last):
    new = skip(self, step, last)
    read.append((new, self._train_iter.get_state()["next_index"]))
    return new

  monkeypatch.setattr(host_commits.HostCommits, "_catch_up", note)
  # At the start the others are at step 3; this one is lost at step 5 for 2.
  monkeypatch.setattr(Worker, "missed", (3, {2: 2}))
  state = run(tmp_path)
  # Each step reads the batch of its number.
  assert read == [(3, 3), (4, 4), (7, 7), (8, 8)]
  assert int(state.step) == 3
  assert "goes on from step 3" in caplog.text
  assert "it has missed 2 steps" in caplog.text
  assert tiny.rows(tmp_path)[-1]["step"] == 8


@pytest.mark.slow
def test_a_worker_that_joins_at_the_end_takes_one_step(tmp_path, monkeypatch):
  monkeypatch.setattr(Worker, "missed", (8, {}))
  state = run(tmp_path)
  assert int(state.step) == 1
  assert Worker.last.calls == ["start", 1, "finish", "leave"]
  [row] = tiny.rows(tmp_path)
  assert row["step"] == 8
  assert np.isfinite(row["eval_loss"])


@pytest.mark.slow
def test_a_signal_saves_and_leaves(tmp_path, monkeypatch):
  with monkeypatch.context() as patch:
    tiny.stop_at(patch, 3, 15)
    with pytest.raises(SystemExit) as stop:
      run(tmp_path)
  assert stop.value.code == 143
  assert Worker.last.calls == ["start", 1, 2, 3, "settle", "leave"]
  # It comes back, and the others have taken two steps since.
  monkeypatch.setattr(Worker, "missed", (2, {}))
  state = run(tmp_path)
  assert int(state.step) == 6
  assert [row["step"] for row in tiny.rows(tmp_path)] == [2, 3, 6, 8]


def test_a_signal_while_waiting_for_workers_ends_the_run(tmp_path, monkeypatch):
  request = preemption.StopRequest()
  request.signum = 15

  def interrupt(self, state, facts):
    assert self.should_stop()
    raise InterruptedError

  monkeypatch.setattr(Worker, "start", interrupt)
  monkeypatch.setattr(
    preemption, "catch_signals", lambda: tiny.contextlib.nullcontext(request)
  )
  with pytest.raises(SystemExit) as stop:
    run(tmp_path)
  assert stop.value.code == 143
  assert Worker.last.calls == ["leave"]


@pytest.mark.slow
def test_a_worker_that_comes_too_late_trains_nothing(tmp_path, caplog):
  run(tmp_path, rank=(1, 2))
  state = run(tmp_path, rank=(0, 2))
  assert Worker.last.calls == ["leave"]
  assert int(state.step) == 0
  folder = tmp_path / "workers" / "1"
  assert f"worker 1 has finished the run: step 8 is in {folder}" in caplog.text
  # Its own run can be extended with the others.
  extended = {"num_train_steps": 10, "resume": "extend"}
  assert int(run(tmp_path, rank=(1, 2), **extended).step) == 10


@pytest.mark.slow
def test_hooks_know_the_worker(tmp_path, monkeypatch):
  seen = []

  class Hook:
    def __init__(self, workdir, worker_id):
      seen.append((workdir, worker_id))

    def __call__(self, step, state, metrics):
      seen.append(step)

  monkeypatch.setattr(cluster, "FakeHook", Hook, raising=False)
  run(
    tmp_path,
    rank=(3, 4),
    batch_size=32,
    hooks=("flaxshard.processes.cluster:FakeHook",),
    log_every_steps=8,
    eval_every_steps=8,
  )
  assert seen == [(str(tmp_path / "workers" / "3"), 3), 8]


@pytest.mark.slow
def test_early_stopping_finishes_after_the_save(tmp_path):
  run(
    tmp_path,
    eval_every_steps=2,
    early_stopping={
      "metric": "eval_loss",
      "patience": 0,
      "min_delta": 100.0,
      "mode": "min",
    },
  )
  assert Worker.last.calls[-2:] == ["finish", "leave"]
  assert 4 in Worker.last.calls
  assert 8 not in Worker.last.calls
