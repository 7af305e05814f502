"""Copies of the center for workers that ask for it."""

import gc
import threading
import time
from unittest import mock
import weakref

import numpy as np

from flaxshard.workers import center_copies
from flaxshard.workers.center_copies import CenterCopies
from tests.workers.fake_peers import FakeNetwork


def _create(count=2):
  network = FakeNetwork(count)
  return [CenterCopies(network.join(k)) for k in range(count)]


def _pack(value):
  return center_copies.pack(np.float32(value), local_step=value, source="")


def _pull(copies, commits):
  """Starts a pull; returns what waits for its result."""
  found = []
  thread = threading.Thread(
    target=lambda: found.append(copies.pull(None, commits, time.sleep)),
    daemon=True,
  )
  thread.start()

  def result(seconds):
    thread.join(seconds)
    return found

  return result


def test_a_copy_is_taken_when_the_owner_of_the_state_answers():
  one, two = _create()
  result = _pull(two, 0)
  while not one.is_wanted:
    time.sleep(0.01)
  one.answer(lambda: _pack(3))
  [answer] = result(10)
  assert float(center_copies.unpack(answer, np.float32(0))) == 3


def test_a_worker_that_may_have_an_old_center_does_not_give_it_away():
  one, two = _create()
  one.hold(80)
  # The other one has the newest center.
  assert two.pull(None, 100, time.sleep) is None
  result = _pull(two, 5)
  assert result(0.3) == []
  assert not one.is_wanted
  one.answer(lambda: _pack(80))
  assert result(0.3) == []
  one.release()
  while not one.is_wanted:
    time.sleep(0.01)
  one.answer(lambda: _pack(81))
  [answer] = result(10)
  assert answer.fields["local_step"] == 81


def test_copies_that_were_sent_are_dropped_after_some_time():
  one, two = _create()
  result = _pull(two, 0)
  while not one.is_wanted:
    time.sleep(0.01)
  with mock.patch.object(center_copies, "_KEEP_SECONDS", 0.2):
    copies = [_pack(3)]
    kept = weakref.ref(copies[0])
    one.answer(copies.pop)
    assert len(result(10)) == 1
    result(0).clear()
    one.forget_old()
    assert kept() is not None
    time.sleep(0.3)
    one.forget_old()
    gc.collect()
    assert kept() is None
