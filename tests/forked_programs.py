"""Starts programs fast: forks of one process that has imported flaxshard.

Each has a JAX of its own: the process that forks has not started any. What one
has compiled, the others read.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import xla_flags

_ROOT = pathlib.Path(__file__).parents[1]
# Longer than any machine takes.
_SECONDS = 600

# For each line of its input it forks twice: the first one waits for the second
# one, which is the program, and writes its exit code to a file.
_SERVER = """
import json, os, runpy, signal, sys
import matplotlib.pyplot, orbax.checkpoint, sklearn.datasets
from flaxshard.center import worker
from flaxshard.train import command_line, commits, loop

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while line := sys.stdin.readline():
  arguments, folder, output, environ, script = json.loads(line)
  if os.fork():
    continue
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  pid = os.fork()
  if pid:
    print(pid, flush=True)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(f"{output}.tmp", "w") as file:
      file.write(str(code))
    os.rename(f"{output}.tmp", f"{output}.code")
    os._exit(0)
  os.chdir(folder)
  os.environ.update(environ)
  with open(output, "w") as file, open(os.devnull) as nothing:
    os.dup2(nothing.fileno(), 0)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
  sys.path.insert(0, folder)
  sys.argv[1:] = arguments
  if script:
    sys.exit(exec(script, {"__name__": "__main__"}))
  runpy.run_module("flaxshard", run_name="__main__", alter_sys=True)
"""


class Program:
  """A program that was started.

  Args:
    pid: Number of its process.
    output: The file with what it prints.
  """

  def __init__(self, pid: int, output: pathlib.Path):
    self.pid = pid
    self._output = output
    self._code = pathlib.Path(f"{output}.code")

  @property
  def printed(self) -> str:
    return self._output.read_text()

  @property
  def has_ended(self) -> bool:
    return self._code.exists()

  def send(self, signum: int) -> None:
    """Sends a signal, unless it has ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
      os.kill(self.pid, signum)

  def wait(self, seconds: float = _SECONDS) -> int:
    """Waits for the end; returns the exit code."""
    wait_until(lambda: self.has_ended, "end", self, seconds=seconds)
    return int(self._code.read_text())

  def end(self, code: int = 0, seconds: float = _SECONDS) -> str:
    """Waits for the end; returns what it has printed."""
    assert self.wait(seconds) == code, self.printed
    return self.printed

  def kill(self) -> str:
    """Kills it, if it has not ended."""
    if not self.has_ended:
      self.send(signal.SIGKILL)
    wait_until(lambda: self.has_ended, "end", self)
    return self.printed


class Programs:
  """Starts programs; leaving the `with` block ends all of them.

  Attributes:
    folder: Path of a folder, with what the programs print.
  """

  def __enter__(self) -> Programs:
    self._started: list[Program] = []
    self._temporary = tempfile.TemporaryDirectory()
    self.folder = self._temporary.name
    self._server = subprocess.Popen(
      [sys.executable, "-c", _SERVER],
      env={
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": f"{self.folder}/jax",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{_ROOT}{os.pathsep}{_ROOT / 'tests'}",
        "XLA_FLAGS": xla_flags.FAST,
      },
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    return self

  def __exit__(self, *error: object) -> None:
    self.kill()
    self._server.kill()
    self._server.communicate()
    self._temporary.cleanup()

  def kill(self) -> None:
    """Kills what has not ended."""
    for program in self._started:
      program.kill()

  def start(
    self,
    folder: str | pathlib.Path,
    *arguments: str,
    script: str = "",
    **environ: str,
  ) -> Program:
    """Starts `flaxshard`, or a script, with arguments in a folder."""
    output = pathlib.Path(self.folder, f"output_{len(self._started)}")
    output.touch()
    request = [arguments, str(folder), str(output), environ, script]
    self._server.stdin.write(json.dumps(request) + "\n")
    self._server.stdin.flush()
    program = Program(int(self._server.stdout.readline()), output)
    self._started.append(program)
    return program


def wait_until(
  condition, what: str, *programs: Program, seconds: float = _SECONDS
) -> None:
  """Waits for a condition; programs show why it has not come."""
  deadline = time.monotonic() + seconds
  while not condition():
    printed = [program.printed for program in programs]
    assert time.monotonic() < deadline, (f"no {what}", *printed)
    time.sleep(0.05)
