"""Processes are connected, and an exception or a kill ends all of them."""

import re
import signal
import time

import pytest
import two_processes

pytestmark = pytest.mark.slow

# A program with its own loop; `sys.argv[4]` is what happens in a step. Its
# variables are those of torchrun.
_PROGRAM = """
import os, signal, socket, sys, time
port, index = sys.argv[1:3]
os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", WORLD_SIZE="2",
                   RANK=index, JAX_COORDINATOR_PORT=port)
import jax
jax.config.update("jax_platforms", "cpu")
import flaxshard as fs
from flaxshard.processes import failures

index = int(index)
cluster = fs.initialize(heartbeat_timeout=10)
assert "torchrun" in cluster.source
# A second call does nothing.
assert fs.initialize() == cluster
# All processes are on this machine: no other address of it has the port open.
assert socket.socket().connect_ex(("127.0.0.2", int(port)))
import numpy as np
from jax.experimental import multihost_utils

for step in range(6):
  found = multihost_utils.process_allgather(np.array([index]))
  assert found.ravel().tolist() == [0, 1]
  if step == int(sys.argv[3]):
    exec(sys.argv[4])
"""
_RAISE = "raise ValueError('an error of the user')"


def _run(code, step=3):
  """Returns the exit code and the standard error of each process."""
  start = time.monotonic()
  ended = two_processes.run_until_end(_PROGRAM, str(step), code)
  assert time.monotonic() - start < 60
  return ended


@pytest.mark.parametrize(
  ("step", "process", "fault", "code", "text"),
  [
    (3, 0, _RAISE, 1, "ValueError: an error of the user"),
    # The other one is at the end of the program already.
    (5, 1, f"time.sleep(2); {_RAISE}", 1, "ValueError: an error of the user"),
    (3, 1, "with failures.share(): sys.exit(3)", 3, "SystemExit: 3"),
    (3, 1, "raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
  ],
)
def test_failure_ends_all_processes(step, process, fault, code, text):
  ended = _run(f"if index == {process}:\n  {fault}", step)
  assert [e[0] for e in ended] == ([code, 1] if process == 0 else [1, code])
  assert re.search(
    rf"process {process} \(host .*, pid \d+\) failed: {text}",
    ended[1 - process][1],
  )
  assert "Fatal" not in ended[process][1]


def test_each_process_reports_its_own_exception():
  for code, log in _run(_RAISE):
    assert code == 1
    assert log.count("Traceback") == 1
    assert log.splitlines()[-1] == "ValueError: an error of the user"


def test_an_exception_that_all_catch_ends_nothing():
  caught = f"try:\n  with failures.share(): {_RAISE}\nexcept ValueError: pass"
  assert _run(caught) == [(0, ""), (0, "")]


def test_killed_process_is_named():
  (code_0, log_0), (code_1, _) = _run(
    "if index == 1: os.kill(os.getpid(), signal.SIGKILL)"
  )
  assert (code_0, code_1) == (1, -signal.SIGKILL)
  assert "no answer from process 1" in log_0
