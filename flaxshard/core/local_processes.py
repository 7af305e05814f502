"""Names processes so that others on the machine can see whether they ended."""

from __future__ import annotations

import functools
import os


@functools.cache
def space() -> str:
  """Returns what names the set of processes that `os.kill` can reach.

  Containers on one machine have process numbers of their own. It is "" where
  this is not known: not on Linux.
  """
  try:
    with open("/proc/sys/kernel/random/boot_id") as f:
      return f"{f.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
  except OSError:
    return ""


def has_ended(process_space: str, pid: int) -> bool:
  """Returns whether a process is known to have ended.

  Args:
    process_space: The result of `space` in that process.
    pid: Its number.
  """
  if not process_space or process_space != space():
    return False
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return True
  except OSError:
    pass  # it exists, but belongs to another user
  return False
