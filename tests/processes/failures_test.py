"""An uncaught exception or a killed process ends all of them."""

import re
import signal
import time

import pytest
import two_processes

pytestmark = pytest.mark.slow

# A program with its own loop. `mode` is what happens in step 3.
_PROGRAM = """
import os, signal, sys, time
import jax
jax.config.update("jax_platforms", "cpu")
import flaxshard as fs
from flaxshard.processes import failures

mode, index = sys.argv[3], int(sys.argv[2])
fs.initialize(f"127.0.0.1:{sys.argv[1]}", 2, index, heartbeat_timeout=10)
import numpy as np
from jax.experimental import multihost_utils

for step in range(6):
  multihost_utils.process_allgather(np.ones(2))
  if step == 3 and mode == f"raise {index}":
    raise ValueError("an error of the user")
  if step == 3 and mode == f"exit {index}":
    with failures.share():
      sys.exit(3)
  if step == 3 and mode == f"interrupt {index}":
    raise KeyboardInterrupt
  if step == 3 and mode == f"kill {index}":
    os.kill(os.getpid(), signal.SIGKILL)
  if step == 3 and mode == "raise all":
    raise ValueError("an error of all")
  if step == 3 and mode == "catch all":
    try:
      with failures.share():
        raise ValueError("an error of all")
    except ValueError:
      pass
if mode == f"raise {index} late":
  time.sleep(2)
  raise ValueError("an error of the user")
"""


def _run(mode):
  """Returns the exit code and the standard error of each process."""
  start = time.monotonic()
  ended = two_processes.run_until_end(_PROGRAM, mode)
  assert time.monotonic() - start < 60
  return ended


@pytest.mark.parametrize(
  ("mode", "process", "code", "text"),
  [
    ("raise 0", 0, 1, "ValueError: an error of the user"),
    # The other one is at the end of the program already.
    ("raise 1 late", 1, 1, "ValueError: an error of the user"),
    ("exit 1", 1, 3, "SystemExit: 3"),
    ("interrupt 1", 1, 130, "KeyboardInterrupt"),
  ],
)
def test_failure_ends_all_processes(mode, process, code, text):
  ended = _run(mode)
  assert [e[0] for e in ended] == ([code, 1] if process == 0 else [1, code])
  assert re.search(
    rf"process {process} \(host .*, pid \d+\) failed: {text}",
    ended[1 - process][1],
  )
  assert "Fatal" not in ended[process][1]


def test_each_process_reports_its_own_exception():
  for code, log in _run("raise all"):
    assert code == 1
    assert log.count("Traceback") == 1
    assert log.splitlines()[-1] == "ValueError: an error of all"


def test_regular_end_is_silent():
  assert _run("catch all") == [(0, ""), (0, "")]


def test_killed_process_is_named():
  (code_0, log_0), (code_1, _) = _run("kill 1")
  assert (code_0, code_1) == (1, -signal.SIGKILL)
  assert "no answer from process 1" in log_0
  # JAX aborts process 1, because the service of process 0 has ended.
  (code_0, _), (code_1, log_1) = _run("kill 0")
  assert (code_0, code_1) == (-signal.SIGKILL, -signal.SIGABRT)
  assert "leader" in log_1
