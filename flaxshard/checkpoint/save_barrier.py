"""What ends a save in all processes, where it failed in one.

In the background, each process writes its part and waits for the others; then
process 0 finalizes the step, and the others wait for it. A process that cannot
write does not come to these barriers of Orbax, and the others wait for it for
20 minutes, as it does for them at the last one. Here it says what went wrong,
and comes.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from typing import Any

import jax
import orbax.checkpoint as ocp

from flaxshard.checkpoint import pending_saves
from flaxshard.core import multihost

# All processes make their managers in the same order: Orbax syncs there, too.
_numbers = itertools.count()

# What Orbax calls its barriers, in their order. Should it rename them, they
# are what they were without this module.
_WRITTEN = "async_write_complete"
_COMMITTED = "async_commit_complete"
_ENDS = "set_value_start"  # also where a save begins
_ENDED = "set_value_end"
_ENDING_THREAD = "save_finalize"

# How many seconds a failed save's other writers are waited for.
_PATIENCE = 2.0


def create() -> ocp.multihost.BarrierSyncFn | None:
  """Returns a barrier for the `AsyncOptions` of one manager.

  All processes' saves end together, and fail in all if they fail in one: with
  its own error in that one, with a RuntimeError that tells it in the others.

  Returns:
    None, for Orbax's own barrier, where Orbax does not say how to reach the
    other processes.
  """
  if not hasattr(ocp.multihost, "get_jax_distributed_client"):
    return None
  save = _Save(f"flaxshard/saves/{next(_numbers)}")

  def barrier(*, key: str, timeout_ms: int) -> None:
    if jax.process_count() > 1:
      save.barrier(key, timeout_ms)

  return barrier


class _Save:
  """The save that runs, as the barriers of one manager see it."""

  def __init__(self, name: str):
    self._name = name
    self._number = 0  # of the save, the same in all processes
    self._lock = threading.Lock()
    self._came: set[str] = set()
    self._failed = False  # whether this process raises already

  def barrier(self, key: str, timeout_ms: int) -> None:
    ends = threading.current_thread().name == _ENDING_THREAD
    if _WRITTEN in key or _COMMITTED in key:
      stage = _WRITTEN if _WRITTEN in key else _COMMITTED
      self._wait_once(stage, timeout_ms)
      self._raise_published_errors()
      return
    if _ENDS in key and ends:
      self._publish_error(sys.exc_info()[1])
      for stage in (_WRITTEN, _COMMITTED):
        self._wait_once(stage, timeout_ms)
    self._wait(key, timeout_ms)
    if _ENDS in key and not ends:
      self._begin()
    elif _ENDED in key and ends:
      # As after it was committed, where a step could not be deleted.
      self._raise_published_errors()

  def _begin(self) -> None:
    self._came.clear()
    self._failed = False
    self._number += 1

  @property
  def _told(self) -> str:
    """Where the errors of this save lie."""
    return f"{self._name}/{self._number}"

  def _wait(self, key: str, timeout_ms: int) -> None:
    ocp.multihost.get_barrier_sync_fn()(
      key=f"{self._name}/{key}", timeout_ms=timeout_ms
    )

  def _wait_once(self, stage: str, timeout_ms: int) -> None:
    with self._lock:
      came = stage in self._came
      self._came.add(stage)
    if not came:
      self._wait(stage, timeout_ms)

  def _publish_error(self, error: BaseException | None) -> None:
    """Has the others know of an error of this process's own."""
    if error is None or self._failed:
      return
    self._failed = True
    _let_writers_end()
    _client().key_value_set(
      f"{self._told}/{jax.process_index()}",
      f"process {jax.process_index()}: {multihost.summarize_error(error)}",
    )

  def _raise_published_errors(self) -> None:
    if self._failed:
      return
    told = [text for _, text in _client().key_value_dir_get(f"{self._told}/")]
    if told:
      self._failed = True
      raise RuntimeError("; ".join(sorted(told)))


def _let_writers_end() -> None:
  """Waits for what still writes, or the same step, saved anew, would have it.

  A writer that waits for a directory of process 0 ends soon where that is
  there, and minutes after process 0 has removed it, for it does when all fail.
  """
  until = time.monotonic() + _PATIENCE
  for thread in pending_saves.writers():
    # Its own would raise.
    threading.Thread.join(thread, max(0.0, until - time.monotonic()))


def _client() -> Any:
  return ocp.multihost.get_jax_distributed_client()
