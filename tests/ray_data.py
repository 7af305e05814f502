"""Digits with a fault in process 1, for the workers of tests/ray_test.py."""

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


def killed_once(workdir: str) -> data.Splits:
  """Kills process 1 in its first evaluation, once step 4 is saved."""
  root = pathlib.Path(workdir)
  marker = root / "killed"

  def kill():
    if not marker.exists():
      deadline = time.monotonic() + 60
      while not (root / "checkpoints" / "4").exists():
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.1)
      marker.touch()
      os.kill(os.getpid(), signal.SIGKILL)

  return _digits(kill)


def broken() -> data.Splits:
  """Raises in process 1 when it evaluates."""

  def fail():
    raise OSError("the disk of process 1 is broken")

  return _digits(fail)


def _digits(fault) -> data.Splits:
  splits = data.load({"name": "digits"})
  return data.Splits(
    splits.train, _FaultyEval(splits.eval, fault), splits.num_classes
  )
