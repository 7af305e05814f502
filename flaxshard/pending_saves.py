"""Saves that still run in the background: whether one failed, and at exit."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import weakref

import jax
import orbax.checkpoint as ocp

_log = logging.getLogger(__name__)

# A manager lives as long as its save: the thread that ends it refers to it.
_managers: weakref.WeakSet[ocp.CheckpointManager] = weakref.WeakSet()


class SaveError(RuntimeError):
  """A checkpoint could not be written; the message names step and directory."""


def expect(manager: ocp.CheckpointManager) -> None:
  """Has the end of the program wait for what a manager saves."""
  _managers.add(manager)


def failed(directory: str, step: int, error: Exception) -> SaveError:
  """Returns the error to raise, and removes what was written of a step.

  Args:
    directory: Where the steps lie.
    step: The step that could not be saved.
    error: What Orbax raised.
  """
  if jax.process_index() == 0:
    # On a full disk, others may be waiting for the room.
    unfinished = os.path.join(directory, f"{step}.orbax-checkpoint-tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
  reason = (str(error).splitlines() or [""])[0]
  return SaveError(
    f"step {step} could not be saved in {directory}: {type(error).__name__}: "
    f"{reason}\nThe state in memory and the earlier checkpoints are as they "
    "were."
  )


def _at_exit() -> None:
  for manager in list(_managers):
    try:
      manager.wait_until_finished()
    except Exception:
      # Nobody is left to raise it to.
      _log.exception("the last checkpoint in %s is lost", manager.directory)


# `atexit` runs when no thread can be started any more, and Orbax starts some to
# end a save. This is what `concurrent.futures` ends its own with: those
# registered later run first. It is private, so it may be missing one day.
_register = getattr(threading, "_register_atexit", None)
if _register is not None:
  _register(_at_exit)
