"""Steps a second, by a clock that the tests set."""

import pytest

from flaxshard.train import timer as timer_lib


class Clock:
  def __init__(self):
    self.now = 1000.0

  def __call__(self):
    return self.now


@pytest.fixture
def clock(monkeypatch):
  clock = Clock()
  monkeypatch.setattr("time.monotonic", clock)
  return clock


def test_steps_since_the_last_lap(clock):
  timer = timer_lib.Timer(0)
  clock.now += 5
  assert timer.lap(10) == 2.0
  clock.now += 10
  assert timer.lap(15) == 0.5


def test_steps_before_a_resumed_run_do_not_count(clock):
  timer = timer_lib.Timer(100)
  clock.now += 4
  assert timer.lap(102) == 0.5


def test_paused_time_is_left_out(clock):
  timer = timer_lib.Timer(0)
  clock.now += 1
  for _ in range(2):
    with timer.paused():
      clock.now += 50
  clock.now += 1
  assert timer.lap(8) == 4.0
  # Right after a lap, as the loop does.
  with timer.paused():
    clock.now += 50
  clock.now += 2
  assert timer.lap(12) == 2.0


def test_paused_time_is_left_out_after_an_error_too(clock):
  timer = timer_lib.Timer(0)
  with pytest.raises(KeyError), timer.paused():
    clock.now += 50
    raise KeyError
  clock.now += 2
  assert timer.lap(8) == 4.0


def test_no_steps_or_no_time_is_no_number(clock):
  timer = timer_lib.Timer(3)
  assert timer.lap(4) is None
  clock.now += 1
  assert timer.lap(4) is None
  clock.now += 1
  assert timer.lap(6) == 2.0
