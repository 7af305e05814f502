"""Steps per second on a fake clock, and profiler traces."""

import jax
import jax.numpy as jnp
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


def test_a_lap_counts_the_steps_since_the_last_one(clock):
  timer = timer_lib.Timer(0)
  clock.now += 5
  assert timer.lap(10) == 2.0
  clock.now += 10
  assert timer.lap(15) == 0.5
  # Steps of earlier runs do not count.
  timer = timer_lib.Timer(100)
  clock.now += 4
  assert timer.lap(102) == 0.5


def test_paused_time_does_not_count(clock):
  timer = timer_lib.Timer(0)
  clock.now += 1
  for _ in range(2):
    with timer.paused():
      clock.now += 50
  clock.now += 1
  assert timer.lap(8) == 4.0
  # The loop pauses right after a lap.
  with timer.paused():
    clock.now += 50
  clock.now += 2
  assert timer.lap(12) == 2.0
  # An error ends the pause.
  with pytest.raises(KeyError), timer.paused():
    clock.now += 50
    raise KeyError
  clock.now += 2
  assert timer.lap(20) == 4.0


def test_a_lap_without_steps_or_time_is_none(clock):
  timer = timer_lib.Timer(3)
  assert timer.lap(4) is None
  clock.now += 1
  assert timer.lap(4) is None
  clock.now += 1
  assert timer.lap(6) == 2.0


@pytest.mark.parametrize(
  ("last_step", "stop"),
  # The run may end before the last step to trace.
  [(5, "stop before 4"), (2, "stop before the end")],
)
def test_profile_traces_the_given_steps(tmp_path, monkeypatch, last_step, stop):
  events = []
  step = 0
  monkeypatch.setattr(
    jax.profiler,
    "start_trace",
    lambda path: events.append((f"start before {step}", path)),
  )
  monkeypatch.setattr(
    jax.profiler, "stop_trace", lambda: events.append(f"stop before {step}")
  )
  with timer_lib.profile_steps((2, 3), str(tmp_path)) as before_step:
    for step in range(1, last_step + 1):
      before_step(step, jnp.zeros(()))
    step = "the end"
  assert events == [("start before 2", str(tmp_path / "profile")), stop]


@pytest.mark.slow
def test_a_trace_is_written(tmp_path):
  with timer_lib.profile_steps((1, 1), str(tmp_path)) as before_step:
    before_step(1, jnp.zeros(()))
    jnp.zeros(()).block_until_ready()
    before_step(2, jnp.zeros(()))
  assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1
