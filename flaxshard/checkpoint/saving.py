"""Writes steps with Orbax's manager: one writer, and saves that may fail."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
import contextlib
import itertools
import logging
import shutil
import sys
import threading
import time
from typing import Any, NoReturn
import weakref

from etils import epath
import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from flaxshard.checkpoint import choose
from flaxshard.checkpoint import digests
from flaxshard.checkpoint import steps
from flaxshard.core import files as files_lib
from flaxshard.core import multihost

_log = logging.getLogger(__name__)

# Every process creates its managers in the same order, as Orbax requires.
_barrier_numbers = itertools.count()

# Seconds to wait for the other writers of a failed save. Threads of the program
# itself may be among them, and never end.
_WRITERS_TIMEOUT = 2.0


class SaveError(RuntimeError):
  """A checkpoint could not be written; the message names step and directory."""


class Saver:
  """Saves steps in a directory, with Orbax's `CheckpointManager`.

  Args:
    directory: Path of the directory of the steps; the first save creates it.
    policy: Chooses the steps to keep.
    item_handlers: Makes Orbax's handlers, by item.
    take_digests: Whether to take the crc32 of all files.

  Attributes:
    damaged: Steps that could not be restored. The next save renames them, as
      Orbax saves no step before the latest that it finds.
  """

  def __init__(
    self,
    directory: str,
    policy: checkpoint_managers.PreservationPolicy,
    item_handlers: Callable[[], Mapping[str, ocp.CheckpointHandler]],
    take_digests: bool,
  ):
    self._directory = directory
    self._policy = policy
    self._item_handlers = item_handlers
    self._digests = take_digests
    self._barrier = SaveBarrier()
    self._step: int | None = None  # of the save that may still run
    self._writes: tuple[int, Mapping[str, bytes]] = (0, {})
    # Created by the first save: it would create the directory.
    self._manager: ocp.CheckpointManager | None = None
    self._unlock: weakref.finalize[[], Any] | None = None
    self.damaged: set[int] = set()

  def paths(self) -> dict[int, Any]:
    """Returns the path of each step, also of damaged ones; notes those."""
    if self._manager is None:
      found, damaged = choose.look(self._directory)
      self.damaged.intersection_update(found)
      self.damaged.update(damaged)
      return found
    # No other program saves here now.
    theirs = steps.find(self._directory, steps.FLAX)
    own = {*self._manager.all_steps(), *(self.damaged - theirs.keys())}
    where = epath.Path(self._directory)
    return theirs | {step: where / str(step) for step in sorted(own)}

  def reload(self) -> None:
    """Lists the steps again: another checkpointer of this program saved one."""
    if self._manager is not None:
      self._manager.reload()

  def wait(self) -> None:
    """Waits until the last save is on disk.

    Raises:
      SaveError: The save failed.
    """
    step, self._step = self._step, None
    if self._manager is None or step is None:
      return
    try:
      self._manager.wait_until_finished()
    except Exception as e:
      # Orbax deletes older steps once the new one has its final name.
      if not steps.is_complete(f"{self._directory}/{step}"):
        self._fail(step, e)
      _log.warning("%s: an old step was not deleted: %s", self._directory, e)
      self._manager.reload()  # it forgot the new step and the old ones

  def check(self, *, local: bool) -> None:
    """Raises if a save has failed in the background.

    Args:
      local: Whether each process asks for itself, instead of all together.

    Raises:
      SaveError: The last save failed.
    """
    ended = (
      self._step is not None
      and self._manager is not None
      and not self._manager.is_saving_in_progress()
    )
    # A save ends in all processes at about the same time. Waiting for the end
    # of it joins a thread, and needs no other process.
    if ended if local else "True" in multihost.exchange(str(ended)):
      self.wait()

  def save(
    self,
    step: int,
    items: Mapping[str, ocp.args.CheckpointArgs],
    metrics: Mapping[str, Any] | None,
    files: Mapping[str, bytes],
  ) -> None:
    """Starts to save a step. All processes must call it.

    Args:
      step: The step to save.
      items: Orbax's arguments, by item.
      metrics: The metrics that rank the step, if there are any.
      files: The content of more files, by their name in the step.

    Raises:
      ValueError: Another program saves in the directory.
      SaveError: This step, or the one before, could not be written.
    """
    try:
      manager = self._prepare(step)
      self._barrier.start_save()
      self._writes = (step, files)
      _managers[manager] = step
      try:
        manager.save(step, metrics=metrics, args=ocp.args.Composite(**items))
      except Exception as e:
        self._fail(step, e)
    except SaveError:
      # In all processes: they create the next one together.
      self._close_manager()
      raise
    self._step = step

  def _prepare(self, step: int) -> ocp.CheckpointManager:
    """Locks the directory, renames damaged steps, returns the manager."""
    with multihost.raise_on_all_processes(ValueError, SaveError):
      self.wait()
      self._lock(step)
    # All processes are here: none reads a step that process 0 renames.
    with multihost.raise_on_all_processes(SaveError):
      if (self.damaged or self._manager is None) and jax.process_index() == 0:
        self._rename_damaged(step)
    if self._manager is None:
      self._manager = self._create_manager()
    elif self.damaged:
      self._manager.reload()
    # No file of Flax is renamed.
    self.damaged.intersection_update(steps.find(self._directory, steps.FLAX))
    return self._manager

  def _create_manager(self) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
      self._directory,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=self._policy,
        async_options=ocp.options.AsyncOptions(
          barrier_sync_fn=self._barrier,
          # It keeps this object, and with it the lock, until the save ends.
          post_finalization_callback=self._write_files,
          # If they cannot be created in the background, Orbax's other threads
          # wait for them until a timeout, and so does the end of the program.
          create_directories_asynchronously=False,
        ),
      ),
      # New ones: a failed save leaves records in them.
      item_handlers=dict(self._item_handlers()),
    )

  def _write_files(self) -> None:
    """Writes the last files of a step, in process 0, before it has its name."""
    step, files = self._writes
    step_dir = steps.unfinished(self._directory, step)
    for name, content in files.items():
      (step_dir / name).write_bytes(content)
    digests.write(step_dir, contents=self._digests)

  def _lock(self, step: int) -> None:
    """Creates the directory and locks it, until the checkpointer is closed."""
    if self._unlock is None and jax.process_index() == 0:
      try:
        epath.Path(self._directory).mkdir(parents=True, exist_ok=True)
        unlock = files_lib.lock("directory", self._directory, reentrant=True)
      except OSError as e:
        self._fail(step, e)
      self._unlock = weakref.finalize(self, unlock)

  def _rename_damaged(self, new_step: int) -> None:
    _, damaged = choose.look(self._directory)
    found = steps.find(self._directory, steps.OURS)
    for step in sorted((damaged | self.damaged) & found.keys()):
      path = found[step]
      new_path = path.with_name(f"{path.name}.damaged")
      try:
        path.rename(new_path)
      except OSError as e:
        self._fail(new_step, e)
      _log.warning("%s is damaged: renamed to %s", path, new_path)

  def _fail(self, step: int, error: Exception) -> NoReturn:
    """Removes what was written of a step, and raises a SaveError."""
    self._close_manager()
    remove_unfinished(self._directory, step)
    # TensorStore appends its whole configuration to the first line.
    reason, _, _ = multihost.summarize_error(error).partition(" [tensorstore_")
    raise SaveError(
      f"step {step} could not be saved in {self._directory}: {reason}\nThe "
      "state in memory and the earlier checkpoints are unchanged."
    ) from error

  def _close_manager(self) -> None:
    manager, self._manager, self._step = self._manager, None, None
    if manager is None:
      return
    # A failed save can have several errors, of which Orbax raises one a call.
    for _ in range(10):
      try:
        manager.close()
        break
      except Exception as e:
        _log.info("%s: another error of a save: %s", self._directory, e)
    _managers.pop(manager, None)

  def close(self) -> None:
    """Waits for the last save, and unlocks the directory.

    Raises:
      SaveError: The last save failed.
    """
    try:
      self.wait()
    finally:
      self._close_manager()
      if self._unlock is not None:
        self._unlock()
        self._unlock = None


class OtherProcessError(RuntimeError):
  """A save has failed in another process; the message has its error."""


class SaveBarrier:
  """A barrier for Orbax's background threads that passes when a save fails.

  Orbax calls it several times in each save, through
  `AsyncOptions.barrier_sync_fn`. A process whose part of a save fails skips
  the next of those barriers, at which the other processes would wait for
  `AsyncOptions.timeout_secs`, and goes on to the last ones, with its error in
  flight. Therefore the calls are numbered in each process, and all processes
  wait at barriers of the same number, whatever Orbax names them. An error is
  published before the process waits, so after the barrier all processes see it
  and raise it: the save fails in all of them.

  Orbax also leaves the other writing threads of a failed save alone. They would
  write into the directory that is removed, so the barrier waits for them first.
  """

  def __init__(self) -> None:
    self._name = f"flaxshard/save_barrier/{next(_barrier_numbers)}"
    self._save = 0  # number of the save, equal in all processes
    self._calls = itertools.count()
    self._caller: int | None = None  # the thread that calls `save`
    self._earlier_threads: set[threading.Thread] = set()
    self._errors = ""  # of all processes, once the save has failed
    self._lock = threading.Lock()

  def start_save(self) -> None:
    """Prepares for the next save; called in all processes before it starts."""
    self._save += 1
    self._calls = itertools.count()
    self._caller = threading.get_ident()
    self._earlier_threads = set(threading.enumerate())
    self._errors = ""

  def __call__(self, *, key: str, timeout_ms: int) -> None:
    """Waits until all processes have called it equally often in this save.

    Args:
      key: Orbax's name of the barrier; not used.
      timeout_ms: Milliseconds to wait at most.

    Raises:
      OtherProcessError: The save has failed in another process; the message
        has its number and its error.
    """
    del key
    # A program may call `save` while it handles an error of its own.
    in_caller = threading.get_ident() == self._caller
    error = None if in_caller else sys.exc_info()[1]
    if error is not None and not self._errors:
      self._wait_for_writers()
    if jax.process_count() == 1:
      return
    # Two threads of one process would mix up the numbers.
    with self._lock:
      if not self._errors:
        self._errors = self._exchange_errors(error, timeout_ms)
    if self._errors and error is None:
      raise OtherProcessError(self._errors)

  def _wait_for_writers(self) -> None:
    """Waits for the threads that were started since the save started."""
    deadline = time.monotonic() + _WRITERS_TIMEOUT
    for thread in threading.enumerate():
      started = thread not in self._earlier_threads
      if started and thread is not threading.current_thread():
        # Orbax's own `join` would raise the error of the thread.
        threading.Thread.join(thread, max(0.0, deadline - time.monotonic()))

  def _exchange_errors(
    self, error: BaseException | None, timeout_ms: int
  ) -> str:
    """Waits at the next barrier; returns the errors published before it."""
    barrier = f"{self._name}/{self._save}/{next(self._calls)}"
    client = multihost.coordination_client()
    if error is not None:
      process = jax.process_index()
      client.key_value_set(
        f"{barrier}/{process}",
        f"process {process}: {multihost.summarize_error(error)}",
      )
    ocp.multihost.get_barrier_sync_fn()(key=barrier, timeout_ms=timeout_ms)
    published = client.key_value_dir_get(f"{barrier}/")
    return "; ".join(sorted(text for _, text in published))


def remove_unfinished(directory: str, step: int) -> None:
  """Removes what a failed save has written, which Orbax leaves on the disk.

  Args:
    directory: Path of the directory of steps.
    step: The step that could not be saved.
  """
  # In a bucket it is no step without its last file, and the next save
  # replaces it.
  if jax.process_index() != 0 or files_lib.is_bucket(directory):
    return
  path = steps.unfinished(directory, step)
  # TensorStore finishes the writes it has begun after one of them has failed.
  for _ in range(50):
    shutil.rmtree(path, ignore_errors=True)
    time.sleep(0.01)
    if not path.exists():
      return


# The managers that are not closed, and the step that each saved last. A manager
# lives at least as long as its save, because Orbax's thread refers to it.
_managers: weakref.WeakKeyDictionary[ocp.CheckpointManager, int | None] = (
  weakref.WeakKeyDictionary()
)


def _finish_saves() -> None:
  """Says at the end of the program if the last save did not reach the disk.

  Python has then closed the thread pools with which Orbax would finish it.
  """
  for manager, step in list(_managers.items()):
    with contextlib.suppress(Exception):
      manager.wait_until_finished()
    directory = str(manager.directory)
    if step is None or steps.is_complete(f"{directory}/{step}"):
      continue
    _log.error(
      "step %d, the last checkpoint in %s is lost: the program ended before it "
      "was written. Leave the Checkpointer's `with` block, or call `wait`.",
      step,
      directory,
    )
    remove_unfinished(directory, step)


atexit.register(_finish_saves)
