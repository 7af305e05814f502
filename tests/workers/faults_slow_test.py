"""Workers that are stopped for 20 s, or slow, or fewer than the quorum."""

import signal
import time

import pytest
import worker_processes
from worker_processes import Fault

pytestmark = pytest.mark.slow

_STOPPED = 20.0  # seconds


def test_workers_that_are_stopped_for_20_s(tmp_path):
  """With a heartbeat below and above, for commits by mean and sequential."""
  agn = {"communication_period": 5, "deadline": 3.0}
  cases = {
    ("mean", 4.0): {**agn, "commit": "mean", "heartbeat": 4.0},
    ("mean", 60.0): {**agn, "commit": "mean", "heartbeat": 60.0},
    ("sequential", 60.0): {
      **agn,
      "commit": "sequential",
      "heartbeat": 60.0,
      "deadline": 60.0,
    },
  }
  groups = {}
  try:
    for (commit, heartbeat), case in cases.items():
      folder = tmp_path / f"{commit}-{heartbeat}"
      folder.mkdir()
      groups[commit, heartbeat] = worker_processes.Workers(
        folder, 3, case, step_seconds=0.1
      ).start()
    for group in groups.values():
      group.wait_for_commits(2)
      # Worker 1 owns a part as well. Sequential commits wait for an owner that
      # is alive; so the one that is stopped there is not the owner of all.
      group.signal(signal.SIGSTOP, 1)
    stopped = time.monotonic()
    time.sleep(_STOPPED)
    continued = time.monotonic()
    for group in groups.values():
      group.signal(signal.SIGCONT, 1)
    for (commit, heartbeat), group in groups.items():
      group.wait_for_commits(2, since=continued)
      pause = max(group.longest_pause(k, stopped) for k in (0, 2))
      print(commit, heartbeat, f"{pause:.1f} s")
      if heartbeat < _STOPPED:
        assert pause <= heartbeat + 2
        made = group.commits(0, stopped + heartbeat + 2)
        assert (0, 2) in {tuple(x["workers"]) for x in made}
      # It takes part again.
      if commit == "mean":
        group.wait_for_commits(1, 0, since=continued, workers=(0, 1, 2))
      group.finish()
  finally:
    for group in groups.values():
      group.__exit__()


def test_slow_worker_holds_up_nobody_in_sequential_commits(tmp_path):
  agn = {"communication_period": 5, "commit": "sequential"}
  with worker_processes.Workers(tmp_path, 3, agn, step_seconds=0.03) as workers:
    workers.start(0, 1).start(2, fault=Fault("slow"))
    workers.wait_for_commits(2)
    since = time.monotonic()
    before = [workers.step(k) for k in workers.workers]
    time.sleep(3)
    steps = [workers.step(k) - n for k, n in enumerate(before)]
    # At least twice as many as the slow one, whatever else the machine does.
    assert min(steps[:2]) > 2 * steps[2], steps
    staleness = [x["staleness"] for x in workers.commits(2, since)]
    assert staleness and max(staleness) > 1


def test_slow_worker_is_waited_for_until_the_deadline(tmp_path):
  """It gets the result, and is not in it."""
  agn = {"communication_period": 5, "commit": "mean", "deadline": 1.0}
  with worker_processes.Workers(tmp_path, 3, agn, step_seconds=0.05) as workers:
    workers.start(0, 1).start(2, fault=Fault("slow", step=10))
    workers.wait_for_commits(1, 0, workers=(0, 1, 2))
    workers.wait_for_commits(2, 0, workers=(0, 1))
    waited = [x["waited_seconds"] for x in workers.commits(0)[-2:]]
    assert max(waited) < 1.5, waited


def test_workers_wait_while_they_are_fewer_than_the_quorum(tmp_path):
  agn = {
    "communication_period": 5,
    "commit": "mean",
    "heartbeat": 2.0,
    "quorum": 2,
  }
  with worker_processes.Workers(tmp_path, 2, agn).start() as workers:
    workers.wait_for_commits(2)
    killed = workers.kill(1)
    time.sleep(4)
    assert len(workers.commits(0, killed + 1)) == 0
    workers.start(1)
    workers.wait_for_commits(3, since=killed + 4, workers=(0, 1))
    workers.finish()
