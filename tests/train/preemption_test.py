"""Signals as a question."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from flaxshard.train import preemption

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def handlers():
  """Signals of this test go to a list, Ctrl-C raises: never to the runner."""
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


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_sets_the_flag(signum, handlers):
  with preemption.catch_signals() as interrupted:
    assert interrupted() is None
    send(signum)
    assert interrupted() == signum
    assert interrupted() == signum
  # It was ours: nobody else has seen it.
  assert handlers["received"] == []


def test_handlers_are_restored(handlers):
  with preemption.catch_signals():
    for signum in SIGNALS:
      assert signal.getsignal(signum) is not handlers[signum]
  for signum in SIGNALS:
    assert signal.getsignal(signum) is handlers[signum]
  with pytest.raises(KeyboardInterrupt):
    send(signal.SIGINT)


@pytest.mark.parametrize("signum", [None, *SIGNALS])
def test_handlers_are_restored_after_an_error(signum, handlers):
  with pytest.raises(KeyError), preemption.catch_signals():
    if signum:
      send(signum)
    raise KeyError
  for s in SIGNALS:
    assert signal.getsignal(s) is handlers[s]


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_a_second_signal_ends_the_process_at_once(first, second):
  code = f"""
import os
from flaxshard.train import preemption
with preemption.catch_signals() as interrupted:
  os.kill(os.getpid(), {int(first)})
  print(interrupted(), flush=True)
  os.kill(os.getpid(), {int(second)})
  print("still here")
"""
  result = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True
  )
  assert result.stdout == f"{int(first)}\n"
  assert result.returncode == -second
  assert "Traceback" not in result.stderr


def test_in_a_thread_nothing_is_caught(handlers):
  answers = []

  def work():
    with preemption.catch_signals() as interrupted:
      answers.append(signal.getsignal(signal.SIGTERM))
      signal.raise_signal(signal.SIGTERM)
      answers.append(interrupted())

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert answers == [handlers[signal.SIGTERM], None]
  assert handlers["received"] == [signal.SIGTERM]


def test_one_after_another():
  for _ in range(2):
    with preemption.catch_signals() as interrupted:
      assert interrupted() is None
      send(signal.SIGTERM)
      assert interrupted() == signal.SIGTERM
