"""Runs a script in two processes connected by `jax.distributed`."""

from concurrent import futures
import socket
import subprocess
import sys

# Each process has two virtual devices. `rank` is its index, `sys.argv[1]` the
# port. A process that raises exits at once: the regular exit of JAX waits for
# the other process.
PREAMBLE = """
import os, sys
import jax

def exit_at_once(*error):
  sys.__excepthook__(*error)
  sys.stderr.flush()
  os._exit(1)

sys.excepthook = exit_at_once
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank = int(sys.argv[2])
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, rank)
"""


def run(script: str, *args: str) -> list[tuple[str, str]]:
  """Runs a script in two processes and asserts that both succeed.

  Args:
    script: Python code, run after `PREAMBLE`.
    *args: Further arguments, from `sys.argv[3]` on.

  Returns:
    `(standard output, standard error)` of each process.
  """
  with socket.socket() as s:
    s.bind(("localhost", 0))
    port = s.getsockname()[1]
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", PREAMBLE + script, str(port), str(rank), *args],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for rank in range(2)
  ]
  try:
    # Reads both at once: a process with a full pipe stops, and the other one
    # waits for it.
    with futures.ThreadPoolExecutor(2) as pool:
      outs = list(pool.map(lambda p: p.communicate(timeout=120), processes))
  finally:
    for process in processes:
      process.kill()
  assert [p.returncode for p in processes] == [0, 0], outs
  return outs
