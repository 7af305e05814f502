"""Saves and restores the checkpoints of a training run."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
import functools
import json
import logging
import os
import shutil
import time
from typing import Any, NoReturn
import weakref

import jax
import numpy as np
import orbax.checkpoint as ocp

from flaxshard.checkpoint import items as items_lib
from flaxshard.checkpoint import keep as keep_lib
from flaxshard.checkpoint import restoring
from flaxshard.checkpoint import step_files
from flaxshard.checkpoint import steps
from flaxshard.checkpoint.restoring import S
from flaxshard.checkpoint.save_barrier import SaveBarrier
from flaxshard.core import checks
from flaxshard.core import files as files_lib
from flaxshard.core import multihost
from flaxshard.core import registry

_log = logging.getLogger(__name__)


class SaveError(RuntimeError):
  """A checkpoint could not be written; the message names step and directory."""


class Checkpointer:
  """Saves and restores train states, with Orbax's `CheckpointManager`.

  Saves are asynchronous. Leaving the context waits for the last one; a program
  that ends without that, or without `wait`, loses it. From its first save until
  it is closed or deleted, no other program can save in the directory; others
  can restore.

  Args:
    directory: Path of the directory of the checkpoints, or of a workdir with
      such a directory `checkpoints`, on a file system or in a bucket,
      `gs://bucket/run`, which is not locked. If it is missing, the first save
      creates it.
    max_to_keep: Number of newest checkpoints to keep; None keeps all. Those
      with a non-finite metric do not count, so a run that diverges has up to
      twice as many. The newest one whose metrics are finite is kept besides.
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
      the sizes of the files are stored and compared, as in a bucket.

  Attributes:
    directory: Path of the directory of the checkpoints.
    restored_step: The step that `restore` read last, or None.

  Raises:
    TypeError: JSON cannot hold `config`, or an argument has a wrong type.
    ValueError: `directory` cannot be written, or an argument has a value that
      is not allowed.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax, tempfile
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.adam(0.1),
    ...     wrappers=[fs.LossScale("dynamic")])
    >>> with fs.Checkpointer(tempfile.mkdtemp()) as checkpointer:
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
    path = steps.as_path(directory)
    checks.one_of("plain_item", plain_item, items_lib.PLAIN_ITEMS)
    self._plain_item = plain_item
    self._keep = keep_lib.Keep(
      max_to_keep, keep_every, best_metric, best_mode, keep_best
    )
    with registry.errors_name("config"):
      # A copy, which the caller does not change before it is saved.
      self._config = json.loads(json.dumps(config))
    files_lib.check_writable("directory", os.fspath(path), create=False)
    if steps.number_of(path) is not None:
      raise ValueError(
        f"directory={os.fspath(path)!r} is one checkpoint: "
        "flaxshard.checkpoint.restore reads it."
      )
    self._path = steps.directory_of_steps(path)
    self.directory = os.fspath(self._path)
    self._digests = digests and not files_lib.is_bucket(self.directory)
    # Created by the first save: it would create the directory.
    self._manager: ocp.CheckpointManager | None = None
    self._unlock: weakref.finalize[[], Any] | None = None
    self._barrier = SaveBarrier()
    # The step that may still be saved.
    self._saving: int | None = None
    # Steps that could not be restored. The next save renames them, as Orbax
    # saves no step before the latest that it finds.
    self._damaged: set[int] = set()
    # Steps of Flax, which are never renamed nor deleted.
    self._others: dict[int, Any] = {}
    self.restored_step: int | None = None
    self._closed = False
    _checkpointers.add(self)

  def __enter__(self) -> Checkpointer:
    """Returns itself."""
    return self

  def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
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

  def latest_step(self) -> int | None:
    """Returns the last of `all_steps`, or None if there are none."""
    return max(self.all_steps(), default=None)

  def all_steps(self) -> Sequence[int]:
    """Returns the saved steps in ascending order.

    Checkpoints of `flax.training.checkpoints` are included; they are never
    deleted. Known damaged steps are not: empty directories, and steps that
    `restore` could not read.
    """
    found = self._paths()  # first: it notes damaged steps
    return sorted(found.keys() - self._damaged)

  def _paths(self) -> dict[int, Any]:
    """Returns the path of each step, also of damaged ones; notes those."""
    if self._manager is None:
      found, damaged = steps.look(self._path)
      self._damaged.intersection_update(found)
      self._damaged.update(damaged)
      return found
    # No other program saves here now.
    saved = self._manager.all_steps()
    return self._others | {n: self._path / str(n) for n in saved}

  def best_step(self) -> int | None:
    """Returns the step with the best `best_metric`, the latest of equal ones.

    Returns None if no step has a finite value, or without `best_metric`.
    """
    self.wait()
    return keep_lib.best_step(self._path, self._keep, self._damaged)

  def wait(self) -> None:
    """Waits until the last save is on disk.

    Raises:
      SaveError: The save failed.
    """
    step = self._saving
    if self._manager is None or step is None:
      return
    try:
      self._manager.wait_until_finished()
    except Exception as e:
      # Orbax deletes older steps once the new one has its final name.
      if step not in steps.find(self._path, steps.OURS):
        self._fail(step, e)
      _log.warning("%s: an old step was not deleted: %s", self.directory, e)
      self._manager.reload()  # it forgot the new step and the old ones
    self._saving = None

  def check(self, *, local: bool = False) -> None:
    """Raises if a save has failed in the background; does not wait for a save.

    All processes must call it. It synchronizes them, so it is best called where
    the program waits for its devices.

    Args:
      local: Do not synchronize the processes. A save that fails in one process
        fails in all, but they may then raise in different calls: only for a
        program that ends in all processes when it ends in one.

    Raises:
      SaveError: The last save failed.
    """
    manager = self._manager if self._saving is not None else None
    ended = manager is not None and not manager.is_saving_in_progress()
    # A save ends in all processes at about the same time. Waiting for the end
    # of it joins a thread, and needs no other process.
    if ended if local else any(multihost.exchange(ended)):
      self.wait()

  def save(
    self,
    step: int,
    state: items_lib.States,
    data: Any = None,
    metrics: Mapping[str, Any] | None = None,
  ) -> bool:
    """Starts to save a state; does nothing if the step has been saved already.

    Directories of known damaged steps are first renamed, such as `300` to
    `300.damaged`, as Orbax saves no step before the latest it finds. Of several
    processes, all must call it.

    Args:
      step: Number of the step, usually the number of batches consumed.
      state: The state, or a dict of states by name, such as the two of a GAN.
        It may be donated once this returns. If groups of replicas differ, the
        state of replica 0 is saved, and this is logged.
      data: The iterator whose position to save, such as Grain's: its method
        `get_state` returns bytes or a value for JSON. If its attribute
        `position_is_global` is True, as for `flaxshard.data.train_iterator`,
        the position is the same in all processes, and any number of them can
        restore it.
      metrics: Numbers to save by name, for `best_metric`.

    Returns:
      True, or False if the step has been saved already; that is logged.

    Raises:
      TypeError: A leaf of the state is not an array, `step` is not an integer,
        or a position or a metric has another type than is allowed.
      ValueError: A leaf of the state has no elements, two leaves differ in dots
        of their path alone, a later step exists, the step was saved from a
        state with another tree or another `state.step`, the metrics lack
        `best_metric`, another program saves in the directory, the position of
        `data` is said to be global but differs between processes, or the
        checkpointer is closed.
      SaveError: This step, or the one before, could not be written. If a
        process fails in the background, all raise it.
    """
    if self._closed:
      raise ValueError(f"the Checkpointer of {self.directory} is closed.")
    # An array too, such as `state.step`.
    step = checks.integer("step", np.asarray(step).item(), minimum=0)
    there = self.all_steps()
    if there and step < there[-1] and step not in there:
      raise ValueError(
        f"step={step} cannot be saved in {self.directory}, which has step "
        f"{there[-1]}: restoring reads the latest step. Use another "
        "directory, or close the Checkpointer and move later steps away."
      )
    composite = items_lib.save_args(state, plain_item=self._plain_item)
    if step in there:
      with multihost.raise_on_all_processes(ValueError, SaveError):
        self.wait()
        restoring.check_same(self._paths()[step], state)
      _log.info("step %d has been saved in %s already", step, self.directory)
      return False
    items: dict[str, Any] = dict(composite.items())
    if metrics is not None:
      with multihost.raise_on_all_processes(TypeError, ValueError):
        metrics = self._keep.check(metrics)
      items[step_files.METRICS] = ocp.args.JsonSave(metrics)
    if data is not None:
      position = items_lib.position_of(data)
      items[step_files.POSITION] = ocp.args.JsonSave(position)
    metadata = items_lib.metadata(state, step, self._config)
    items[step_files.FLAXSHARD] = ocp.args.JsonSave(metadata)
    manager = self._open_manager(step)
    self._barrier.start_save()
    self._saving = step
    try:
      manager.save(step, metrics=metrics, args=ocp.args.Composite(**items))
    except Exception as e:
      self._fail(step, e)
    return True

  def _open_manager(self, step: int) -> ocp.CheckpointManager:
    """Locks the directory, and returns its manager, in order to save a step.

    Renames damaged steps. As all of `save`, all processes do it together.
    """
    try:
      with multihost.raise_on_all_processes(ValueError, OSError, SaveError):
        self.wait()
        if self._unlock is None and jax.process_index() == 0:
          self._path.mkdir(parents=True, exist_ok=True)
          unlock = files_lib.lock("directory", self.directory, reentrant=True)
          self._unlock = weakref.finalize(self, unlock)
        # Of this process: its manager would not know the steps of this one.
        for other in {*_checkpointers} - {self}:
          if other.directory == self.directory:
            other.wait()
            other._close_manager()
      manager = self._manager
      if manager is not None and self._damaged.isdisjoint(manager.all_steps()):
        return manager
      self._close_manager()  # it has a list of the steps
      # All processes are here: none reads a step that process 0 renames.
      with multihost.raise_on_all_processes(OSError):
        found = self._paths() if jax.process_index() == 0 else {}
        for number in self._damaged & found.keys():
          path = found[number]
          if path.name == str(number):  # not of Flax
            path.rename(path.with_name(f"{path.name}.damaged"))
            _log.warning("%s is damaged: renamed to %s.damaged", path, path)
      found = steps.find(self._path, steps.OURS)
      self._others = {n: p for n, p in found.items() if p.name != str(n)}
      self._damaged.intersection_update(self._others)
      self._manager = ocp.CheckpointManager(
        self.directory,
        options=ocp.CheckpointManagerOptions(
          preservation_policy=self._keep,
          async_options=ocp.options.AsyncOptions(
            barrier_sync_fn=self._barrier,
            # It keeps this object, and with it the lock, until the save ends.
            post_finalization_callback=self._write_digests,
            # If they cannot be created in the background, Orbax's other threads
            # wait for them until a timeout, and so does the end of the program.
            create_directories_asynchronously=False,
          ),
        ),
      )
    except SaveError:
      self._close_manager()  # in all processes
      raise
    except OSError as e:
      self._fail(step, e)
    return self._manager

  def _write_digests(self) -> None:
    """Writes the last file of a step, in process 0, before it has its name."""
    assert self._saving is not None
    step_dir = step_files.unfinished(self._path, self._saving)
    step_files.write_digests(step_dir, contents=self._digests)

  def _fail(self, step: int, error: Exception) -> NoReturn:
    """Removes what was written of a step, and raises a SaveError."""
    self._close_manager()
    # In a bucket it is no step without its last file.
    if jax.process_index() == 0 and not files_lib.is_bucket(self.directory):
      path = step_files.unfinished(self._path, step)
      # TensorStore finishes the writes it has begun after one has failed.
      for _ in range(50):
        shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.01)
        if not path.exists():
          break
    # TensorStore appends its whole configuration to the first line.
    reason, _, _ = multihost.summarize_error(error).partition(" [tensorstore_")
    raise SaveError(
      f"step {step} could not be saved in {self.directory}: {reason}\nThe "
      "state in memory and the earlier checkpoints are unchanged."
    ) from error

  def _close_manager(self) -> None:
    manager, self._manager, self._saving = self._manager, None, None
    if manager is None:
      return
    # A failed save can have several errors, of which Orbax raises one a call.
    for _ in range(10):
      try:
        return manager.close()
      except Exception as e:
        _log.info("%s: another error of a save: %s", self.directory, e)

  def restore(self, state: S, step: int | None = None, data: Any = None) -> S:
    """Restores a checkpoint into the structure and shardings of `state`.

    A damaged step, with a file that differs from the one that was saved, is
    passed over with a warning in the log: the step before it is restored.
    `restored_step` says which one was.

    A wrapper that the checkpoint lacks has its first state. A wrapper with
    `restart` starts from the restored parameters, also if the checkpoint is for
    another number of replicas: then the values of each replica are dropped,
    with a warning. The state of a wrapper that `state` lacks stays on disk. The
    log says all of that.

    Args:
      state: A state of the same model and optimizer, with the shardings to
        restore into. With `jax.ShapeDtypeStruct`s for arrays (see
        `create_train_state(..., abstract=True)`) only one state is in memory.
        Or a dict of some of the states that were saved as a dict.
      step: The step to restore; None is the latest that is not damaged.
      data: An iterator to set to the position that was saved with the state,
        with its method `set_state`.

    Returns:
      The restored state, with arrays for all leaves.

    Raises:
      TypeError: `state` is not a `TrainState`.
      ValueError: There is no such checkpoint, `step` or every step is damaged,
        the checkpoint has no position of the data, or that of another number
        of processes (see `save`), or its tree differs from `state`. The message
        names the file, or the first path that differs. Nothing on disk is
        changed.
    """
    items_lib.check_state(state)
    self.wait()
    read = functools.partial(restoring.restore_step, state=state, data=data)
    self.restored_step, restored = steps.read_newest(
      self._path, step, read, self._paths, self._damaged
    )
    return restored


# A checkpointer lives at least as long as its save: Orbax's thread has it.
_checkpointers: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


@atexit.register
def _finish_saves() -> None:
  """Says at the end of the program if the last save did not reach the disk.

  Python has then closed the thread pools with which Orbax would finish it.
  """
  for checkpointer in list(_checkpointers):
    try:
      checkpointer.wait()
    except SaveError as e:
      _log.error(
        "the last checkpoint is lost: %s\nA program waits for its last save if "
        "it leaves the `with` block of the Checkpointer, or calls `wait`.",
        e,
      )
