"""The first start of a run: who takes part, and who comes later."""

import threading
import time

from flaxshard.workers.barrier import Barrier
from flaxshard.workers.barrier import Hello
from tests.workers.fake_peers import FakeNetwork


def _barrier(network, worker, digest="0"):
  peers = network.join(worker)
  return Barrier(peers, Hello({"num_workers": 2}, 0, 0, digest), quorum=1)


def _agree(barriers):
  """Returns the verdicts of several workers."""
  verdicts = {}
  threads = [
    threading.Thread(
      target=lambda i=i, b=b: verdicts.update({i: b.agree(30, time.sleep)})
    )
    for i, b in enumerate(barriers)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(30)
  return [verdicts[i] for i in range(len(barriers))]


def test_all_workers_begin_together():
  network = FakeNetwork(2)
  verdicts = _agree([_barrier(network, k) for k in range(2)])
  assert network.view.started
  assert [v.present for v in verdicts] == [[0, 1], [0, 1]]


def test_worker_that_comes_back_joins_the_run_that_has_begun():
  network = FakeNetwork(2)
  _agree([_barrier(network, k) for k in range(2)])
  network.kill(1)
  assert _barrier(network, 1).agree(30, time.sleep) is None
