"""Digits with a fault in process or worker 1, for tests of several ones."""

from collections.abc import Sequence
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


def broken_once(workdir: str) -> data.Splits:
  """Raises in the first evaluation of process 1, once step 4 is saved."""
  marker = pathlib.Path(workdir) / "fault"

  def fail():
    if not marker.exists():
      marker.touch()
      _wait_until((marker.parent / "checkpoints" / "4").exists)
      raise OSError("the disk of process 1 is broken")

  return _digits(fail)


def _wait_until(condition):
  deadline = time.monotonic() + 120
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.1)


def _digits(fault, process=1) -> data.Splits:
  splits = data.load({"name": "digits"})
  return data.Splits(
    splits.train, _FaultyEval(splits.eval, fault, process), splits.num_classes
  )


class Attempt:
  """A hook that gives each attempt of a worker the fault of its data.

  A worker without a fault waits at step 5 until the others have had all theirs.

  Args:
    log: A folder with a file for each worker. It gets a line with the id of the
      process and the fault, when that happens; without one, at the start.
    faults: Of each worker, those of its first attempts, in their order:
      "killed" (by SIGKILL), "device" (an error of JAX) or "disk" (an exception
      of Python).
    attempts: Number of attempts that each worker has.
    worker_id: Index of the worker.
  """

  fault = "none"

  def __init__(
    self,
    log: str,
    faults: Sequence[Sequence[str]],
    attempts: int,
    worker_id: int,
  ):
    self._files = [pathlib.Path(log, str(k)) for k in range(len(faults))]
    self._attempts = attempts
    Attempt.file = self._files[worker_id]
    own = [*faults[worker_id], *["none"] * attempts]
    Attempt.fault = own[self._count(Attempt.file)]
    if Attempt.fault == "none":
      self.note("none")

  def __call__(self, step, state, metrics):
    if step == 5:
      _wait_until(lambda: min(map(self._count, self._files)) >= self._attempts)

  @classmethod
  def note(cls, fault):
    with cls.file.open("a") as f:
      print(os.getpid(), fault, file=f)

  def _count(self, path):
    return path.read_text().count("\n") if path.exists() else 0


def of_attempt() -> data.Splits:
  """Has the fault of the last `Attempt` in the first evaluation."""

  def fail():
    # Several threads read.
    fault, Attempt.fault = Attempt.fault, "none"
    if fault == "none":
      return
    Attempt.note(fault)
    if fault == "killed":
      os.kill(os.getpid(), signal.SIGKILL)
    if fault == "device":
      raise jax.errors.JaxRuntimeError("INTERNAL: the device is broken")
    raise OSError("the disk is broken")

  return _digits(fail, process=0)
