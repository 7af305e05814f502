"""Signals as a question."""

import os
import signal
import threading

import pytest

from flaxshard import interrupts

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
  with interrupts.caught() as interrupted:
    assert interrupted() is None
    send(signum)
    assert interrupted() == signum
    assert interrupted() == signum
  # It was ours: nobody else has seen it.
  assert handlers["received"] == []


def test_handlers_are_restored(handlers):
  with interrupts.caught():
    for signum in SIGNALS:
      assert signal.getsignal(signum) is not handlers[signum]
  for signum in SIGNALS:
    assert signal.getsignal(signum) is handlers[signum]
  with pytest.raises(KeyboardInterrupt):
    send(signal.SIGINT)


@pytest.mark.parametrize("signum", [None, *SIGNALS])
def test_handlers_are_restored_after_an_error(signum, handlers):
  with pytest.raises(KeyError), interrupts.caught():
    if signum:
      send(signum)
    raise KeyError
  for s in SIGNALS:
    assert signal.getsignal(s) is handlers[s]


@pytest.mark.parametrize("first", SIGNALS)
def test_a_second_ctrl_c_is_a_keyboard_interrupt(first, handlers):
  with interrupts.caught() as interrupted:
    send(first)
    with pytest.raises(KeyboardInterrupt):
      send(signal.SIGINT)
    # What came first stays.
    assert interrupted() == first
  assert signal.getsignal(signal.SIGINT) is handlers[signal.SIGINT]


def test_a_second_sigterm_goes_where_it_went_before(handlers):
  with interrupts.caught() as interrupted:
    send(signal.SIGTERM)
    assert handlers["received"] == []
    send(signal.SIGTERM)
    assert handlers["received"] == [signal.SIGTERM]
    assert interrupted() == signal.SIGTERM


def test_in_a_thread_nothing_is_caught(handlers):
  answers = []

  def work():
    with interrupts.caught() as interrupted:
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
    with interrupts.caught() as interrupted:
      assert interrupted() is None
      send(signal.SIGTERM)
      assert interrupted() == signal.SIGTERM
