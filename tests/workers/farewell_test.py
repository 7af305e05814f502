"""Who waits for whom at the end of a run."""

import threading
import time

from flaxshard.workers.farewell import Farewell
from tests.workers.fake_peers import FakeNetwork


def _in_thread(function):
  thread = threading.Thread(target=function, daemon=True)
  thread.start()
  return thread


def _wait(farewell, **kwargs):
  return _in_thread(lambda: farewell.wait(time.sleep, **kwargs))


def _assert_end(threads):
  for thread in threads:
    thread.join(10)
    assert not thread.is_alive()


def test_all_wait_until_the_last_one_is_done():
  network = FakeNetwork(2)
  one, two = (Farewell(network.join(k), "commits") for k in range(2))
  first = _wait(one)
  first.join(0.3)
  assert first.is_alive()
  _assert_end([_wait(two), first])


def test_a_worker_that_comes_after_the_others_were_done_does_not_wait():
  network = FakeNetwork(3)
  commits, pulls = [], []
  for k in range(2):
    peers = network.join(k)
    commits.append(Farewell(peers, "commits"))
    pulls.append(Farewell(peers, "pulls"))
  _assert_end([_wait(farewell) for farewell in commits])
  peers = network.join(2)
  late = Farewell(peers, "commits"), Farewell(peers, "pulls")
  others = [_wait(farewell) for farewell in pulls]
  _assert_end([_wait(late[0])])
  assert all(thread.is_alive() for thread in others)
  _assert_end([_wait(late[1]), *others])


def test_a_worker_that_is_lost_and_comes_back_is_not_done():
  network = FakeNetwork(2)
  farewells = [Farewell(network.join(k), "commits") for k in range(2)]
  _assert_end([_wait(farewell) for farewell in farewells])
  again = Farewell(network.join(1), "commits")
  waiting = _wait(farewells[0])
  waiting.join(0.3)
  assert waiting.is_alive()
  _assert_end([_wait(again), waiting])


def test_nobody_waits_for_a_worker_that_has_begun_in_another_way():
  network = FakeNetwork(2)
  peers = [network.join(k) for k in range(2)]
  one, two = (Farewell(p, "start") for p in peers)
  waiting = _wait(one, among=[p.incarnation for p in peers])
  waiting.join(0.3)
  assert waiting.is_alive()
  two.mark_done()
  _assert_end([waiting])
