"""One process of two gets a signal, and the run ends and can be resumed."""

import re
import signal
import socket

import faulty
import pytest
from tree_equality import assert_trees_equal

import flaxshard as fs

pytestmark = pytest.mark.slow


def run(programs, workdir, signum=None):
  """Runs two connected processes; see `faulty`.

  Returns:
    The exit code of each process, and what it logs.
  """
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{s.getsockname()[1]}"
  both = [
    programs.start(
      workdir.parent,
      f"--config={faulty.__file__}",
      f"--workdir={workdir}",
      f"--coordinator_address={address}",
      "--num_processes=2",
      f"--process_id={k}",
      "--heartbeat_timeout=8",
      FAULT=f"1 {int(signum)} {workdir}" if signum else "",
    )
    for k in range(2)
  ]
  codes = [program.wait(seconds=120) for program in both]
  return codes, [program.printed for program in both]


def finish(programs, workdir):
  """Runs without a fault; returns the parameters at the end."""
  codes, logs = run(programs, workdir)
  assert codes == [0, 0] and "damaged" not in "".join(logs), logs
  loaded = fs.load(str(workdir))
  assert loaded.step == 60
  return loaded.params


def test_a_run_resumes_after_faults(programs, tmp_path):
  undisturbed = finish(programs, tmp_path / "undisturbed")
  workdir = tmp_path / "run"
  (code, killed), (log, _) = run(programs, workdir, signal.SIGKILL)
  assert killed == -signal.SIGKILL and code in (1, -signal.SIGABRT), log
  unhealthy = r"(?s)unhealthy|no answer from process 1.*The same command"
  assert re.search(unhealthy, log)
  # The other one ends as for JAX's notice of preemption, which is SIGTERM.
  codes, logs = run(programs, workdir, signal.SIGINT)
  assert codes == [128 + signal.SIGTERM, 128 + signal.SIGINT], logs
  saved = re.findall(r"(?:SIGTERM|SIGINT): saved step (\d+)", "".join(logs))
  assert len(set(saved)) == 1, logs
  assert_trees_equal(finish(programs, workdir), undisturbed)
