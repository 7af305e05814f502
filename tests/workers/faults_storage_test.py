"""Workers whose disk is full."""

import pytest
import worker_processes
from worker_processes import Fault

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("commit", ["mean", "sequential"])
def test_others_go_on_when_the_disk_of_one_is_full(commit, tmp_path):
  """It trains on, because nothing that a commit needs is on its disk."""
  agn = {"communication_period": 5, "commit": commit, "heartbeat": 2.0}
  with worker_processes.Workers(tmp_path, 3, agn) as workers:
    workers.start(0, 2).start(1, fault=Fault("full disk", step=12))
    workers.wait(lambda: workers.step(1) > 12, "a full disk")
    full = workers.rows(1, "step")[-1]["time"]
    workers.wait_for_commits(3, since=full)
    # A view is needed now, which worker 1 cannot write.
    killed = workers.kill(2)
    workers.wait_for_commits(3, 0, since=killed + 4)
    workers.finish(0, 1)
