"""Digits with a fault in process 1, for tests of several processes."""

import os
import pathlib
import signal
import time

import jax

from flaxshard import data


class _FaultyEval:
  """Examples that call `fault` when process 1 reads them.

  The first example is read without a fault: loading the data checks it.
  """

  def __init__(self, source, fault):
    self._source = source
    self._fault = fault

  def __len__(self):
    return len(self._source)

  def __getitem__(self, index):
    if index > 0 and jax.process_index() == 1:
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


def terminated_once(workdir: str) -> data.Splits:
  """Sends SIGTERM to the launcher in the first evaluation of process 1."""

  def terminate():
    os.kill(os.getppid(), signal.SIGTERM)
    # Until JAX has told all processes.
    time.sleep(2)

  return _digits(_once(workdir, terminate))


def _once(workdir, fault):
  marker = pathlib.Path(workdir) / "fault"

  def run_once():
    if not marker.exists():
      marker.touch()
      fault()

  return run_once


def _digits(fault) -> data.Splits:
  splits = data.load({"name": "digits"})
  return data.Splits(
    splits.train, _FaultyEval(splits.eval, fault), splits.num_classes
  )
