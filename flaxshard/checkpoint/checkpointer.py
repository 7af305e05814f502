"""Saves and restores the checkpoints of a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import json
import logging
import math
import os
import time
import types
from typing import Any, TypeVar
import weakref

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp

from flaxshard.checkpoint import digests as digests_lib
from flaxshard.checkpoint import existing_step
from flaxshard.checkpoint import iterator_state
from flaxshard.checkpoint import locate
from flaxshard.checkpoint import metadata_item
from flaxshard.checkpoint import orbax_workarounds
from flaxshard.checkpoint import policies
from flaxshard.checkpoint import readable_steps
from flaxshard.checkpoint import restore_plan
from flaxshard.checkpoint import step as step_lib
from flaxshard.checkpoint import step_names
from flaxshard.core import checks
from flaxshard.core import directories
from flaxshard.core import multihost
from flaxshard.state.train_state import TrainState

_log = logging.getLogger(__name__)


# How often the steps are listed again if another program deletes one meanwhile,
# and the seconds that it may need for that.
_LIST_ATTEMPTS = 20
_DELETION_SECONDS = 0.1

_T = TypeVar("_T")


class SaveError(RuntimeError):
  """A checkpoint could not be written; the message names step and directory."""


class Checkpointer:
  """Saves and restores train states, with Orbax's `CheckpointManager`.

  Saves are asynchronous. Leaving the context waits for the last one, and so
  does the end of the program. From its first save until it is closed or
  deleted, no other program can save in the directory; others can restore.

  Args:
    directory: Path of the directory of the checkpoints, or of a workdir with
      such a directory `checkpoints`. If it is missing, the first save creates
      it. If it is the path of one step, only that step can be restored, and
      none can be saved.
    max_to_keep: Number of newest checkpoints to keep; None keeps all. Those
      with a non-finite metric do not count, and the newest one whose metrics
      are finite is always kept.
    keep_every: Also keep the checkpoints whose step is a multiple of this.
    best_metric: Also keep the checkpoints with the best value of this metric,
      which is given to `save`. A missing, None or non-finite value is worse
      than any number. Metrics without it, but with others, are an error.
    best_mode: `"max"` if higher values of the metric are better, or `"min"`.
    keep_best: Number of best checkpoints to keep.
    config: The training config, stored with every checkpoint. JSON must be able
      to hold its values.
    plain_item: Name of the item that a plain Flax program reads, `"default"` or
      `"state"`; the training checkpointer of Orbax v1 reads `"state"`.
    digests: Whether to store a crc32 of every file, which `restore` compares.
      Taking them reads every file once in the background. Without them, only
      the sizes of the files are stored and compared.

  Raises:
    TypeError: JSON cannot hold `config`, or an argument has a wrong type.
    ValueError: `directory` cannot be written, or an argument has a value that
      is not allowed.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax, tempfile
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.adam(0.1),
    ...     wrappers=[fs.LossScale("dynamic")])
    >>> with Checkpointer(tempfile.mkdtemp()) as checkpointer:
    ...   checkpointer.save(1, state)
    ...   state = checkpointer.restore(state)
    ...   checkpointer.latest_step()
    True
    1
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    *,
    max_to_keep: int | None = None,
    keep_every: int | None = None,
    best_metric: str | None = None,
    best_mode: str = "max",
    keep_best: int = 1,
    config: Mapping[str, Any] | None = None,
    plain_item: str = "default",
    digests: bool = True,
  ):
    if not isinstance(directory, (str, os.PathLike)):
      raise TypeError(f"directory must be a path, got {directory!r}.")
    step_lib.check_plain_item(plain_item)
    self._plain_item = plain_item
    self._digests = checks.boolean("digests", digests)
    policy = policies.create_policy(
      max_to_keep,
      keep_every=keep_every,
      best_metric=best_metric,
      best_mode=best_mode,
      keep_best=keep_best,
    )
    self._best = (best_metric, best_mode)
    try:
      json.dumps(config)
    except (TypeError, ValueError) as e:
      raise TypeError(f"config must have values JSON can hold: {e}.") from e
    self._config = config
    directories.check_writable("directory", os.fspath(directory), create=False)
    path = os.path.abspath(os.fspath(directory))
    # The number of the only step, if the path is that of one step.
    self._only_step = locate.step_of(path)
    if self._only_step is None:
      self.directory = os.fspath(locate.directory_of_steps(path))
    else:
      self.directory = os.path.dirname(path)
    self._policy = policies.KeepUndeletable(policy, self.directory)
    self._names = readable_steps.ReadableSteps()
    self._barrier = orbax_workarounds.SaveBarrier()
    self._damaged: set[int] = set()
    # None until the directory exists: Orbax's manager would create it.
    self._manager: ocp.CheckpointManager | None = None
    if multihost.any_process(os.path.isdir(self.directory)):
      self._open()
    self._restored_step: int | None = None
    self._saving: int | None = None  # the step of the save that may still run
    self._failed: int | None = None  # the step whose save failed last
    self._unlock: weakref.finalize[[], Any] | None = None
    self._closed = False

  def _open(self) -> ocp.CheckpointManager:
    """Returns the manager; creates it, and the directory, if there is none."""
    if self._manager is None:
      self._manager = self._retry(self._create_manager)
      self._note_damaged(self._manager)
    return self._manager

  def _reload(self, manager: ocp.CheckpointManager) -> None:
    """Lists the steps again, which another program may have changed."""
    self._retry(manager.reload)
    self._note_damaged(manager)

  def _retry(self, list_steps: Callable[[], _T]) -> _T:
    """Calls a function of Orbax that lists the steps and reads their metrics.

    It fails if another program deletes a step between the two.
    """
    for _ in range(_LIST_ATTEMPTS if jax.process_count() == 1 else 0):
      before = list(step_names.steps(self.directory))
      try:
        return list_steps()
      except (OSError, LookupError, ValueError):
        # The files of a step are deleted before its directory.
        time.sleep(_DELETION_SECONDS)
        if list(step_names.steps(self.directory)) == before:
          break
    return list_steps()

  def _create_manager(self) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=self._policy,
        step_name_format=self._names,
        async_options=ocp.options.AsyncOptions(
          barrier_sync_fn=self._barrier,
          # If they cannot be created in the background, Orbax's other threads
          # wait for them until a timeout, and so does the end of the program.
          create_directories_asynchronously=False,
        ),
      ),
      # A fresh process can only restore items whose handlers are named here.
      item_handlers={
        **step_lib.item_handlers(plain_item=self._plain_item),
        iterator_state.ITEM: grain.checkpoint.CheckpointHandler(),
        # The last handler: it digests the files that the others have written.
        digests_lib.ITEM: metadata_item.Handler(),
      },
    )

  def __enter__(self) -> Checkpointer:
    """Returns itself."""
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: types.TracebackType | None,
  ) -> None:
    """Closes the checkpointer; an error raised in the context comes first."""
    try:
      self.close()
    except SaveError as e:
      if error is None:
        raise
      _log.error("%s", e)

  def close(self) -> None:
    """Waits for the last save, and unlocks the directory.

    Raises:
      SaveError: The last save failed.
    """
    self._closed = True
    try:
      self.wait()
    finally:
      self._close_manager()
      if self._unlock is not None:
        self._unlock()
        self._unlock = None

  def _close_manager(self) -> None:
    if self._manager is None:
      return
    # A failed save can have several errors, of which Orbax raises one a call.
    for _ in range(10):
      try:
        self._manager.close()
      except Exception as e:
        _log.info("%s: another error of a save: %s", self.directory, e)
      else:
        return

  def latest_step(self) -> int | None:
    """Returns the last of `all_steps`, or None if there are none."""
    return max(self.all_steps(), default=None)

  def all_steps(self) -> Sequence[int]:
    """Returns the saved steps in ascending order.

    Checkpoints of `flax.training.checkpoints` are included; they are never
    deleted. Known damaged steps are not: empty directories, and steps that
    `restore` could not read.
    """
    return sorted(set(self._paths()) - self._damaged)

  @property
  def restored_step(self) -> int | None:
    """The step that `restore` read last, or None."""
    return self._restored_step

  def best_step(self) -> int | None:
    """Returns the step with the best `best_metric`, the latest of equal ones.

    Returns None if no step has a finite value, or without `best_metric`.
    """
    self.wait()
    steps = self.all_steps()
    if self._manager is None:
      return None
    ranks = {
      policies.rank(self._manager.metrics(step), *self._best): step
      for step in steps
    }
    ranks.pop(-math.inf, None)
    return ranks[max(ranks)] if ranks else None

  def wait(self) -> None:
    """Waits until the last save is on disk.

    Raises:
      SaveError: The save failed.
    """
    step, self._saving = self._saving, None
    if self._manager is None:
      return
    try:
      self._manager.wait_until_finished()
    except Exception as e:
      if step is None:
        raise
      if not self._is_saved(step, e):
        raise self._handle_failure(step, e) from e

  def _is_saved(self, step: int, error: Exception) -> bool:
    """Returns whether a save has only failed to delete an older step."""
    assert self._manager is not None
    # Orbax deletes older steps once the new one has its final name.
    if not (isinstance(error, OSError) and os.path.isdir(self._path(step))):
      return False
    if not self._policy.note_failure(error):
      return False
    self._manager.reload()  # it forgot the new step and the old ones
    return True

  def check(self) -> None:
    """Raises if a save has failed in the background; does not wait for a save.

    All processes must call it. It synchronizes them, so it is best called where
    the program waits for its devices.

    Raises:
      SaveError: The last save failed.
    """
    ended = (
      self._saving is not None
      and self._manager is not None
      and not self._manager.is_saving_in_progress()
    )
    # A save ends in all processes at about the same time.
    if multihost.any_process(ended):
      self.wait()

  def save(
    self,
    step: int,
    state: TrainState,
    data: iterator_state.Positioned | None = None,
    metrics: Mapping[str, Any] | None = None,
  ) -> bool:
    """Starts to save a state; does nothing if the step has been saved already.

    Directories of known damaged steps are first renamed, such as `300` to
    `300.damaged`, as Orbax saves no step before the latest it finds. Of several
    processes, all must call it.

    Args:
      step: Number of the step, usually the number of batches consumed.
      state: The state. It may be donated once this returns. If groups of
        replicas differ, the state of replica 0 is saved, and this is logged.
      data: The iterator whose position to save.
      metrics: Numbers to save by name, for `best_metric`.

    Returns:
      True, or False if the step has been saved already; that is logged.

    Raises:
      TypeError: A leaf of the state is not an array, `step` is not an integer,
        `data` has no position, or a metric is not a number.
      ValueError: A leaf of the state has no elements, a later step exists,
        the step was saved from a state with another tree or another
        `state.step`, the metrics lack `best_metric`, another program saves in
        the directory, or the checkpointer is closed.
      SaveError: This step, or the one before, could not be written. If a
        process fails in the background, all raise it.
    """
    if self._closed:
      raise ValueError(f"the Checkpointer of {self.directory} is closed.")
    if self._only_step is not None:
      raise ValueError(
        f"directory={self._path(self._only_step)!r} is one checkpoint, step "
        f"{self._only_step}: to save, open {self.directory!r}."
      )
    if isinstance(step, (np.ndarray, jax.Array)) and step.shape == ():
      step = step.item()  # such as `state.step`
    step = checks.integer("step", step, minimum=0)
    if self._manager is not None and os.path.isdir(self._path(step)):
      self._reload(self._manager)  # another checkpointer may have saved it
    saved_steps = self.all_steps()
    if saved_steps and step < saved_steps[-1] and step not in saved_steps:
      raise ValueError(
        f"step={step} cannot be saved in {self.directory}, which has step "
        f"{saved_steps[-1]}: restoring reads the latest step. Move later steps "
        "away, or use another directory."
      )
    state_items = step_lib.save_args(state, plain_item=self._plain_item)
    if step in saved_steps:
      with multihost.raise_on_all_processes(ValueError, SaveError):
        self.wait()
        existing_step.check_same(self._path(step), state, state_items)
      _log.info("step %d has been saved in %s already", step, self.directory)
      return False
    items: dict[str, Any] = dict(state_items.items())
    with multihost.raise_on_all_processes(TypeError, ValueError, SaveError):
      if data is not None:
        position = iterator_state.Position(data)
        items[iterator_state.ITEM] = grain.checkpoint.CheckpointSave(position)
      if metrics is not None:
        metrics = policies.to_json(metrics)
        policies.check_has(self._best[0], metrics)
        items[readable_steps.METRICS] = ocp.args.JsonSave(metrics)
      self.wait()
      # The other processes would wait for directories that process 0 cannot
      # create. With one process, Orbax itself raises at once.
      if jax.process_index() == 0 and self._manager is None:
        try:
          os.makedirs(self.directory, exist_ok=True)
        except OSError as e:
          raise self._handle_failure(step, e) from e
    manager = self._open()
    with multihost.raise_on_all_processes(ValueError, SaveError):
      self._lock(manager)
      if jax.process_index() == 0 and jax.process_count() > 1:
        try:
          directories.make_and_remove(self.directory)
        except OSError as e:
          raise self._handle_failure(step, e) from e
    if self._failed is not None:
      manager = self._recover()
    items[digests_lib.ITEM] = metadata_item.Save(
      metadata_item.metadata(state, step, tuple(items), self._config),
      self._digests,
    )
    self._rename_damaged(manager, step)
    self._barrier.start_save()
    orbax_workarounds.wait_at_exit(manager, step)
    try:
      manager.save(step, metrics=metrics, args=ocp.args.Composite(**items))
    except Exception as e:
      raise self._handle_failure(step, e) from e
    self._saving = step
    return True

  def _lock(self, manager: ocp.CheckpointManager) -> None:
    """Locks the directory until the checkpointer is closed or deleted."""
    if self._unlock is None:
      # The manager lives until its save has ended, even without a checkpointer.
      self._unlock = weakref.finalize(
        manager,
        directories.lock("directory", self.directory, reentrant=True),
      )

  def _handle_failure(self, step: int, error: Exception) -> SaveError:
    """Removes what was written of a step; returns the error to raise."""
    self._failed = step
    orbax_workarounds.remove_unfinished(self.directory, step)
    # Orbax forgot the steps that it was going to delete after this save.
    if self._manager is not None:
      with contextlib.suppress(OSError):  # the whole directory may be gone
        self._manager.reload()
    # TensorStore appends its whole configuration to the first line.
    reason, _, _ = multihost.summarize_error(error).partition(
      " [tensorstore_spec="
    )
    return SaveError(
      f"step {step} could not be saved in {self.directory}: {reason}\nThe "
      "state in memory and the earlier checkpoints are unchanged."
    )

  def _recover(self) -> ocp.CheckpointManager:
    """Replaces the manager, which may have further errors of a failed save."""
    self._close_manager()
    # Now that no thread of the save is left, nothing can be written any more.
    assert self._failed is not None
    orbax_workarounds.remove_unfinished(self.directory, self._failed)
    self._failed = None
    detached = self._unlock and self._unlock.detach()
    self._manager = self._create_manager()
    if detached:
      self._unlock = weakref.finalize(self._manager, detached[1])
    return self._manager

  def _note_damaged(self, manager: ocp.CheckpointManager) -> None:
    """Notes the steps whose damage is visible without reading them."""
    self._damaged |= self._names.left_out | {
      step
      for step in manager.all_steps()
      if digests_lib.is_empty(self._path(step))
    }

  def _rename_damaged(
    self, manager: ocp.CheckpointManager, new_step: int
  ) -> None:
    """Renames the directories of damaged steps; nothing is deleted.

    One that cannot be renamed stays if it is older than the step to save.
    """
    if not self._damaged:
      return
    # No process may still read a directory that process 0 renames.
    ocp.multihost.sync_global_processes("flaxshard:before_rename_damaged")
    with multihost.raise_on_all_processes(SaveError):
      if jax.process_index() == 0:
        for step in sorted(self._damaged - self._policy.undeletable):
          self._set_aside(step, new_step)
    manager.reload()
    # Flax's checkpoints have other names, which Orbax does not find.
    self._damaged &= {
      *step_names.steps(self.directory, step_names.FLAX),
      *(step for step in self._damaged if os.path.lexists(self._path(step))),
    }

  def _set_aside(self, step: int, new_step: int) -> None:
    """Renames the directory of a damaged step."""
    path = self._path(step)
    if not os.path.lexists(path):
      return
    try:
      new_path = digests_lib.set_aside(path)
    except OSError as e:
      if step >= new_step:
        raise self._handle_failure(new_step, e) from e
      self._policy.keep(step, e.strerror or str(e))
    else:
      _log.warning("%s is damaged: renamed to %s", path, new_path)

  def _path(self, step: int) -> str:
    return os.path.join(self.directory, str(step))

  def _paths(self) -> dict[int, str]:
    """Returns the path of each step, the damaged ones included."""
    if self._manager is None:
      # Creating the manager synchronizes the processes.
      if jax.process_count() > 1 or not os.path.isdir(self.directory):
        return {}
    manager = self._open()
    # From its first save on, no other program can save in the directory.
    if self._unlock is None and jax.process_count() == 1:
      known = {*manager.all_steps(), *self._damaged}
      if not step_names.steps(self.directory, step_names.OURS).keys() <= known:
        self._reload(manager)
    flax = step_names.steps(self.directory, step_names.FLAX)
    ours = {*manager.all_steps(), *(self._damaged - set(flax))}
    paths = {step: str(path) for step, path in flax.items()} | {
      step: self._path(step) for step in ours
    }
    if self._only_step is None:
      return paths
    return {n: path for n, path in paths.items() if n == self._only_step}

  def restore(
    self,
    state: TrainState,
    step: int | None = None,
    data: iterator_state.Positioned | None = None,
  ) -> TrainState:
    """Restores a checkpoint into the structure and shardings of `state`.

    A damaged step, with a file that differs from the one that was saved, is
    passed over with a warning in the log: the step before it is restored.
    `restored_step` says which one was.

    A wrapper that the checkpoint lacks keeps its state from `state`, or has its
    first state if `state` is abstract. A wrapper with `restart` starts from the
    restored parameters, also if the checkpoint is for another number of
    replicas: then the values of each replica are dropped, with a warning. The
    state of a wrapper that `state` lacks stays on disk. The log says all of
    that.

    Args:
      state: A state of the same model and optimizer, with the shardings to
        restore into. With `jax.ShapeDtypeStruct`s for arrays (see
        `create_train_state(..., abstract=True)`) only one state is in memory.
      step: The step to restore; None is the latest that is not damaged.
      data: An iterator to set to the position that was saved with the state.

    Returns:
      The restored state, with arrays for all leaves. A per-replica collection
      was saved as one (see `TrainState.without_wrappers`); all replicas get it.

    Raises:
      TypeError: `state` is not a `TrainState`.
      ValueError: There is no such checkpoint, `step` or every step is damaged,
        the checkpoint has no position of the data, or its tree differs from
        `state`. The message names the file, or the first path that differs.
        Nothing on disk is changed.
    """
    restore_plan.check_state(state)
    self.wait()

    def list_steps() -> dict[int, str]:
      if self._manager is not None and self._unlock is None:
        self._reload(self._manager)
      return self._paths()

    def restore_step(number: int, where: str) -> TrainState:
      try:
        return self._restore(state, number, where, data)
      except digests_lib.Damaged:
        self._damaged.add(number)
        raise

    self._restored_step, restored = step_lib.read_newest(
      self.directory, list_steps, step, restore_step
    )
    return restored

  def _restore(
    self,
    state: TrainState,
    step: int,
    where: str,
    data: iterator_state.Positioned | None,
  ) -> TrainState:
    """Restores the state, then sets the data, if it is given."""
    plan = restore_plan.open_step(where).plan(state)
    if data is None:
      return plan.restore()
    if not os.path.isdir(os.path.join(where, iterator_state.ITEM)):
      raise ValueError(
        f"{where} has no {iterator_state.ITEM}: the position of the data."
      )
    position = iterator_state.Position(data)
    args = ocp.args.Composite(
      **{iterator_state.ITEM: grain.checkpoint.CheckpointRestore(position)}
    )
    restored = plan.restore()
    self._open().restore(step, args=args)
    # Not before: a damaged step must leave the data where it is.
    position.apply()
    return restored
