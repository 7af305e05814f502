"""Shares errors and flags between the processes of a program."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib

import jax
from jax.experimental import multihost_utils
import numpy as np

# All processes must gather arrays of one size, so messages are cut to it.
_MESSAGE_BYTES = 2048


@contextlib.contextmanager
def raise_on_all_processes(*kinds: type[Exception]) -> Iterator[None]:
  """Raises one process's error in all processes.

  Without it, the processes that have no error go on and wait forever for the
  failed one in their next collective. All processes must enter the block. In
  the block, do not call a collective after code that can fail: the failed
  process would not take part in it. With one process it does nothing.

  Args:
    *kinds: Exception types that the other processes raise as the same type. For
      an error of any other type they raise a RuntimeError.

  Raises:
    Exception: The error of this process, or of another one, with its index.

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
  # Byte 0 is the kind of the error, from 1; the rest is its message.
  sent = np.zeros(_MESSAGE_BYTES, np.uint8)
  if error is not None:
    matches = [isinstance(error, kind) for kind in kinds] + [True]
    text = str(error).encode()[: _MESSAGE_BYTES - 1]
    sent[0] = 1 + matches.index(True)
    sent[1 : 1 + len(text)] = np.frombuffer(text, np.uint8)
  received = multihost_utils.process_allgather(sent)
  if error is not None:
    raise error
  for process, (code, *message) in enumerate(received.tolist()):
    if code:
      # Cutting may have split a character of several bytes.
      reason = bytes(message).rstrip(b"\0").decode(errors="replace")
      kind = (*kinds, RuntimeError)[code - 1]
      raise kind(f"process {process}: {reason}")


def any_process(flag: bool) -> bool:
  """Returns whether a flag is set in any process; all processes must call it.

  Args:
    flag: The flag of this process.

  Example:
    >>> any_process(True)
    True
  """
  if jax.process_count() == 1:
    return flag
  return bool(multihost_utils.process_allgather(np.array(flag)).any())


def summarize_error(error: BaseException) -> str:
  """Returns the type of an error and the first line of its message.

  Args:
    error: The error.

  Example:
    >>> summarize_error(KeyError("w"))
    "KeyError: 'w'"
  """
  first_line = (str(error).splitlines() or [""])[0]
  return f"{type(error).__name__}: {first_line}"
