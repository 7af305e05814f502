"""Runs a program in several processes of this machine.

`python -m flaxshard --local_processes=4` rehearses a run on a cluster. The
parent process starts the others, prints their output with their index in front,
and passes signals on. It uses no devices itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import importlib.metadata
import importlib.util
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

# Seconds for the other processes to end by themselves after one has failed,
# or has stopped after a signal; then for SIGTERM, before SIGKILL.
_FAILED_GRACE = 20.0
_STOPPED_GRACE = 60.0
_TERM_GRACE = 10.0

# The variable with a pipe that the parent never writes to. It is closed when
# the parent ends, however it ends.
_PARENT_PIPE = "FLAXSHARD_PARENT_PIPE"

# Exit codes of a process that a signal has stopped, see `train.preemption`.
_STOPPED = {
  code
  for signum in (signal.SIGINT, signal.SIGTERM)
  for code in (-signum, 128 + signum)
}


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
    ValueError: The devices cannot be divided equally, or the operating system
      is Windows.
  """
  if os.name != "posix":
    raise ValueError("--local_processes needs Linux or macOS.")
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
  read_end, write_end = os.pipe()
  environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
  environ[_PARENT_PIPE] = str(read_end)
  environ.pop("JAX_COORDINATOR_BIND_ADDRESS", None)
  # Workers of AGN: nothing else can reach them there.
  environ.setdefault("FLAXSHARD_WORKER_ADDRESS", "127.0.0.1:0")
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
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      pass_fds=[read_end],
      # A group of its own: the parent passes Ctrl-C on, and SIGKILL reaches
      # what the process has started.
      start_new_session=True,
    )

  children: list[subprocess.Popen[bytes]] = []
  with _forward_signals(children):
    try:
      for index in range(num_processes):
        children.append(start(index))
      os.close(read_end)
      return _supervise(children, connected)
    finally:
      for child in children:
        _kill(child, signal.SIGKILL)
      os.close(write_end)


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


@contextlib.contextmanager
def _forward_signals(
  children: Sequence[subprocess.Popen[bytes]],
) -> Iterator[None]:
  """Passes SIGINT and SIGTERM on to the processes."""

  def forward(signum: int, frame: Any) -> None:
    del frame
    for child in children:
      if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
          os.kill(child.pid, signum)

  previous = {
    signum: signal.signal(signum, forward)
    for signum in (signal.SIGINT, signal.SIGTERM)
  }
  try:
    yield
  finally:
    for signum, handler in previous.items():
      signal.signal(signum, handler)


def _supervise(
  children: Sequence[subprocess.Popen[bytes]], connected: bool
) -> int:
  """Prints the output of all processes, until all have ended.

  Args:
    children: The processes.
    connected: Whether the others are ended once one has failed.
  """
  first_code = 0
  actions: list[tuple[float, signal.Signals]] = []
  running = dict(enumerate(children))
  with selectors.DefaultSelector() as pipes:
    for index, child in running.items():
      for source, target in (
        (child.stdout, sys.stdout),
        (child.stderr, sys.stderr),
      ):
        assert source is not None
        data = (target, f"[{index}] ".encode(), bytearray())
        pipes.register(source, selectors.EVENT_READ, data)
    while running:
      _copy_lines(pipes, 0.2)
      ended = {i: c for i, c in running.items() if c.poll() is not None}
      if ended:
        _copy_lines(pipes, 0)  # their last lines
      for index, child in ended.items():
        del running[index]
        code = child.returncode
        if code and not first_code:
          first_code = code if code > 0 else 128 - code
          if connected:
            grace = _STOPPED_GRACE if code in _STOPPED else _FAILED_GRACE
            now = time.monotonic()
            actions = [
              (now + grace, signal.SIGTERM),
              (now + grace + _TERM_GRACE, signal.SIGKILL),
            ]
            _print(f"process {index} {_describe(code)}")
        if code and not connected:
          _print(f"worker {index} {_describe(code)}; the others go on")
      if actions and running and time.monotonic() > actions[0][0]:
        _, signum = actions.pop(0)
        _print(
          f"sending {signum.name} to the processes that have not ended: "
          f"{', '.join(map(str, running))}"
        )
        for child in running.values():
          _kill(child, signum)
    # A process that a child has left behind may hold a pipe open.
    deadline = time.monotonic() + 5
    while pipes.get_map() and time.monotonic() < deadline:
      _copy_lines(pipes, 0.2)
  return first_code


def _copy_lines(pipes: selectors.BaseSelector, timeout: float) -> None:
  """Copies whole lines of output, each with a prefix.

  Args:
    pipes: The open pipes. Each has a tuple of the file that its lines go to, of
      the prefix, and of the beginning of a line that has not ended yet.
    timeout: Seconds to wait for output.
  """
  for key, _ in pipes.select(timeout):
    target, prefix, line = key.data
    received = os.read(key.fd, 2**16)
    if not received:
      pipes.unregister(key.fileobj)
      received = b"\n" if line else b""
    whole, newline, rest = received.rpartition(b"\n")
    if newline:
      lines = prefix + (line + whole).replace(b"\n", b"\n" + prefix) + b"\n"
      line.clear()
      # Nobody may read our output any more; the process must not wait for it.
      with contextlib.suppress(OSError):
        target.flush()
        target.buffer.write(lines)
        target.flush()
    line.extend(rest)


def _kill(child: subprocess.Popen[bytes], signum: int) -> None:
  # After SIGKILL also what a child that has ended has left behind.
  with contextlib.suppress(ProcessLookupError, PermissionError):
    if signum == signal.SIGKILL:
      os.killpg(child.pid, signum)
    elif child.returncode is None:
      os.kill(child.pid, signum)


def _describe(code: int) -> str:
  if code < 0:
    return f"was killed by {signal.Signals(-code).name}"
  if code in _STOPPED:
    return f"was stopped by {signal.Signals(code - 128).name}"
  return f"ended with exit code {code}"


def _print(message: str) -> None:
  with contextlib.suppress(OSError):  # as in _copy_lines
    print(f"flaxshard: {message}", file=sys.stderr, flush=True)


def end_with_parent(environ: Mapping[str, str] = os.environ) -> None:
  """Ends this process, with a checkpoint, if the parent process ends.

  It does nothing in a process that `run` has not started.

  Args:
    environ: The environment variables.
  """
  if _PARENT_PIPE not in environ:
    return
  pipe = int(environ[_PARENT_PIPE])
  # Not for the processes that this one starts.
  os.set_inheritable(pipe, False)
  os.environ.pop(_PARENT_PIPE, None)
  threading.Thread(target=_wait_for_parent, args=(pipe,), daemon=True).start()


def _wait_for_parent(pipe: int) -> None:
  os.read(pipe, 1)  # It returns when the parent has ended.
  os.kill(os.getpid(), signal.SIGTERM)
  time.sleep(_STOPPED_GRACE)
  os.killpg(os.getpgrp(), signal.SIGKILL)
