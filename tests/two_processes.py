"""Runs a script in processes connected by `jax.distributed`: two by default."""

from concurrent import futures
import socket
import subprocess
import sys

_TIMEOUT = 240  # seconds

# `rank` is the index of the process, `sys.argv[1]` the port. A process that
# raises exits at once: the regular exit of JAX waits for the other process.
PREAMBLE = """
import os, sys
import jax

def exit_at_once(*error):
  sys.__excepthook__(*error)
  sys.stderr.flush()
  os._exit(1)

sys.excepthook = exit_at_once
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", devices)
rank = int(sys.argv[2])
if processes > 1:
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(f"localhost:{sys.argv[1]}", processes, rank)
"""


def run(
  script: str,
  *args: str,
  processes: int = 2,
  devices: int = 2,
  logs_errors: bool = False,
) -> list[tuple[str, str]]:
  """Runs a script in several processes and asserts that all succeed.

  They are ended after four minutes.

  Args:
    script: Python code, run after `PREAMBLE`.
    *args: Further arguments, from `sys.argv[3]` on.
    processes: Number of processes.
    devices: Number of virtual devices of each process.
    logs_errors: Whether Orbax logs errors that the script expects.

  Returns:
    `(standard output, standard error)` of each process.
  """
  code = f"{processes=}; {devices=}\n{PREAMBLE}{script}"
  ended = _run(code, args, processes, end_all=True)
  for returncode, _, err in ended:
    assert not returncode, ended
    # Also one that Python prints after a successful run, at the exit.
    assert logs_errors or "Traceback" not in err, err
    assert "Fatal Python" not in err, err
  return [(out, err) for _, out, err in ended]


def run_until_end(script: str, *args: str) -> list[tuple[int, str]]:
  """Runs a script in two processes, which may fail.

  Args:
    script: Python code. `sys.argv[1]` is the port, `sys.argv[2]` the index.
    *args: Further arguments, from `sys.argv[3]` on.

  Returns:
    `(exit code, standard error)` of each process.
  """
  ended = _run(script, args, 2, end_all=False)
  return [(returncode, err) for returncode, _, err in ended]


def _run(code, args, processes, end_all):
  with socket.socket() as s:
    s.bind(("localhost", 0))
    port = s.getsockname()[1]
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  command = [sys.executable, "-c", code, str(port)]
  started = [
    subprocess.Popen([*command, str(rank), *args], **pipes)
    for rank in range(processes)
  ]

  def read(process):
    try:
      out = process.communicate(timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
      process.kill()
      out = process.communicate()
    if process.returncode and end_all:
      # The others would wait for this one.
      for other in started:
        other.kill()
    return process.returncode, *out

  # Reads all at once: a process with a full pipe stops, and the others wait for
  # it.
  with futures.ThreadPoolExecutor(processes) as pool:
    return list(pool.map(read, started))
