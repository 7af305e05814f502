"""Runs a program in several processes of this machine.

`python -m flaxshard --local_processes=4` rehearses a run on a cluster. The
parent process starts the others, prints their output with their index in front,
and passes signals on. It uses no devices itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import contextlib
import importlib.metadata
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

# Seconds for the other processes to end by themselves after one has failed or
# has stopped; then for SIGTERM, before SIGKILL.
_GRACE = 60.0
_TERM_GRACE = 10.0

# Set in the processes that `run` starts: their standard input is a pipe, to
# which the parent never writes. It is closed when the parent ends.
_STARTED = "FLAXSHARD_LOCAL_PROCESS"


def run(
  command: Sequence[str],
  num_processes: int,
  *,
  virtual_devices: int = 0,
  connected: bool = True,
) -> int:
  """Runs `python -m flaxshard` in several processes until all have ended.

  Args:
    command: The command of all processes; the flags that connect them are
      added.
    num_processes: Number of processes.
    virtual_devices: `config.mesh.virtual_devices`, over all processes. GPUs of
      the machine are divided among them instead. Without both, each process
      has one CPU device.
    connected: Whether JAX connects the processes. Then the failure of one ends
      all. If not, they are workers, and the others go on without it.

  Returns:
    The exit code: 0, or that of the process that failed first, which is 128
    plus the number of the signal if a signal has killed it.

  Raises:
    ValueError: The devices cannot be divided equally.
  """
  if virtual_devices % num_processes:
    raise ValueError(
      f"config.mesh.virtual_devices={virtual_devices} must be a multiple of "
      f"--local_processes={num_processes}: each process gets an equal share."
    )
  num_gpus = _count_gpus()
  if num_gpus % num_processes:
    raise ValueError(
      f"--local_processes={num_processes}: the {num_gpus} GPUs of this machine "
      "cannot be divided equally; choose another number, or set "
      "JAX_PLATFORMS=cpu."
    )
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{s.getsockname()[1]}"
  environ = {**os.environ, "PYTHONUNBUFFERED": "1", _STARTED: "1"}
  environ.pop("JAX_COORDINATOR_BIND_ADDRESS", None)
  share = num_gpus // num_processes

  def start(index: int) -> subprocess.Popen[bytes]:
    gpus = range(index * share, (index + 1) * share)
    ids = {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, gpus))} if share else {}
    flags = [
      # The last value of a flag is the one that counts.
      "--local_processes=0",
      *([f"--coordinator_address={address}"] if connected else []),
      f"--num_processes={num_processes}",
      f"--process_id={index}",
    ]
    return subprocess.Popen(
      [*command, *flags],
      env=environ | ids,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      # A group of its own: the parent passes Ctrl-C on.
      start_new_session=True,
    )

  children: list[subprocess.Popen[bytes]] = []
  previous = {
    signum: signal.signal(signum, lambda signum, _: _send(signum, children))
    for signum in (signal.SIGINT, signal.SIGTERM)
  }
  try:
    for index in range(num_processes):
      children.append(start(index))
    return _supervise(children, connected)
  finally:
    _send(signal.SIGKILL, children)
    for signum, handler in previous.items():
      signal.signal(signum, handler)


def _count_gpus() -> int:
  """Returns the number of GPUs that JAX sees on this machine."""
  plugins = importlib.metadata.entry_points(group="jax_plugins")
  has_plugin = bool(plugins) or importlib.util.find_spec("libtpu") is not None
  if not has_plugin or os.environ.get("JAX_PLATFORMS") == "cpu":
    return 0
  # In another process: this one would hold the devices.
  code = (
    "import jax; d = jax.local_devices(); print('\\n', d[0].platform, len(d))"
  )
  probe = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True
  )
  if probe.returncode:
    raise ValueError(f"JAX finds no devices:\n{probe.stderr[-2000:]}")
  platform, count = probe.stdout.split()[-2:]
  if platform == "tpu":
    raise ValueError(
      "--local_processes cannot divide the TPU chips of this machine; set "
      "JAX_PLATFORMS=cpu."
    )
  return int(count) if platform == "gpu" else 0


def _send(signum: int, children: Iterable[subprocess.Popen[bytes]]) -> None:
  for child in children:
    with contextlib.suppress(ProcessLookupError, PermissionError):
      # SIGKILL also reaches what a child that has ended has left behind.
      if signum == signal.SIGKILL:
        os.killpg(child.pid, signum)
      elif child.returncode is None:
        os.kill(child.pid, signum)


def _supervise(
  children: Sequence[subprocess.Popen[bytes]], connected: bool
) -> int:
  """Prints the output of all processes, until all have ended.

  Args:
    children: The processes.
    connected: Whether the others are ended once one has failed.

  Returns:
    The exit code of the process that failed first, or 0.
  """
  first_code = 0
  name, others = (
    ("process", "") if connected else ("worker", "; the others go on")
  )
  actions: list[tuple[float, signal.Signals]] = []
  running = dict(enumerate(children))
  readers = {index: _print_lines(index, c) for index, c in running.items()}
  while running:
    time.sleep(0.1)
    for index, child in list(running.items()):
      code = child.poll()
      if code is None:
        continue
      del running[index]
      # A process that the child has left behind may hold a pipe open.
      for reader in readers[index]:
        reader.join(2)
      if code > 0:
        _print(f"{name} {index} ended with exit code {code}{others}")
      elif code < 0:
        _print(
          f"{name} {index} was killed by {signal.Signals(-code).name}{others}"
        )
      if code and connected and not first_code:
        end = time.monotonic() + _GRACE
        actions = [(end, signal.SIGTERM), (end + _TERM_GRACE, signal.SIGKILL)]
      first_code = first_code or (code if code >= 0 else 128 - code)
    if actions and running and time.monotonic() > actions[0][0]:
      _, signum = actions.pop(0)
      _print(
        f"sending {signum.name} to the processes that have not ended: "
        f"{', '.join(map(str, running))}"
      )
      _send(signum, running.values())
  return first_code


def _print_lines(
  index: int, child: subprocess.Popen[bytes]
) -> list[threading.Thread]:
  """Starts threads that print a process's lines, with its index in front."""

  def copy(source: Any, target: Any) -> None:
    for line in iter(source.readline, b""):
      end = b"" if line.endswith(b"\n") else b"\n"
      # Nobody may read our output any more; the process must not wait for it.
      with contextlib.suppress(OSError):
        target.buffer.write(f"[{index}] ".encode() + line + end)
        target.flush()

  threads = [
    threading.Thread(target=copy, args=pipes, daemon=True)
    for pipes in ((child.stdout, sys.stdout), (child.stderr, sys.stderr))
  ]
  for thread in threads:
    thread.start()
  return threads


def _print(message: str) -> None:
  with contextlib.suppress(OSError):  # as in _print_lines
    print(f"flaxshard: {message}", file=sys.stderr, flush=True)


def end_with_parent() -> None:
  """Ends this process, with a checkpoint, if the parent process ends.

  It does nothing in a process that `run` has not started.
  """
  # Not for the processes that this one starts.
  if os.environ.pop(_STARTED, None):
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
  os.read(0, 1)  # It returns when the parent has ended.
  os.kill(os.getpid(), signal.SIGTERM)
  time.sleep(_GRACE)
  os.killpg(os.getpgrp(), signal.SIGKILL)
