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
  checkpoint = pathlib.Path(workdir) / "checkpoints" / "4"

  def fail():
    deadline = time.monotonic() + 120
    while not checkpoint.exists():
      assert time.monotonic() < deadline, "no checkpoint"
      time.sleep(0.1)
    raise OSError("the disk of process 1 is broken")

  return _digits(_once(workdir, fail))


def _once(workdir, fault):
  marker = pathlib.Path(workdir) / "fault"

  def run_once():
    if not marker.exists():
      marker.touch()
      fault()

  return run_once


def _digits(fault, process=1) -> data.Splits:
  splits = data.load({"name": "digits"})
  return data.Splits(
    splits.train, _FaultyEval(splits.eval, fault, process), splits.num_classes
  )


class Attempt:
  """A hook that notes an attempt of a worker, and sets the fault of its data.

  A worker that has no fault waits at step 5 for all attempts of the others.

  Args:
    log: A folder with a file for each worker, and in it a line for each attempt
      with the id of the process and the fault.
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
    attempt = self._count(worker_id)
    own = [*faults[worker_id], *["none"] * attempts]
    Attempt.fault = own[attempt]
    with self._files[worker_id].open("a") as f:
      print(os.getpid(), Attempt.fault, file=f)

  def __call__(self, step, state, metrics):
    if step == 5:
      deadline = time.monotonic() + 120
      while min(map(self._count, range(len(self._files)))) < self._attempts:
        assert time.monotonic() < deadline, "a worker has not come back"
        time.sleep(0.1)

  def _count(self, worker_id):
    path = self._files[worker_id]
    return path.read_text().count("\n") if path.exists() else 0


def of_attempt() -> data.Splits:
  """Has the fault of the last `Attempt` in the first evaluation."""

  def fail():
    if Attempt.fault == "killed":
      os.kill(os.getpid(), signal.SIGKILL)
    if Attempt.fault == "device":
      raise jax.errors.JaxRuntimeError("INTERNAL: the device is broken")
    if Attempt.fault == "disk":
      raise OSError("the disk is broken")

  return _digits(fail, process=0)
