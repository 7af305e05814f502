"""Digits with a fault in process 1 or worker 0, for tests of several ones."""

import os
import pathlib
import signal
import time

import jax

from flaxshard import data


class _FaultyEval:
  """Examples that call `fault` when a process reads them.

  The first example is read without a fault: loading the data checks it.
  """

  def __init__(self, source, fault, process):
    self._source = source
    self._fault = fault
    self._process = process

  def __len__(self):
    return len(self._source)

  def __getitem__(self, index):
    if index > 0 and jax.process_index() == self._process:
      self._fault()
    return self._source[index]


def _digits(fault, process) -> data.Splits:
  splits = data.load({"name": "digits"})
  faulty = _FaultyEval(splits.eval, fault, process)
  return data.Splits(splits.train, faulty, splits.num_classes)


def _wait_until(condition):
  deadline = time.monotonic() + 120
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.1)


def broken_once(workdir: str) -> data.Splits:
  """Raises in the first evaluation of process 1, once step 4 is saved."""
  marker = pathlib.Path(workdir) / "fault"

  def fail():
    if not marker.exists():
      marker.touch()
      _wait_until((marker.parent / "checkpoints" / "4").exists)
      raise OSError("the disk of process 1 is broken")

  return _digits(fail, process=1)


class Attempts:
  """A hook with which worker 0 fails, and worker 1 waits for that at step 5.

  Args:
    log: A file that gets the id of the process at each failure.
    worker_id: Index of the worker.
  """

  # Until the worker of this process has failed.
  log: pathlib.Path | None = None

  def __init__(self, log: str, worker_id: int):
    self._log = pathlib.Path(log)
    Attempts.log = None if worker_id else self._log

  def __call__(self, step, state, metrics):
    if step == 5:
      _wait_until(lambda: _count(self._log) == 3)


def _count(log):
  return log.read_text().count("\n") if log.exists() else 0


def of_attempts() -> data.Splits:
  """Data of `Attempts`: JAX fails, a disk does, and the process is killed."""

  def fail():
    # Several threads read.
    log, Attempts.log = Attempts.log, None
    if log is None:
      return
    attempt = _count(log)
    with log.open("a") as f:
      print(os.getpid(), file=f)
    if attempt == 0:
      raise jax.errors.JaxRuntimeError("INTERNAL: the device is broken")
    if attempt == 1:
      raise OSError("the disk is broken")
    os.kill(os.getpid(), signal.SIGKILL)

  return _digits(fail, process=0)
