"""Saves and restores the checkpoints of a training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import logging
import operator
import os
import types
from typing import Any

import orbax.checkpoint as ocp

from flaxshard.checkpoint import choose
from flaxshard.checkpoint import items as items_lib
from flaxshard.checkpoint import positions
from flaxshard.checkpoint import restoring
from flaxshard.checkpoint import saving
from flaxshard.checkpoint import steps
from flaxshard.checkpoint.positions import Positioned
from flaxshard.checkpoint.restoring import S
from flaxshard.checkpoint.saving import SaveError
from flaxshard.core import checks
from flaxshard.core import files as files_lib
from flaxshard.core import multihost
from flaxshard.partitioning import compile_only

_log = logging.getLogger(__name__)


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
    path = files_lib.absolute(directory)
    items_lib.check_plain_item(plain_item)
    self._plain_item = plain_item
    self._keep = choose.Keep(
      max_to_keep, keep_every, best_metric, best_mode, keep_best
    )
    try:
      json.dumps(config)
    except (TypeError, ValueError) as e:
      raise TypeError(f"config must have values JSON can hold: {e}.") from e
    self._config = config
    files_lib.check_writable("directory", path, create=False)
    if steps.number_of(path) is not None:
      raise ValueError(
        f"directory={path!r} is one checkpoint: flaxshard.checkpoint.restore "
        "reads it."
      )
    self.directory = os.fspath(steps.directory_of_steps(path))
    checks.one_of("digests", digests, (True, False))
    self._saver = saving.Saver(
      self.directory,
      self._keep,
      self._item_handlers,
      digests and not files_lib.is_bucket(self.directory),
    )
    self._restored_step: int | None = None
    self._closed = False

  def _item_handlers(self) -> dict[str, ocp.CheckpointHandler]:
    # A fresh process can only restore items whose handlers are named here.
    return {
      **items_lib.item_handlers(plain_item=self._plain_item),
      steps.POSITION: ocp.JsonCheckpointHandler(),
      steps.FLAXSHARD: ocp.JsonCheckpointHandler(),
    }

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
    self._saver.close()

  def latest_step(self) -> int | None:
    """Returns the last of `all_steps`, or None if there are none."""
    return max(self.all_steps(), default=None)

  def all_steps(self) -> Sequence[int]:
    """Returns the saved steps in ascending order.

    Checkpoints of `flax.training.checkpoints` are included; they are never
    deleted. Known damaged steps are not: empty directories, and steps that
    `restore` could not read.
    """
    found = self._saver.paths()  # first: it notes damaged steps
    return sorted(found.keys() - self._saver.damaged)

  @property
  def restored_step(self) -> int | None:
    """The step that `restore` read last, or None."""
    return self._restored_step

  def best_step(self) -> int | None:
    """Returns the step with the best `best_metric`, the latest of equal ones.

    Returns None if no step has a finite value, or without `best_metric`.
    """
    self.wait()
    damaged = self._saver.damaged
    return choose.best_step(self.directory, self._keep, damaged)

  def wait(self) -> None:
    """Waits until the last save is on disk.

    Raises:
      SaveError: The save failed.
    """
    self._saver.wait()

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
    self._saver.check(local=local)

  def save(
    self,
    step: int,
    state: items_lib.States,
    data: Positioned | None = None,
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
      data: The iterator whose position to save. If its attribute
        `position_is_global` is True, as for `flaxshard.data.train_iterator`,
        any number of processes can restore the position.
      metrics: Numbers to save by name, for `best_metric`.

    Returns:
      True, or False if the step has been saved already; that is logged.

    Raises:
      TypeError: A leaf of the state is not an array, `step` is not an integer,
        or a position or a metric has another type than is allowed.
      ValueError: A leaf of the state has no elements, a later step exists,
        the step was saved from a state with another tree or another
        `state.step`, the metrics lack `best_metric`, another program saves in
        the directory, the position of `data` is said to be global but differs
        between processes, or the checkpointer is closed.
      SaveError: This step, or the one before, could not be written. If a
        process fails in the background, all raise it.
    """
    if self._closed:
      raise ValueError(f"the Checkpointer of {self.directory} is closed.")
    # An array too, such as `state.step`.
    step = checks.integer("step", operator.index(step), minimum=0)
    path = os.path.join(self.directory, str(step))
    if steps.is_complete(path):
      self._saver.reload()  # another checkpointer may have saved it
    there = self.all_steps()
    if there and step < there[-1] and step not in there:
      raise ValueError(
        f"step={step} cannot be saved in {self.directory}, which has step "
        f"{there[-1]}: restoring reads the latest step. Move later steps "
        "away, or use another directory."
      )
    composite = items_lib.save_args(state, plain_item=self._plain_item)
    if step in there:
      with multihost.raise_on_all_processes(ValueError, SaveError):
        self.wait()
        items_lib.check_same(path, state, composite)
      _log.info("step %d has been saved in %s already", step, self.directory)
      return False
    items: dict[str, Any] = dict(composite.items())
    if metrics is not None:
      with multihost.raise_on_all_processes(TypeError, ValueError):
        metrics = self._keep.check(metrics)
      items[steps.METRICS] = ocp.args.JsonSave(metrics)
    files: dict[str, bytes] = {}
    if data is not None:
      files = positions.files(data)
      # With an item, programs without Grain know what the files are.
      items[steps.POSITION] = ocp.args.JsonSave({"processes": len(files)})
    metadata = items_lib.metadata(state, step, tuple(items), self._config)
    items[steps.FLAXSHARD] = ocp.args.JsonSave(metadata)
    self._saver.save(step, items, metrics, files)
    return True

  def restore(
    self, state: S, step: int | None = None, data: Positioned | None = None
  ) -> S:
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
      data: An iterator to set to the position that was saved with the state.

    Returns:
      The restored state, with arrays for all leaves. A per-replica collection
      was saved as one (see `TrainState.without_wrappers`); all replicas get it.

    Raises:
      TypeError: `state` is not a `TrainState`.
      ValueError: There is no such checkpoint, `step` or every step is damaged,
        the checkpoint has no position of the data, or that of another number
        of processes (see `save`), or its tree differs from `state`. The message
        names the file, or the first path that differs. Nothing on disk is
        changed.
    """
    items_lib.check_state(state)
    compile_only.check_can_hold("restore: state", state)
    self.wait()

    self._restored_step, restored = choose.read_newest(
      self.directory,
      step,
      lambda path: restoring.restore_step(path, state, data=data),
      self._saver.paths,
      self._saver.damaged,
    )
    return restored
