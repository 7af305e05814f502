"""One process of two fails, and the run ends and can be resumed."""

import json
import pathlib
import re
import signal
import socket

import faulty
import jax
import numpy as np
import pytest

import flaxshard as fs

pytestmark = pytest.mark.slow


def run(programs, workdir, **fault):
  """Runs two connected processes; see `faulty`.

  Returns:
    The exit code of each process, and what it logs.
  """
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{s.getsockname()[1]}"
  arguments = [f"--config={faulty.__file__}", f"--workdir={workdir}"]
  arguments += [f"--coordinator_address={address}", "--num_processes=2"]
  both = [
    programs.start(
      workdir.parent,
      *arguments,
      f"--process_id={k}",
      "--heartbeat_timeout=8",
      FAULT=json.dumps(fault and {**fault, "workdir": str(workdir)}),
    )
    for k in range(2)
  ]
  codes = [program.wait(seconds=120) for program in both]
  return codes, [program.printed for program in both]


def finish(programs, workdir):
  """Runs without a fault; returns the parameters at the end."""
  codes, logs = run(programs, workdir)
  assert codes == [0, 0] and "damaged" not in "".join(logs), logs
  state = fs.load(str(workdir)).state
  assert int(state.step) == 80
  return jax.tree.map(np.asarray, state.params)


# They happen one after the other in one workdir: the place in process 1, what
# its exit code is, those of process 0, and what process 0 logs.
_SAVED = r"(?:SIGTERM|SIGINT): saved step (\d+)"
_FAULTS = (
  (
    *("kill", "save", -signal.SIGKILL, {1, -signal.SIGABRT}),
    r"unhealthy|no answer from process 1.*The same command",
  ),
  ("exception", "data", 1, {1}, r"process 1 .*failed: .*an injected"),
  # The other one ends as for JAX's notice of preemption, which is SIGTERM.
  ("interrupt", "save", 130, {143}, _SAVED),
)


def test_a_run_resumes_after_faults(programs, tmp_path):
  workdir = pathlib.Path(tmp_path, "run")
  undisturbed = finish(programs, tmp_path / "undisturbed")
  for kind, place, code, codes, pattern in _FAULTS:
    found, logs = run(programs, workdir, kind=kind, place=place, process=1)
    assert found[1] == code and found[0] in codes, (kind, found, logs)
    assert re.search(pattern, logs[0], re.DOTALL), (kind, logs)
    # All processes save the same step.
    assert len(set(re.findall(_SAVED, "".join(logs)))) <= 1
  params = finish(programs, workdir)
  jax.tree.map(np.testing.assert_array_equal, params, undisturbed)
