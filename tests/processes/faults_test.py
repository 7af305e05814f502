"""One process of two fails, and the run ends and can be resumed."""

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

from flaxshard import checkpoint
from flaxshard.train import config as config_lib
from flaxshard.train import devices
from flaxshard.train import setup as setup_lib

pytestmark = pytest.mark.slow

_HERE = pathlib.Path(__file__).parent
_TESTS = _HERE.parent
_HEARTBEAT_TIMEOUT = 5
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
    flags: Further flags of each process.
  """

  def __init__(self, workdir, cache, fault=None, flags=((), ())):
    with socket.socket() as s:
      s.bind(("127.0.0.1", 0))
      port = s.getsockname()[1]
    env = {
      **os.environ,
      "FAULT": json.dumps(fault or {}),
      "JAX_PLATFORMS": "cpu",
      "JAX_COMPILATION_CACHE_DIR": str(cache),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "PYTHONPATH": os.pathsep.join(map(str, (_TESTS.parent, _TESTS, _HERE))),
      "XLA_FLAGS": xla_flags.FAST,
    }
    self.logs = [pathlib.Path(f"{workdir}_{i}.log") for i in range(2)]
    self.processes = []
    for i in range(2):
      command = [
        *(sys.executable, "-m", "flaxshard"),
        f"--config={_HERE / 'faulty.py'}",
        f"--workdir={workdir}",
        f"--coordinator_address=127.0.0.1:{port}",
        *("--num_processes=2", f"--process_id={i}"),
        f"--heartbeat_timeout={_HEARTBEAT_TIMEOUT}",
        *flags[i],
      ]
      with self.logs[i].open("w") as log:
        self.processes.append(
          subprocess.Popen(command, env=env, stdout=log, stderr=log)
        )

  def wait(self, frozen=None):
    """Returns how each process ended; a frozen one is killed at last."""
    times = {}
    deadline = time.monotonic() + 240
    try:
      while len(times) < 2 - (frozen is not None):
        assert time.monotonic() < deadline, self.read_logs()
        time.sleep(0.05)
        for i, process in enumerate(self.processes):
          if process.poll() is not None:
            times.setdefault(i, time.time())
    finally:
      for process in self.processes:
        process.kill()
        process.wait()
    logs = self.read_logs()
    return [
      Ended(p.returncode, logs[i], times.get(i, 0.0))
      for i, p in enumerate(self.processes)
    ]

  def read_logs(self):
    return [log.read_text() for log in self.logs]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cache):
  """The parameters at the end of a run without a fault."""
  workdir = tmp_path_factory.mktemp("undisturbed")
  for end in Program(workdir / "run", cache).wait():
    assert end.code == 0, end.log
  return _params(workdir / "run")


def _params(workdir):
  sys.path.insert(0, str(_HERE))
  try:
    import faulty

    config = config_lib.check(faulty.get_config())
    setup = setup_lib.create_setup(config, devices.create_strategy(config))
  finally:
    sys.path.remove(str(_HERE))
  state = checkpoint.restore(
    os.path.join(workdir, "checkpoints"), setup.abstract_state
  )
  assert int(state.step) == config.num_train_steps
  return jax.tree.map(np.asarray, state.params)


def _seconds(ends, process):
  """Returns the seconds from the fault to the end of the last process."""
  start = float(re.search(r"FAULT at ([\d.]+)", ends[process].log)[1])
  return max(end.time for end in ends) - start


def _check_lost(ends, process):
  other = ends[1 - process]
  # JAX may have aborted a process after the message, while it was ending.
  assert other.code == 1, ends
  assert re.search(
    rf"process {process} \(host .*, pid \d+\) is lost", other.log
  )
  assert _RESUME in other.log


def _check_kill(ends, process):
  assert ends[process].code == -signal.SIGKILL
  _check_lost(ends, process)


def _check_terminate(ends, process):
  del process
  saved = set()
  for end in ends:
    assert end.code == 128 + signal.SIGTERM, ends
    saved.add(re.search(r"SIGTERM: saved step (\d+)", end.log)[1])
  assert len(saved) == 1


def _check_error(text):
  def check(ends, process):
    for end in ends:
      assert end.code == 1, ends
      assert text in end.log, ends
    assert f"process {process}" in ends[1 - process].log

  return check


_CHECKS = {
  "kill": _check_kill,
  "freeze": _check_lost,
  "terminate": _check_terminate,
  "exception": _check_error("an injected error"),
  "disk full": _check_error("SaveError"),
}
_PLACES = [(p, i) for p in ("training", "evaluation", "save") for i in (0, 1)]


@pytest.mark.parametrize("kind", _CHECKS)
def test_run_resumes_after_faults(kind, undisturbed, cache, tmp_path, capsys):
  workdir = tmp_path / "run"
  for place, process in _PLACES:
    if kind == "disk full" and place == "evaluation":
      continue
    fault = {"process": process, "place": place, "kind": kind}
    ends = Program(workdir, cache, fault).wait(
      frozen=process if kind == "freeze" else None
    )
    seconds = _seconds(ends, process)
    with capsys.disabled():
      print(f"\n{kind} in {place}, process {process}: {seconds:.1f} s", end="")
    _CHECKS[kind](ends, process)
    # With other programs on the machine; see docs/processes.md.
    assert seconds < 60
  for end in Program(workdir, cache).wait():
    assert end.code == 0, end.log
    assert "damaged" not in end.log
  jax.tree.map(np.testing.assert_array_equal, _params(workdir), undisturbed)
