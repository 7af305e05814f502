"""One process of two fails, and the run ends and can be resumed."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import xla_flags

import flaxshard as fs

pytestmark = pytest.mark.slow

_HERE = pathlib.Path(__file__).parent
_TESTS = _HERE.parent


def run(workdir, cache, **fault):
  """Runs `flaxshard --local_processes=2`; see `faulty`.

  Returns:
    The exit code, and what the processes log.
  """
  result = subprocess.run(
    [
      *(sys.executable, "-m", "flaxshard", "--local_processes=2"),
      *(f"--config={_HERE / 'faulty.py'}", f"--workdir={workdir}"),
      "--heartbeat_timeout=8",
    ],
    env={
      **os.environ,
      "FAULT": json.dumps(fault and {**fault, "workdir": str(workdir)}),
      "JAX_PLATFORMS": "cpu",
      "JAX_COMPILATION_CACHE_DIR": str(cache),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "PYTHONPATH": os.pathsep.join(map(str, (_TESTS.parent, _TESTS, _HERE))),
      "XLA_FLAGS": xla_flags.FAST,
    },
    capture_output=True,
    text=True,
    timeout=300,
  )
  if fault:
    start = re.search(r"FAULT at ([\d.]+)", result.stderr)
    assert start, result.stderr
    # With other programs on the machine.
    assert time.time() - float(start[1]) < 60
  return result.returncode, result.stderr


def finish(workdir, cache):
  """Runs without a fault; returns the parameters at the end."""
  code, log = run(workdir, cache)
  assert code == 0 and "damaged" not in log, log
  state = fs.load(str(workdir)).state
  assert int(state.step) == 80
  return jax.tree.map(np.asarray, state.params)


# They happen one after the other in one workdir: kind, place, process, the exit
# codes and what is logged.
_LOST = r"SIGABRT|no answer from process 1.*The same command"
_SAVED = r"(?:SIGTERM|SIGINT): saved step (\d+)"
_FAULTS = (
  ("kill", "save", 1, {137}, rf"({_LOST})"),
  ("exception", "data", 1, {1}, r"\[0\] .*process 1.*an injected"),
  # The others end as for JAX's notice of preemption, which is SIGTERM.
  ("interrupt", "save", 1, {130, 143}, _SAVED),
  ("interrupt thrice", "training", 1, {130}, r"process 1 .* failed: Keyboard"),
)


def test_a_run_resumes_after_faults(tmp_path):
  cache, workdir = tmp_path / "cache", tmp_path / "run"
  undisturbed = finish(tmp_path / "undisturbed", cache)
  for kind, place, process, codes, pattern in _FAULTS:
    code, log = run(workdir, cache, kind=kind, place=place, process=process)
    assert code in codes, (kind, place, log)
    assert re.search(pattern, log, re.DOTALL), (kind, place, log)
    # All processes save the same step.
    assert len(set(re.findall(_SAVED, log))) <= 1
  params = finish(workdir, cache)
  jax.tree.map(np.testing.assert_array_equal, params, undisturbed)
