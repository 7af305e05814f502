"""One process of two fails, and the run ends and can be resumed."""

from concurrent import futures
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from typing import NamedTuple

import jax
import numpy as np
import pytest
import xla_flags

import flaxshard as fs

pytestmark = pytest.mark.slow

_HERE = pathlib.Path(__file__).parent
_TESTS = _HERE.parent
_HEARTBEAT_TIMEOUT = 8
# Read now: pytest changes it while other threads start programs.
_ENVIRON = dict(os.environ)
_RESUME = "The same command on all processes continues from the last checkpoint"


class Ended(NamedTuple):
  code: int
  log: str
  time: float


class Program:
  """Two processes of `python -m flaxshard`.

  Args:
    workdir: The workdir.
    cache: A directory for compiled programs.
    fault: See `faulty`.
  """

  def __init__(self, workdir, cache, fault=None):
    with socket.socket() as s:
      s.bind(("127.0.0.1", 0))
      port = s.getsockname()[1]
    env = {
      **_ENVIRON,
      "FAULT": json.dumps({**fault, "workdir": str(workdir)} if fault else {}),
      "JAX_PLATFORMS": "cpu",
      "JAX_COMPILATION_CACHE_DIR": str(cache),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "PYTHONPATH": os.pathsep.join(map(str, (_TESTS.parent, _TESTS, _HERE))),
      "XLA_FLAGS": xla_flags.FAST,
    }
    self.processes = []
    for i in range(2):
      command = [
        *(sys.executable, "-m", "flaxshard"),
        f"--config={_HERE / 'faulty.py'}",
        f"--workdir={workdir}",
        f"--coordinator_address=127.0.0.1:{port}",
        *("--num_processes=2", f"--process_id={i}"),
        f"--heartbeat_timeout={_HEARTBEAT_TIMEOUT}",
      ]
      process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
      )
      self.processes.append(process)

  def wait(self, frozen=None):
    """Returns how each process ended; a frozen one is killed at last."""
    with futures.ThreadPoolExecutor(2) as pool:
      ends = [pool.submit(self._wait_for, p) for p in self.processes]
      running = [end for i, end in enumerate(ends) if i != frozen]
      try:
        futures.wait(running, timeout=240)
      finally:
        for process in self.processes:
          process.kill()
      return [end.result() for end in ends]

  def _wait_for(self, process):
    log = process.communicate()[0]
    return Ended(process.returncode, log, time.time())


def _params(workdir):
  loaded = fs.load(str(workdir))
  assert int(loaded.state.step) == 80
  return jax.tree.map(np.asarray, loaded.state.params)


def _seconds(ends, process, frozen):
  """Returns the seconds from the fault to the end of the last process."""
  fault = re.search(r"FAULT at ([\d.]+)", ends[process].log)
  assert fault, ends
  start = float(fault[1])
  return max(end.time for i, end in enumerate(ends) if i != frozen) - start


def _check_lost(ends, process):
  other = ends[1 - process]
  if other.code == 1:
    # The other one was computing, and has seen its end.
    assert f"no answer from process {process}" in other.log, ends
    assert _RESUME in other.log
  else:
    # JAX's heartbeats, or the end of its service in process 0.
    assert other.code == -signal.SIGABRT, other.log
    pattern = r"heartbeats\):\n1" if process else "leader|Service/Heartbeat"
    assert re.search(pattern, other.log), other.log


def _check_kill(ends, process):
  assert ends[process].code == -signal.SIGKILL
  _check_lost(ends, process)


def _check_signal(signum):
  def check(ends, process):
    saved = set()
    for i, end in enumerate(ends):
      # The others end as for JAX's notice of preemption, which is SIGTERM.
      own = signum if i == process else signal.SIGTERM
      assert end.code == 128 + own, ends
      saved.add(re.search(rf"{own.name}: saved step (\d+)", end.log)[1])
    assert len(saved) == 1

  return check


def _check_third_interrupt(ends, process):
  assert ends[process].code == 128 + signal.SIGINT, ends
  other = ends[1 - process]
  assert other.code == 1, ends
  assert re.search(rf"process {process} .* failed: ", other.log), ends


def _check_error(text):
  def check(ends, process):
    for end in ends:
      assert end.code == 1, ends
      assert re.search(text, end.log), ends
    assert f"process {process}" in ends[1 - process].log

  return check


_CHECKS = {
  "kill": _check_kill,
  "freeze": _check_lost,
  "terminate": _check_signal(signal.SIGTERM),
  "interrupt": _check_signal(signal.SIGINT),
  "interrupt thrice": _check_third_interrupt,
  "exception": _check_error("an injected error"),
  "exit": _check_error("SystemExit|exit"),
}
# The faults of each group happen one after the other in one workdir, whose run
# is resumed at its end: kind, place and process.
_GROUPS = (
  (
    ("kill", "training", 0),
    ("kill", "save", 1),
    ("freeze", "training", 1),
    ("exit", "training", 1),
  ),
  (
    ("exception", "training", 0),
    ("exception", "data", 1),
    ("terminate", "training", 0),
    ("interrupt", "save", 1),
    ("interrupt thrice", "training", 1),
  ),
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cache):
  """The parameters at the end of a run without a fault."""
  return _finish(tmp_path_factory.mktemp("undisturbed"), cache)


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory, cache, undisturbed):
  """The runs with the faults of each selected group, as futures."""
  del undisturbed  # has filled the cache
  groups = [
    item.callspec.params["group"]
    for item in request.session.items
    if item.function is test_run_resumes_after_faults
  ]
  # Processes that wait for each other leave time to those of another group.
  with futures.ThreadPoolExecutor(2) as pool:
    yield {
      group: pool.submit(_run_faults, group, tmp_path_factory, cache)
      for group in groups
    }


def _run_faults(group, tmp_path_factory, cache):
  """Returns the lines of a report, and the parameters after the last fault."""
  workdir = tmp_path_factory.mktemp("run")
  report = []
  for kind, place, process in group:
    fault = {"process": process, "place": place, "kind": kind}
    frozen = process if kind == "freeze" else None
    ends = Program(workdir, cache, fault).wait(frozen)
    _CHECKS[kind](ends, process)
    seconds = _seconds(ends, process, frozen)
    # With other programs on the machine.
    assert seconds < 60
    report.append(f"{kind} in {place}, process {process}: {seconds:.1f} s")
  return report, _finish(workdir, cache)


def _finish(workdir, cache):
  """Runs without a fault; returns the parameters at the end."""
  for end in Program(workdir, cache).wait():
    assert end.code == 0, end.log
    assert "damaged" not in end.log
  return _params(workdir)


@pytest.mark.parametrize("group", _GROUPS, ids=["killed", "raised"])
def test_run_resumes_after_faults(group, runs, undisturbed, capsys):
  report, params = runs[group].result()
  with capsys.disabled():
    print("", *report, sep="\n", end="")
  jax.tree.map(np.testing.assert_array_equal, params, undisturbed)
