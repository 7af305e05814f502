"""Orbax's manager: created late, locked, and replaced after a failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import contextlib
import logging
import time
from typing import Any, NoReturn, TypeVar
import weakref

from etils import epath
import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from flaxshard.checkpoint import orbax_workarounds
from flaxshard.checkpoint import saved_steps
from flaxshard.checkpoint import step_names
from flaxshard.core import files
from flaxshard.core import multihost

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

# How often the steps are listed again if another program deletes one meanwhile,
# and the seconds that it may need for that.
_LIST_ATTEMPTS = 20
_DELETION_SECONDS = 0.1


class SaveError(RuntimeError):
  """A checkpoint could not be written; the message names step and directory."""


class SaveManager:
  """Saves steps in a directory, with Orbax's `CheckpointManager`.

  Args:
    directory: Path of the directory of the steps; the first save creates it.
    policy: Chooses the steps to keep.
    item_handlers: Orbax's handlers, by item.

  Attributes:
    manager: Orbax's manager; None until the directory exists, because it would
      create it.
    steps: The steps in the directory.
  """

  def __init__(
    self,
    directory: str,
    policy: checkpoint_managers.PreservationPolicy,
    item_handlers: Mapping[str, ocp.CheckpointHandler],
  ):
    self._directory = directory
    self._policy = policy
    self._item_handlers = dict(item_handlers)
    self._barrier = orbax_workarounds.SaveBarrier()
    self._saving: int | None = None  # the step of the save that may still run
    self._failed: int | None = None  # the step whose save failed last
    self._unlock: weakref.finalize[[], Any] | None = None
    self.steps = saved_steps.SavedSteps(directory)
    self.manager: ocp.CheckpointManager | None = None
    if multihost.any_process(epath.Path(directory).is_dir()):
      self.open()

  @property
  def locked(self) -> bool:
    """Whether no other program can save in the directory."""
    return self._unlock is not None

  def open(self) -> ocp.CheckpointManager:
    """Returns the manager; creates it, and the directory, if there is none."""
    if self.manager is None:
      self.manager = self._retry(self._create_manager)
    return self.manager

  def reload(self) -> None:
    """Lists the steps again, which another program may have changed."""
    if self.manager is not None:
      self._retry(self.manager.reload)

  def _retry(self, list_steps: Callable[[], _T]) -> _T:
    """Calls a function of Orbax that lists the steps and reads their metrics.

    It fails if another program deletes a step between the two.
    """
    for _ in range(_LIST_ATTEMPTS if jax.process_count() == 1 else 0):
      before = list(step_names.steps(self._directory))
      try:
        return list_steps()
      except (OSError, LookupError, ValueError):
        # The files of a step are deleted before its directory.
        time.sleep(_DELETION_SECONDS)
        if list(step_names.steps(self._directory)) == before:
          break
    return list_steps()

  def _create_manager(self) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
      self._directory,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=self._policy,
        step_name_format=self.steps,
        async_options=ocp.options.AsyncOptions(
          barrier_sync_fn=self._barrier,
          # If they cannot be created in the background, Orbax's other threads
          # wait for them until a timeout, and so does the end of the program.
          create_directories_asynchronously=False,
        ),
      ),
      item_handlers=self._item_handlers,
    )

  def step_paths(self) -> dict[int, str]:
    """Returns the path of each step, the damaged ones and Flax's included."""
    # Creating the manager synchronizes the processes.
    if self.manager is None and (
      jax.process_count() > 1 or not epath.Path(self._directory).is_dir()
    ):
      return {}
    manager = self.open()
    # From its first save on, no other program can save in the directory.
    if not self.locked and jax.process_count() == 1:
      self.reload()
    return self.steps.paths(manager.all_steps())

  def wait(self) -> None:
    """Waits until the last save is on disk.

    Raises:
      SaveError: The save failed.
    """
    step, self._saving = self._saving, None
    if self.manager is None:
      return
    try:
      self.manager.wait_until_finished()
    except Exception as e:
      if step is None:
        raise
      # Orbax deletes older steps once the new one has its final name.
      if not step_names.is_complete(self.steps.path(step)):
        self._raise_failure(step, e)
      _log.warning(
        "%s: an older checkpoint was not deleted: %s", self._directory, e
      )
      self.manager.reload()  # it forgot the new step and the old ones

  def check(self, *, local: bool) -> None:
    """Raises if a save has failed in the background.

    Args:
      local: Whether each process asks for itself, instead of all together.

    Raises:
      SaveError: The last save failed.
    """
    ended = (
      self._saving is not None
      and self.manager is not None
      and not self.manager.is_saving_in_progress()
    )
    # A save ends in all processes at about the same time. Waiting for the end
    # of it joins a thread, and needs no other process.
    if ended if local else multihost.any_process(ended):
      self.wait()

  def prepare(self, step: int) -> None:
    """Waits for the last save, and creates the directory if it is missing.

    Args:
      step: The step to save.

    Raises:
      SaveError: The last save failed, or the directory cannot be created.
    """
    self.wait()
    if self._is_gone():
      self._raise_failure(step, FileNotFoundError())
    # The other processes would wait for directories that process 0 cannot
    # create. With one process, Orbax itself raises at once.
    if jax.process_index() == 0 and self.manager is None:
      try:
        epath.Path(self._directory).mkdir(parents=True, exist_ok=True)
      except OSError as e:
        self._raise_failure(step, e)

  def save(
    self,
    step: int,
    items: Mapping[str, ocp.args.CheckpointArgs],
    metrics: Mapping[str, Any] | None,
  ) -> None:
    """Starts to save a step, after `prepare`. All processes must call it.

    Args:
      step: The step to save.
      items: Orbax's arguments, by item.
      metrics: The metrics that rank the step, if there are any.

    Raises:
      ValueError: Another program saves in the directory.
      SaveError: The step could not be written.
    """
    manager = self.open()
    with multihost.raise_on_all_processes(ValueError, SaveError):
      try:
        self._lock(manager)
      except OSError as e:
        self._raise_failure(step, e)
    if self._failed is not None:
      manager = self._recover()
    self._rename_damaged(manager, step)
    self._barrier.start_save()
    orbax_workarounds.wait_at_exit(manager, step)
    try:
      manager.save(step, metrics=metrics, args=ocp.args.Composite(**items))
    except Exception as e:
      self._raise_failure(step, e)
    self._saving = step

  def _lock(self, manager: ocp.CheckpointManager) -> None:
    """Locks the directory until it is closed or deleted."""
    if self._unlock is None:
      # The manager lives until its save has ended, even without a checkpointer.
      self._unlock = weakref.finalize(
        manager,
        files.lock("directory", self._directory, reentrant=True),
      )

  def _rename_damaged(
    self, manager: ocp.CheckpointManager, new_step: int
  ) -> None:
    """Renames damaged steps: Orbax saves no step before the latest it finds."""
    if not self.steps.damaged:
      return
    # No process may still read a directory that process 0 renames.
    ocp.multihost.sync_global_processes("flaxshard:before_rename_damaged")
    with multihost.raise_on_all_processes(SaveError):
      if jax.process_index() == 0:
        try:
          self.steps.set_aside_damaged()
        except OSError as e:
          self._raise_failure(new_step, e)
    manager.reload()

  def _is_gone(self) -> bool:
    """Returns whether the directory was there, and is no longer."""
    is_open = self.manager is not None and not files.is_bucket(self._directory)
    return is_open and not epath.Path(self._directory).is_dir()

  def _raise_failure(self, step: int, error: Exception) -> NoReturn:
    """Removes what was written of a step, and raises a SaveError."""
    self._failed = step
    if self._is_gone():
      # What Orbax says of it is a hundred lines long.
      raise SaveError(
        f"step {step} could not be saved: {self._directory} is gone. It was "
        "deleted or moved while the program ran. The state in memory is "
        "unchanged."
      ) from None
    orbax_workarounds.remove_unfinished(self._directory, step)
    # Orbax forgot the steps that it was going to delete after this save.
    if self.manager is not None:
      with contextlib.suppress(OSError):  # the whole directory may be gone
        self.manager.reload()
    # TensorStore appends its whole configuration to the first line.
    reason, _, _ = multihost.summarize_error(error).partition(
      " [tensorstore_spec="
    )
    raise SaveError(
      f"step {step} could not be saved in {self._directory}: {reason}\nThe "
      "state in memory and the earlier checkpoints are unchanged."
    ) from error

  def _recover(self) -> ocp.CheckpointManager:
    """Replaces the manager, which may have further errors of a failed save."""
    self._close_manager()
    # Now that no thread of the save is left, nothing can be written any more.
    assert self._failed is not None
    orbax_workarounds.remove_unfinished(self._directory, self._failed)
    self._failed = None
    detached = self._unlock and self._unlock.detach()
    self.manager = self._create_manager()
    if detached:
      self._unlock = weakref.finalize(self.manager, detached[1])
    return self.manager

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

  def _close_manager(self) -> None:
    if self.manager is None:
      return
    # A failed save can have several errors, of which Orbax raises one a call.
    for _ in range(10):
      try:
        self.manager.close()
      except Exception as e:
        _log.info("%s: another error of a save: %s", self._directory, e)
      else:
        return
