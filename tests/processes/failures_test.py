"""An uncaught exception of one process ends all of them."""

import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

_ROOT = pathlib.Path(__file__).parents[2]

# A program with its own loop. `sys.argv[3]` is what process 1 does in step 3.
_PROGRAM = """
import os, signal, sys, time
import jax
jax.config.update("jax_platforms", "cpu")
import flaxshard as fs
from flaxshard.processes import events, failures

receive, calls = events.Events.receive, []
events.Events.receive = lambda *args: calls.append(args) or receive(*args)
fs.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]),
              heartbeat_timeout=10)
import numpy as np
from jax.experimental import multihost_utils

for step in range(6):
  multihost_utils.process_allgather(np.ones(2))
  if step == 3 and jax.process_index() == 1:
    if sys.argv[3] == "raise":
      raise ValueError("an error of the user")
    if sys.argv[3] == "exit":
      with failures.share():
        sys.exit(3)
    if sys.argv[3] == "kill 0":
      print("ready", flush=True)
      time.sleep(100)
  if step == 3 and sys.argv[3] == "raise all":
    raise ValueError("an error of all")
time.sleep(0.5 * jax.process_index() + 2)
# JAX does not free the memory of a wait that ends by its timeout.
assert len(calls) == 1, calls
"""


def _run(mode, kill=None):
  """Returns the exit code and the standard error of each process."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", _PROGRAM, str(port), str(i), mode],
      cwd=_ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  try:
    if kill is not None:
      # Gloo prints lines before.
      assert "ready\n" in iter(processes[1 - kill].stdout.readline, "")
      processes[kill].kill()
    logs = [p.communicate(timeout=120)[1] for p in processes]
  finally:
    for process in processes:
      process.kill()
  return [(p.returncode, log) for p, log in zip(processes, logs, strict=True)]


@pytest.mark.slow
def test_uncaught_exception_ends_all_processes():
  (code_0, log_0), (code_1, log_1) = _run("raise")
  assert (code_0, code_1) == (1, 1)
  assert log_1.count("ValueError: an error of the user") == 1
  assert re.search(r"process 1 \(host .*an error of the user", log_0)


@pytest.mark.slow
def test_shared_exit_ends_all_processes():
  (code_0, log_0), (code_1, _) = _run("exit")
  assert (code_0, code_1) == (1, 1)
  assert re.search(r"process 1 \(host .* failed: SystemExit: 3", log_0)


@pytest.mark.slow
def test_each_process_reports_its_own_exception():
  for code, log in _run("raise all"):
    assert code == 1
    assert log.count("Traceback") == 1
    assert log.splitlines()[-1] == "ValueError: an error of all"


@pytest.mark.slow
def test_end_of_process_0_is_reported_before_jax_aborts():
  (code_0, _), (code_1, log_1) = _run("kill 0", kill=0)
  assert code_0 == -signal.SIGKILL
  assert code_1 == 1, log_1
  assert re.search(r"process 0 \(host .*, pid \d+\) is lost", log_1)


@pytest.mark.slow
def test_regular_end_is_silent_and_needs_no_timeout():
  start = time.monotonic()
  for code, log in _run("end"):
    assert (code, log) == (0, "")
  assert time.monotonic() - start < 100


def test_snippet_of_the_docs_runs():
  text = (_ROOT / "docs" / "guides" / "process_failures.md").read_text()
  snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  assert snippets
  for snippet in snippets:
    exec(compile(snippet, "docs/guides/process_failures.md", "exec"), {})
