"""Processes without a sign of life are found, and no others."""

import jax
import pytest

from flaxshard.processes import losses


class Events:
  """The events of process 0 of three, of which some answer a roll call."""

  index = 0

  def __init__(self, existing=None, silent=()):
    self.existing = existing  # the event that is there already
    self.silent = list(silent)
    self.received = []

  def send(self, event, number):
    return number, self.existing or {**event, "process": self.index}

  def receive(self, number, timeout_ms):
    assert timeout_ms > 1000 * losses.ANSWER_SECONDS
    self.received.append(number)

  def missing(self, key):
    assert key == "answer/4"
    return self.silent


def test_roll_call_returns_silent_processes(monkeypatch):
  monkeypatch.setattr(losses, "ANSWER_SECONDS", 0.2)
  assert losses.call_roll(Events(silent=[2]), 4) == [2]
  assert losses.call_roll(Events(), 4) == []


def test_only_one_process_collects_answers():
  events = Events({"kind": "roll call", "process": 1}, silent=[2])
  assert losses.call_roll(events, 4) == []
  assert events.received == [5]
  events = Events({"kind": "failure", "process": 1}, silent=[2])
  assert losses.call_roll(events, 4) == []
  assert events.received == []


def test_silences_are_measured_by_the_clock_of_one_process(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(losses.time, "monotonic", lambda: now[0])
  silences = losses.Silences()

  def update(seconds, *beats):
    now[0] += seconds
    return silences.update(dict(enumerate(beats)), 4.0, 5.0)

  assert update(2, "1", "1") == []
  assert update(4, "2", "1") == []
  # This process was frozen for 100 s: only 4 s count.
  now[0] += 96
  assert update(4, "2", "2") == []
  assert update(2, "2", "3") == [0]
  assert update(2, "3", "3") == []


def test_errors_of_jax_may_come_from_a_loss():
  def raised(call):
    with pytest.raises(Exception) as info:
      call()
    return info.value

  def chained():
    try:
      jax.numpy.ones(2).reshape(3)
    except TypeError as e:
      raise ValueError("an error of the user") from e

  assert losses.may_cause(jax.errors.JaxRuntimeError("closed"))
  assert losses.may_cause(raised(lambda: jax.numpy.ones(2).reshape(3)))
  assert losses.may_cause(raised(chained))
  assert not losses.may_cause(raised(lambda: [][0]))
