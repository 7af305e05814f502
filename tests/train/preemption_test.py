"""Signals. resume_processes_test.py has JAX's notice of preemption."""

import os
import signal
import types

import pytest

from flaxshard.train import preemption

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def handlers():
  """Keeps signals from the test runner: SIGTERM to a list, Ctrl-C raises."""
  received = []

  def on_sigterm(signum, frame):
    del frame
    received.append(signum)

  before = {
    signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    signal.SIGTERM: signal.signal(signal.SIGTERM, on_sigterm),
  }
  yield {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: on_sigterm,
    "received": received,
  }
  for signum, handler in before.items():
    signal.signal(signum, handler)


def send(signum):
  os.kill(os.getpid(), signum)


def test_the_first_signal_is_reported_and_handlers_are_restored(handlers):
  for signum in SIGNALS:
    with preemption.catch_signals() as request:
      assert request.signum is None
      for _ in range(2):
        send(signum)
        assert request.signum == signum
    assert signal.getsignal(signum) is handlers[signum]
  # The previous handler did not get it.
  assert handlers["received"] == []


@pytest.mark.parametrize(
  ("signum", "error"),
  [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)],
)
def test_only_a_third_signal_interrupts_and_never_a_save(
  signum, error, caplog, monkeypatch
):
  clock = types.SimpleNamespace(now=0.0)
  monkeypatch.setattr("time.monotonic", lambda: clock.now)
  request = preemption.StopRequest()
  for _ in range(3):
    # In quick succession: one request.
    request.receive(signum)
  clock.now = 2
  request.receive(signum)
  assert request.signum == signum
  name = signal.Signals(signum).name
  first, second = (r.getMessage() for r in caplog.records)
  assert first.startswith(f"{name}: stopping")
  assert second.startswith(f"{name} again:")
  caplog.clear()
  with request.saving():
    for clock.now in (4, 6, 8):
      request.receive(signum)
  messages = [r.getMessage() for r in caplog.records]
  assert len(messages) == 3 and "interrupts a save" in messages[0]
  clock.now = 10
  with pytest.raises(error):
    request.receive(signum)
