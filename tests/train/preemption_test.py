"""Signals and JAX's notice of preemption."""

import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from flaxshard.train import preemption

_TESTS = pathlib.Path(__file__).parents[1]

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


def test_the_first_signal_is_reported(handlers):
  for signum in SIGNALS:
    with preemption.catch_signals() as request:
      assert request.signum is None
      send(signum)
      assert request.signum == signum
      send(signum)
      assert request.signum == signum
  # The previous handler did not get it.
  assert handlers["received"] == []


def test_handlers_are_restored(handlers):
  with preemption.catch_signals():
    for signum in SIGNALS:
      assert signal.getsignal(signum) is not handlers[signum]
  for signum in SIGNALS:
    assert signal.getsignal(signum) is handlers[signum]
  with pytest.raises(KeyboardInterrupt):
    send(signal.SIGINT)


class Clock:
  """A clock that tests set."""

  now = 0.0

  def __call__(self):
    return self.now


@pytest.mark.parametrize(
  ("signum", "error"),
  [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)],
)
def test_only_a_third_signal_interrupts_and_never_a_save(signum, error, caplog):
  clock = Clock()
  request = preemption.StopRequest(clock)
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
  assert len(messages) == 3 and "being written" in messages[0]
  clock.now = 10
  with pytest.raises(error):
    request.receive(signum)


# Step 3 sends SIGTERM; JAX looks for signals once a second.
_RUN = """
import os, signal, sys, time
sys.path[:0] = sys.argv[3:]
import jax
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(sys.argv[2], num_processes=1, process_id=0)
import tiny
from flaxshard.train import preemption
from flaxshard import train

asked = []
original = preemption.agree_on_signal

def agreed(step, request):
  if step == 3:
    os.kill(os.getpid(), signal.SIGTERM)
  if step > 3:
    time.sleep(0.1)
  asked.append(step)
  return original(step, request)

preemption.agree_on_signal = agreed
config = tiny.config(
  num_train_steps=200, eval_every_steps=1000, checkpoint_every_steps=1000,
  log_every_steps=1000,
)
try:
  train.train_and_evaluate(config, sys.argv[1])
except SystemExit as e:
  print(e.code, asked[-1], os.listdir(os.path.join(sys.argv[1], "checkpoints")))
"""


@pytest.mark.slow
def test_the_loop_saves_and_exits_on_jax_s_notice(tmp_path):
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  done = subprocess.run(
    [
      *(sys.executable, "-c", _RUN, str(tmp_path), f"localhost:{port}"),
      *(str(_TESTS.parent), str(_TESTS)),
    ],
    capture_output=True,
    text=True,
    timeout=100,
  )
  assert done.returncode == 0, done.stderr
  code, step, *names = done.stdout.splitlines()[-1].split()
  assert code == "143"
  # Within three seconds; JAX agrees on a later step than the one of the signal.
  assert 3 < int(step) < 40
  assert names == [f"['{step}']"]
