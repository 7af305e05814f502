"""Networks that are split, and links that are slow."""

import time

import pytest
import worker_processes

pytestmark = pytest.mark.slow

_HEARTBEAT = 2.0
_AGN = {"communication_period": 5, "heartbeat": _HEARTBEAT, "deadline": 5.0}
_CUT = _HEARTBEAT + 5  # seconds


@pytest.mark.parametrize(
  ("commit", "quorum"), [("mean", 3), ("mean", 1), ("sequential", 1)]
)
def test_split_network_has_one_center(commit, quorum, tmp_path):
  """In halves, and with one alone."""
  agn = {**_AGN, "commit": commit, "quorum": quorum}
  with worker_processes.Workers(
    tmp_path, 4, agn, use_relay=True
  ).start() as workers:
    workers.wait_for_commits(2)
    for groups in (([0, 1], [2, 3]), ([0, 2, 3], [1])):
      commits = workers.commits(0)[-1]["commit"]
      workers.relay.split(*groups)
      cut = time.monotonic()
      time.sleep(_CUT)
      # What was under way when the network was cut has long ended.
      made = {
        k for k in workers.workers if workers.commits(k, cut + _HEARTBEAT + 2)
      }
      workers.relay.heal()
      healed = time.monotonic()
      # One side goes on, if it has a quorum.
      allowed = [{*x} for x in groups if len(x) >= quorum] or [set()]
      assert made in allowed, workers.report(f"{made} have made commits")
      workers.wait_for_commits(2, since=healed)
    ends = workers.finish()
    assert ends[0]["commits"] > commits  # nobody has begun anew


def test_one_link_is_cut(tmp_path):
  """Two workers do not reach each other; a third one reaches both."""
  agn = {**_AGN, "commit": "mean"}
  with worker_processes.Workers(
    tmp_path, 3, agn, use_relay=True
  ).start() as workers:
    workers.wait_for_commits(2)
    workers.relay.link(0, 1).is_cut = True
    cut = time.monotonic()
    workers.wait_for_commits(2, 2, since=cut + _HEARTBEAT + 2)
    workers.relay.heal()
    workers.wait_for_commits(2, since=time.monotonic())
    workers.finish()


@pytest.mark.parametrize("commit", ["mean", "sequential"])
def test_steps_go_on_while_a_commit_is_under_way(commit, tmp_path):
  """Over links of 150 ms, with steps of 50 ms."""
  agn = {
    **_AGN,
    "commit": commit,
    "communication_period": 20,
    "delay": 15,
    "heartbeat": 10.0,
  }
  with worker_processes.Workers(
    tmp_path, 2, agn, use_relay=True, step_seconds=0.05
  ).start() as workers:
    workers.wait_for_commits(1)
    workers.relay.slow_down(delay=0.15)
    since = time.monotonic()
    workers.wait_for_commits(3, since=since)
    for worker in workers.workers:
      commits = workers.commits(worker, since)[1:]
      assert min(x["seconds"] for x in commits) >= 0.3
      assert max(x["waited_seconds"] for x in commits) < 0.1
    workers.relay.slow_down(delay=0)
    workers.finish()
