"""Saves that still run in the background: whether one failed, and at exit."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from typing import Any
import weakref

import jax
import orbax.checkpoint as ocp

from flaxshard.core import multihost

try:
  from orbax.checkpoint._src.futures import future as orbax_future
  from orbax.checkpoint._src.futures import signaling_client
except ImportError:  # private, so they may be elsewhere one day
  orbax_future = signaling_client = None

_log = logging.getLogger(__name__)

# The step that each saves. A manager lives as long as its save: the thread that
# ends it refers to it.
_managers: weakref.WeakKeyDictionary[ocp.CheckpointManager, int] = (
  weakref.WeakKeyDictionary()
)

# What is left of steps that could not be saved, in each directory.
_left: dict[str, set[str]] = {}


class SaveError(RuntimeError):
  """A checkpoint could not be written; the message names step and directory."""


def expect(manager: ocp.CheckpointManager, step: int) -> None:
  """Has the end of the program wait for what a manager is about to save.

  Also removes what could not be removed when an earlier save failed.

  Args:
    manager: The manager.
    step: The step that it saves.
  """
  for path in _left.pop(os.fspath(manager.directory), ()):
    shutil.rmtree(path, ignore_errors=True)
  _managers[manager] = step


def failed(directory: str, step: int, error: Exception) -> SaveError:
  """Returns the error to raise, and removes what was written of a step.

  Args:
    directory: Where the steps lie.
    step: The step that could not be saved.
    error: What Orbax raised.
  """
  for manager in list(_managers):
    if os.fspath(manager.directory) == directory:
      _end(manager)
  _clear(directory, step)
  # Of TensorStore, and longer than all the rest.
  reason = multihost.summarize_error(error).partition(" [tensorstore_spec=")[0]
  return SaveError(
    f"step {step} could not be saved in {directory}: {reason}\nThe state in "
    "memory and the earlier checkpoints are as they were."
  )


def _clear(directory: str, step: int) -> None:
  """Removes what was written of a step that could not be saved."""
  if jax.process_index() == 0:
    # On a full disk, others may be waiting for the room.
    unfinished = os.path.join(directory, f"{step}.orbax-checkpoint-tmp")
    if not _remove(unfinished):
      _left.setdefault(directory, set()).add(unfinished)


def _remove(directory: str) -> bool:
  """Removes a directory that others may still write in; returns if it is gone.

  TensorStore goes on with what it has begun when one of its writes fails.
  """
  for _ in range(50):
    shutil.rmtree(directory, ignore_errors=True)
    time.sleep(0.01)
    if not os.path.lexists(directory):
      return True
  return False


def _end(manager: ocp.CheckpointManager) -> None:
  """Leaves nothing of a save that failed to wait for, or to be raised."""
  _forget_errors(manager)
  try:
    _release_threads()
  except AttributeError as e:
    _log.warning("of another Orbax, whose threads may wait on: %s", e)


def _forget_errors(manager: ocp.CheckpointManager) -> None:
  """Waits for the rest of a save; the next would raise what else went wrong.

  Where the step's metadata cannot be written, a manager waits for no more.
  """
  waits = getattr(manager, "_checkpointer", manager)
  for _ in range(10):  # it may have several errors, and tells one at a time
    try:
      waits.wait_until_finished()
    except Exception as e:
      _log.info("%s: and also: %s", manager.directory, e)
    else:
      return


def writers() -> list[Any]:
  """Returns Orbax's threads that write, or wait for what others write."""
  if orbax_future is None:
    return []
  kind = orbax_future._SignalingThread
  return [t for t in threading.enumerate() if isinstance(t, kind)]


def _release_threads() -> None:
  """Ends Orbax's threads that wait for what no thread will do any more.

  One makes directories, and others wait for it to signal that they are there.
  Where it fails, they wait for 20 minutes, and so does the end of the program.
  Of several processes, that is left to Orbax: they share the signals.
  """
  if orbax_future is None or jax.process_count() > 1:
    return
  contract = orbax_future.AwaitableSignalsContract
  client = signaling_client.get_signaling_client()
  # Listed before the signals are read: who has ended by now has sent its own.
  threads = writers()
  to_come = {(t._operation_id, s) for t in threads for s in t._send_signals}

  def is_lost(save: str, signal: Any) -> bool:
    key = contract.get_unique_awaitable_singal_key(signal, save)
    return (save, signal) not in to_come and not client.key_value_try_get(key)

  lost = {
    t._operation_id
    for t in threads
    if any(is_lost(t._operation_id, s) for s in t._receive_signals)
  }
  waiting = [t for t in threads if t._operation_id in lost]
  for thread in waiting:
    thread.cancel()  # it looks when it wakes up
  for thread in waiting:
    orbax_future.set_signals(
      thread._receive_signals, operation_id=thread._operation_id
    )


def _at_exit() -> None:
  for manager, step in list(_managers.items()):
    try:
      manager.wait_until_finished()
    except Exception:
      # Nobody is left to raise it to.
      _log.exception("the last checkpoint in %s is lost", manager.directory)
      _end(manager)
      _clear(os.fspath(manager.directory), step)


# `atexit` runs when no thread can be started any more, and Orbax starts some to
# end a save. This is what `concurrent.futures` ends its own with: those
# registered later run first. It is private, so it may be missing one day.
_register = getattr(threading, "_register_atexit", None)
if _register is not None:
  _register(_at_exit)
