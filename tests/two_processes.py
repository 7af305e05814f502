"""Runs a script in processes connected by `jax.distributed`: two by default."""

import socket

from forked_programs import Program
from forked_programs import Programs
from forked_programs import wait_until

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


def free_port() -> int:
  with socket.socket() as s:
    s.bind(("localhost", 0))
    return s.getsockname()[1]


def start(
  programs: Programs, script: str, *args: str, processes: int = 2
) -> list[Program]:
  """Starts a script in several processes.

  Args:
    programs: Starts them.
    script: Python code. `sys.argv[1]` is a port, `sys.argv[2]` the index.
    *args: Further arguments, from `sys.argv[3]` on.
    processes: Number of processes.
  """
  port = str(free_port())
  return [
    programs.start(programs.folder, port, str(rank), *args, script=script)
    for rank in range(processes)
  ]


def run(
  programs: Programs,
  script: str,
  *args: str,
  processes: int = 2,
  devices: int = 2,
  logs_errors: bool = False,
) -> list[str]:
  """Runs a script in several processes and asserts that all succeed.

  They are ended after four minutes.

  Args:
    programs: Starts them.
    script: Python code, run after `PREAMBLE`.
    *args: Further arguments, from `sys.argv[3]` on.
    processes: Number of processes.
    devices: Number of virtual devices of each process.
    logs_errors: Whether Orbax logs errors that the script expects.

  Returns:
    What each process prints.
  """
  code = f"{processes=}; {devices=}\n{PREAMBLE}{script}"
  started = start(programs, code, *args, processes=processes)

  def is_over():
    codes = [program.wait() for program in started if program.has_ended]
    # The others would wait for one that has failed.
    return any(codes) or len(codes) == processes

  wait_until(is_over, "end", *started, seconds=240)
  printed = [program.kill() for program in started]
  assert not any(program.wait() for program in started), printed
  for text in printed:
    # Also one that Python prints after a successful run, at the exit.
    assert logs_errors or "Traceback" not in text, text
    assert "Fatal Python" not in text, text
  return printed
