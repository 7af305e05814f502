"""The loop where JAX hears of preemption, and not Python."""

import pathlib
import socket
import subprocess
import sys

import pytest

_TESTS = pathlib.Path(__file__).parents[1]

# SIGTERM comes in step 3; JAX asks for signals once a second.
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

def agreed(step, signum):
  if step == 3:
    os.kill(os.getpid(), signal.SIGTERM)
  if step > 3:
    time.sleep(0.1)
  asked.append(step)
  return original(step, signum)

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


def test_a_notice_of_preemption_saves_and_ends(tmp_path) -> None:
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
  # Within three seconds, and not in the step of the signal itself.
  assert 3 < int(step) < 40
  assert names == [f"['{step}']"]


@pytest.mark.parametrize("step", [1, 2**31 - 1])
def test_without_jax_distributed_nobody_is_asked(step, monkeypatch) -> None:
  from jax.experimental import multihost_utils

  from flaxshard.train import preemption

  def asked(step):
    raise AssertionError(step)

  monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked)
  assert preemption.agree_on_signal(step, None) is None
  assert preemption.agree_on_signal(step, 2) == 2
