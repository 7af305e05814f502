"""Workers that are killed: the others go on, and the killed one comes back."""

import itertools
import random

import pytest
import worker_processes
from worker_processes import Fault

pytestmark = pytest.mark.slow

_HEARTBEAT = 3.0
# What the others may pause, beyond the heartbeat.
_SLACK = 2.0

_MEAN = {
  "communication_period": 5,
  "commit": "mean",
  "heartbeat": _HEARTBEAT,
}
_OVERLAPPED = {**_MEAN, "fragments": 2, "delay": 2, "commit_dtype": "int8"}
_SEQUENTIAL = {**_MEAN, "commit": "sequential"}


def _started(workers, *ids):
  """Waits until workers have made two commits, then a few more steps."""
  workers.wait_for_commits(2, *ids)
  watched = ids[0] if ids else 0
  step = workers.step(watched) + random.randrange(10)
  workers.wait(lambda: workers.step(watched) >= step, f"at step {step}")


def _assert_went_on(workers, survivors, since):
  """Waits for more commits; nobody may have paused for longer than stated."""
  workers.wait_for_commits(3, *survivors, since=since + _HEARTBEAT)
  for worker in survivors:
    pause = workers.longest_pause(worker, since)
    assert pause <= _HEARTBEAT + _SLACK, workers.report(f"{worker}: {pause} s")


def _assert_center_has_all_commits(end, agn):
  """Nobody has begun anew, so the center is as near as its steps make it."""
  # From a distance of 3, Adam moves the center by about 0.1 with each commit.
  commits = end["step"] / agn["communication_period"]
  assert end["distance"] < max(1, 3.5 - 0.1 * commits), end


@pytest.mark.parametrize(
  "agn",
  [
    pytest.param(_MEAN, id="mean"),
    pytest.param({**_MEAN, "commit": "sum"}, id="sum"),
    pytest.param(_OVERLAPPED, id="fragments, delay and int8"),
    pytest.param(_SEQUENTIAL, id="sequential"),
    pytest.param(
      {**_SEQUENTIAL, "fragments": 2, "delay": 2},
      id="sequential, fragments and delay",
    ),
  ],
)
def test_others_go_on_and_the_killed_worker_comes_back(agn, tmp_path):
  with worker_processes.Workers(tmp_path, 3, agn).start() as workers:
    _started(workers)
    # Each of them proposes views and owns parts, depending on who is left.
    victim = random.randrange(3)
    others = [k for k in workers.workers if k != victim]
    killed = workers.kill(victim)
    _assert_went_on(workers, others, killed)
    if agn["commit"] != "sequential":
      commits = workers.commits(others[0], killed + _HEARTBEAT + _SLACK)
      assert {tuple(x["workers"]) for x in commits} <= {tuple(others)}
    # It pulls the center, and goes on at the step of the others.
    before = workers.step(others[0])
    workers.start(victim)
    [start] = workers.wait(
      lambda: workers.rows(victim, "start", killed), "started again"
    )
    if agn["commit"] != "sequential":
      assert start["step"] >= before, workers.report(f"from {before}")
    workers.wait_for_commits(2, victim, since=start["time"])
    for worker in others:
      # A worker that joins holds up nobody.
      pause = workers.longest_pause(worker, killed + _HEARTBEAT + _SLACK)
      assert pause <= _SLACK
    if agn["commit"] != "sequential":
      workers.wait_for_commits(
        1, others[0], since=start["time"], workers=(0, 1, 2)
      )
    for end in workers.finish():
      _assert_center_has_all_commits(end, agn)


@pytest.mark.parametrize("agn", [_MEAN, _SEQUENTIAL], ids=lambda x: x["commit"])
def test_two_of_four_are_killed_at_once(agn, tmp_path):
  with worker_processes.Workers(tmp_path, 4, agn).start() as workers:
    _started(workers)
    victims = random.choice(list(itertools.combinations(range(4), 2)))
    others = [k for k in workers.workers if k not in victims]
    killed = workers.kill(*victims)
    _assert_went_on(workers, others, killed)
    workers.start(*victims)
    workers.wait_for_commits(2, *victims, since=killed)
    workers.finish()


@pytest.mark.parametrize("is_answered", [False, True])
@pytest.mark.parametrize("agn", [_MEAN, _SEQUENTIAL], ids=lambda x: x["commit"])
def test_owner_is_killed_during_a_commit(agn, is_answered, tmp_path):
  """Nobody's commit is lost or applied twice; all have the same center."""
  method = "commit_part" if agn["commit"] == "mean" else "commit_cell"
  fault = Fault("kill in call", method=method, count=8, is_answered=is_answered)
  with worker_processes.Workers(tmp_path, 3, agn) as workers:
    workers.start(0, 2).start(1, fault=fault)
    killed = workers.wait_for_death(1)
    _assert_went_on(workers, [0, 2], killed)
    workers.start(1)
    workers.wait_for_commits(2, 1, since=killed)
    workers.finish()
    commits = {x["commit"] for x in workers.commits(0)}
    if agn["commit"] == "mean":
      # Each round is made once, without a gap.
      assert len(commits) == len(workers.commits(0))
      assert commits == set(range(min(commits), max(commits) + 1))


def test_all_workers_but_one_are_killed_one_after_another(tmp_path):
  """The last one has the center, whoever has owned it."""
  with worker_processes.Workers(tmp_path, 3, _SEQUENTIAL).start() as workers:
    for victim, others in ((0, [1, 2]), (1, [2])):
      _started(workers, *others)
      killed = workers.kill(victim)
      _assert_went_on(workers, others, killed)
    [end] = workers.finish(2)
    _assert_center_has_all_commits(end, _SEQUENTIAL)
