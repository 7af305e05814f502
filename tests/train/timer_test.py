"""Steps per second on a fake clock, and profiler traces."""

import contextlib
import types

import jax
import jax.numpy as jnp
import pytest

from flaxshard.train import report


def test_paused_time_does_not_count(monkeypatch):
  clock = types.SimpleNamespace(now=1000.0)
  monkeypatch.setattr("time.monotonic", lambda: clock.now)
  timer = report.Timer(0)
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


@pytest.mark.parametrize(
  ("taken", "start", "stop"),
  [
    (range(1, 6), 2, 4),
    # A run that is resumed within the range; a worker that jumps over its ends.
    (range(3, 6), 3, 4),
    ((1, 3, 5), 3, 5),
  ],
)
def test_profile_traces_the_given_steps(
  tmp_path, monkeypatch, taken, start, stop
):
  events = []

  @contextlib.contextmanager
  def trace(path):
    events.append((f"start before {step}", path))
    yield
    events.append(f"stop before {step}")

  monkeypatch.setattr(jax.profiler, "trace", trace)
  for steps in ((2, 3), ()):
    with report.profile_steps(steps, str(tmp_path)) as before_step:
      for step in taken:
        before_step(step, jnp.zeros(()))
  path = str(tmp_path / "profile")
  assert events == [(f"start before {start}", path), f"stop before {stop}"]
