"""An uncaught exception or a killed process ends all of them."""

import re
import signal
import time

import pytest
import two_processes

pytestmark = pytest.mark.slow

# A program with its own loop; `sys.argv[4]` is what happens in a step.
_PROGRAM = """
import os, signal, sys, time
import jax
jax.config.update("jax_platforms", "cpu")
import flaxshard as fs
from flaxshard.processes import failures

index = int(sys.argv[2])
fs.initialize(f"127.0.0.1:{sys.argv[1]}", 2, index, heartbeat_timeout=10)
import numpy as np
from jax.experimental import multihost_utils

for step in range(6):
  multihost_utils.process_allgather(np.ones(2))
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
