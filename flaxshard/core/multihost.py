"""What one process finds, all of a program's processes raise, or are told."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib

import jax
from jax.experimental import multihost_utils
import numpy as np

_BYTES = 2048  # of a message, which all processes must make the same room for


@contextlib.contextmanager
def raise_on_all_processes(*kinds: type[Exception]) -> Iterator[None]:
  """Ends a block with an error in all processes, where it has one in any.

  Otherwise those without the error would go on, and wait for the others in the
  next collective. All processes must enter the block, and no collective may be
  in it that comes after what can fail. With one process it does nothing.

  Args:
    *kinds: What errors are raised as in the other processes, where they are of
      that kind; else as a RuntimeError.

  Raises:
    Exception: This process's own, or one that says which process had which.

  Example:
    >>> with raise_on_all_processes(ValueError):
    ...   pass
  """
  if jax.process_count() == 1:
    yield
    return
  error = None
  try:
    yield
  except Exception as e:
    error = e
  told = np.zeros(_BYTES, np.uint8)
  if error is not None:
    which = [isinstance(error, kind) for kind in kinds] + [True]
    text = str(error).encode()[: _BYTES - 1]
    told[0] = 1 + which.index(True)
    told[1 : 1 + len(text)] = np.frombuffer(text, np.uint8)
  heard = multihost_utils.process_allgather(told)
  if error is not None:
    raise error
  for process, (code, *message) in enumerate(heard.tolist()):
    if code:
      reason = bytes(message).rstrip(b"\0").decode(errors="replace")
      kind = (*kinds, RuntimeError)[code - 1]
      raise kind(f"process {process}: {reason}")


def any_process(flag: bool) -> bool:
  """Returns whether a flag is set in any process; all must ask.

  Args:
    flag: That of this process.

  Example:
    >>> any_process(True)
    True
  """
  if jax.process_count() == 1:
    return flag
  return bool(multihost_utils.process_allgather(np.array(flag)).any())


def summarize_error(error: BaseException) -> str:
  """Returns an error's kind and the first line of what it says.

  Args:
    error: The error.

  Example:
    >>> summarize_error(KeyError("w"))
    "KeyError: 'w'"
  """
  first = (str(error).splitlines() or [""])[0]
  return f"{type(error).__name__}: {first}"
