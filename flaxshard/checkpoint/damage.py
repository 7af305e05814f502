"""Decides whether a step that cannot be read is damaged.

A damaged step is passed over, so an error that may go away must not count as
damage: too many open files, no permission, no memory, a timeout. TensorStore
raises most errors as a ValueError with a text, so their type does not show
which kind they are. Here the files decide: the step is damaged if this process
can open all of them, and reading fails a second time.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import os
from typing import Any, TypeVar

import jax

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import reader
from flaxshard.core import files
from flaxshard.core import multihost

_T = TypeVar("_T")

# More than TensorStore opens to read one leaf.
_SPARE_DESCRIPTORS = 64

# Errors of the process or of the device that reads, whatever the files hold.
_OF_THE_READER = (MemoryError, TimeoutError, jax.errors.JaxRuntimeError)


def read(
  step_dir: str,
  read_all: Callable[[], _T],
  *,
  read_again: Callable[[], Any] | None = None,
  proves_damage: bool = True,
) -> _T:
  """Reads something of a step, and names damage as such.

  Args:
    step_dir: The directory of the step.
    read_all: Reads it with Orbax.
    read_again: Reads the same in small parts, so that it needs few open files
      and little memory; None is `read_all`.
    proves_damage: Whether to look for damage after an error. Not so if the
      digests of the files were compared: the files are then intact.

  Returns:
    The result of `read_all`.

  Raises:
    Damaged: The files of the step cannot be read by any process.
    Exception: The error of `read_all`, if damage is not proved.
  """
  try:
    return read_all()
  except (*_OF_THE_READER, digests.Damaged, reader.NotRestorableError):
    raise
  # Orbax wraps the errors of TensorStore in a bare Exception.
  except Exception as e:
    if not (proves_damage and _can_open_files(step_dir)):
      raise
    if not _fails(read_again or read_all):
      raise
    raise digests.Damaged(
      f"{step_dir} cannot be read: {multihost.summarize_error(e)}"
    ) from e


def _fails(read: Callable[[], Any]) -> bool:
  """Returns whether reading fails because of the content of the files."""
  try:
    read()
  except _OF_THE_READER:
    return False
  except Exception:
    return True
  return False


def _can_open_files(step_dir: str) -> bool:
  """Returns whether this process can open every file of a step.

  In a bucket no file shows that: any request may fail.
  """
  if files.is_bucket(step_dir):
    return False

  def raise_error(error: OSError) -> None:
    raise error

  try:
    # A second failure for want of descriptors must not look like damage.
    with contextlib.ExitStack() as stack:
      for _ in range(_SPARE_DESCRIPTORS):
        stack.enter_context(open(os.devnull, "rb"))
    for folder, _, names in os.walk(step_dir, onerror=raise_error):
      for name in names:
        # One byte shows EACCES and EIO; Orbax reads the rest.
        with open(os.path.join(folder, name), "rb", buffering=0) as f:
          f.read(1)
  except OSError:
    return False
  return True
