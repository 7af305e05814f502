"""A script that two processes run together, `sys.argv[1]` their port."""

from concurrent import futures
import socket
import subprocess
import sys

# Two virtual devices each; `rank` is the number of the process. One that raises
# ends at once: JAX's own end of a program waits for the other process.
PREAMBLE = """
import os, sys
import jax

def end_at_once(*error):
  sys.__excepthook__(*error)
  sys.stderr.flush()
  os._exit(1)

sys.excepthook = end_at_once
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank = int(sys.argv[2])
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, rank)
"""


def run(script: str, *args: str) -> list[tuple[str, str]]:
  """Returns what both have written to their standard output and error."""
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
    # Both at once: who has a pipe full waits, and the other one for it.
    with futures.ThreadPoolExecutor(2) as pool:
      outs = list(pool.map(lambda p: p.communicate(timeout=120), processes))
  finally:
    for process in processes:
      process.kill()
  assert [p.returncode for p in processes] == [0, 0], outs
  return outs
