"""Workers of a config that are killed, stopped by a signal, or fail alone."""

import re
import signal
import time

import pytest
import tiny
import worker_loop_program
import worker_processes
from worker_processes import Fault

pytestmark = pytest.mark.slow

_HEARTBEAT = 3.0
_AGN = {"communication_period": 5, "commit": "mean", "heartbeat": _HEARTBEAT}
# Enough for a worker to come back before the others end.
_STEPS = 80


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return str(tmp_path_factory.mktemp("cache"))


def _workers(folder, cache, agn=_AGN):
  return worker_processes.Workers(
    folder,
    3,
    agn,
    run=worker_loop_program.run,
    size=_STEPS,
    step_seconds=0.1,
    cache=cache,
  )


def _wait_for_step(workers, step):
  workers.wait(
    lambda: all(workers.step(k) >= step for k in workers.workers),
    f"at step {step}",
  )


def _check_end(workers, *ids):
  ends = workers.wait_for_ends(*ids)
  assert {x["step"] for x in ends} == {_STEPS}


@pytest.mark.parametrize("commit", ["mean", "sequential"])
def test_all_are_killed_and_started_again(commit, tmp_path, cache):
  """The run goes on from the newest center of all checkpoints."""
  with _workers(tmp_path, cache, {**_AGN, "commit": commit}).start() as workers:
    _wait_for_step(workers, 22)
    killed = workers.kill(*workers.workers)
    workers.start()
    _check_end(workers, *workers.workers)
    for worker in workers.workers:
      first = workers.rows(worker, "step", killed)[0]
      assert 10 < first["step"] <= 35, first
      assert first["commits"] > 0


def test_killed_worker_comes_back_by_the_same_command(tmp_path, cache):
  with _workers(tmp_path, cache).start() as workers:
    _wait_for_step(workers, 12)
    killed = workers.kill(1)
    time.sleep(1)
    workers.start(1)
    _check_end(workers, *workers.workers)
    for worker in (0, 2):
      assert workers.longest_pause(worker, killed) <= _HEARTBEAT + 2
    # It has restored its checkpoint, and then went on where the others were.
    assert "goes on from step" in workers.log(1)
    counts = [
      x["commit_workers"] for x in tiny.rows(tmp_path) if "commit_workers" in x
    ]
    assert counts[0] == counts[-1] == 3 and 2 in counts, counts


@pytest.mark.parametrize("kind", ["full disk", "exception", "terminate"])
def test_one_fails_alone(kind, tmp_path, cache):
  fault = Fault(kind, step=12)
  with _workers(tmp_path, cache) as workers:
    workers.start(0, 2).start(1, fault=fault)
    _check_end(workers, 0, 2)
    code = workers.exit_code(1)
    log = workers.log(1)
    if kind == "terminate":
      assert code == 128 + signal.SIGTERM, log
      assert re.search(r"SIGTERM: saved step 1\d", log)
    else:
      assert code == 1, log
      assert re.search("injected|File too large", log), log
    # It comes back to the end of a run that is over.
    counts = [
      x["commit_workers"] for x in tiny.rows(tmp_path) if "commit_workers" in x
    ]
    assert counts[-1] == 2
