"""Checkpoints of a training, over Orbax's `CheckpointManager`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import json
import logging
import math
import os
import socket
import types
from typing import Any
import weakref

import grain
import jax
import orbax.checkpoint as ocp

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import iterator_state
from flaxshard.checkpoint import metadata_item
from flaxshard.checkpoint import pending_saves
from flaxshard.checkpoint import policies
from flaxshard.checkpoint import reader
from flaxshard.checkpoint import restore_plan
from flaxshard.checkpoint import save_barrier
from flaxshard.checkpoint import step as step_lib
from flaxshard.checkpoint import step_names
from flaxshard.core import lock
from flaxshard.core import multihost
from flaxshard.state.train_state import TrainState

_log = logging.getLogger(__name__)

_DATA = "input_iterator"


class Checkpointer:
  """Saves and restores train states, over Orbax's `CheckpointManager`.

  Saves are asynchronous; leaving the context, or the program, waits for the
  last one. From its first save until it is closed, or gone, no other process
  can save in the directory; all can restore.

  Args:
    directory: Where the checkpoints lie; made if it does not exist.
    max_to_keep: How many of the newest to keep; None keeps all.
    keep_every: Keep those at multiples of so many steps, too.
    best_metric: Keep those, too, that are the best by a metric that is given to
      `save`. One that is missing, None or not finite is worse than any number.
    best_mode: `"max"`, or `"min"` where a lower metric is better.
    keep_best: How many of the best to keep.
    config: The training config, for every checkpoint to say: what JSON holds.
    plain_item: What the item that a plain Flax program reads is called;
      `"state"` is what a training checkpointer of Orbax v1 looks for.

  Raises:
    TypeError: JSON cannot hold `config`.
    ValueError: `directory` cannot be written, or an argument about what to keep
      has a value that is not allowed.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax, tempfile
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.adam(0.1),
    ...     wrappers=[fs.LossScale("dynamic")])
    >>> with Checkpointer(tempfile.mkdtemp()) as checkpointer:
    ...   checkpointer.save(1, state)
    ...   state = checkpointer.restore(state)
    ...   checkpointer.latest_step()
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
  ):
    step_lib.check_plain_item(plain_item)
    self._plain_item = plain_item
    policy = policies.policy(
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
      raise TypeError(f"config must be what JSON can hold: {e}.") from e
    self._config = config
    check_writable("directory", os.fspath(directory))
    self.directory = os.path.abspath(os.fspath(directory))
    self._names = step_names.Readable()
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=policy,
        step_name_format=self._names,
        async_options=ocp.options.AsyncOptions(
          barrier_sync_fn=save_barrier.create()
        ),
      ),
      # Named here, or a fresh process could not restore them.
      item_handlers={
        **step_lib.item_handlers(plain_item=plain_item),
        _DATA: grain.checkpoint.CheckpointHandler(),
        # The last one: it digests what the others have written.
        digests.ITEM: metadata_item.Handler(),
      },
    )
    self._damaged: set[int] = set()
    self._note_damaged()
    self._restored_step: int | None = None
    self._saving: int | None = None
    self._unlock: Callable[[], Any] | None = None

  def __enter__(self) -> Checkpointer:
    """Returns itself."""
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: types.TracebackType | None,
  ) -> None:
    """Does `close`; of two errors, the one that came first is raised."""
    try:
      self.close()
    except pending_saves.SaveError as e:
      if error is None:
        raise
      _log.error("%s", e)

  def close(self) -> None:
    """Waits for the last save, and lets others save in the directory.

    Raises:
      SaveError: It failed.
    """
    try:
      self.wait()
    finally:
      self._manager.close()
      if self._unlock is not None:
        self._unlock()
        self._unlock = None

  def latest_step(self) -> int | None:
    """Returns the newest of `all_steps`, or None."""
    return max(self.all_steps(), default=None)

  def all_steps(self) -> Sequence[int]:
    """Returns the steps that were saved, in ascending order.

    Those of `flax.training.checkpoints` are among them, and stay, whatever is
    to be kept. Not among them are those that are known to be damaged: empty
    directories, and what `restore` could not read.
    """
    return sorted(set(self._there()) - self._damaged)

  @property
  def restored_step(self) -> int | None:
    """The step that `restore` read last, or None."""
    return self._restored_step

  def best_step(self) -> int | None:
    """Returns the step whose `best_metric` is best, the latest of equal ones.

    None where no step has such a number, or there is no `best_metric`.
    """
    self.wait()
    ranks = {
      policies.rank(self._manager.metrics(step), *self._best): step
      for step in self.all_steps()
    }
    ranks.pop(-math.inf, None)
    return ranks[max(ranks)] if ranks else None

  def wait(self) -> None:
    """Waits until what was saved is on disk.

    Raises:
      SaveError: It could not be written.
    """
    step, self._saving = self._saving, None
    try:
      self._manager.wait_until_finished()
    except Exception as e:
      if step is None:
        raise
      raise pending_saves.failed(self.directory, step, e) from e

  def check(self) -> None:
    """Raises if a save has failed in the background; waits for none.

    Of several processes all must call it, and all raise; they wait for each
    other, so it is best called where the program waits for its devices.

    Raises:
      SaveError: The last save could not be written.
    """
    ended = self._saving is not None and (
      not self._manager.is_saving_in_progress()
    )
    # Saves end in all processes together: another's ends in no time.
    if multihost.any_process(ended):
      self.wait()

  def save(
    self,
    step: int,
    state: TrainState,
    data: iterator_state.Positioned | None = None,
    metrics: Mapping[str, Any] | None = None,
  ) -> None:
    """Saves a state; a step that is there already is left as it is.

    The directories of steps that are known to be damaged are renamed first, to
    `300.damaged`, as Orbax saves no step below one that it sees.

    Args:
      step: The number to save under: usually the batches consumed.
      state: The state. It may be donated as soon as this returns. Of groups of
        replicas that differ, what replica 0 has is saved, and the log says so.
      data: The iterator to save the position of.
      metrics: Numbers to save with it, by name, for `best_metric`.

    Raises:
      TypeError: A leaf of the state is not an array, `data` cannot tell where
        it stands, or a metric is no number.
      ValueError: A leaf of the state has no elements, there is a checkpoint of
        a later step, or another process saves in the directory.
      SaveError: This step, or the one before, could not be written.
    """
    if os.path.isdir(self._path(step)):
      self._manager.reload()  # another checkpointer may have saved it
      self._note_damaged()
    there = self.all_steps()
    if step in there:
      return
    if there and step < there[-1]:
      raise ValueError(
        f"step={step} cannot be saved in {self.directory}, which has step "
        f"{there[-1]}: restoring takes the latest. Move later steps away, or "
        "take another directory."
      )
    state_items = step_lib.save_args(state, plain_item=self._plain_item)
    own: dict[str, Any] = {}
    with multihost.raise_on_all_processes(
      TypeError, ValueError, pending_saves.SaveError
    ):
      if data is not None:
        position = iterator_state.Position(data)
        own[_DATA] = grain.checkpoint.CheckpointSave(position)
      if metrics is not None:
        metrics = policies.as_json(metrics)
        own[step_names.METRICS] = ocp.args.JsonSave(metrics)
      self.wait()
      if self._unlock is None:
        unlock = lock.acquire("directory", self.directory, again=True)
        self._unlock = weakref.finalize(self._manager, unlock)
      self._probe(step)
    items = {**dict(state_items.items()), **own}
    items[digests.ITEM] = metadata_item.Save(
      metadata_item.metadata(state, step, tuple(items), self._config)
    )
    self._set_damaged_aside()
    pending_saves.expect(self._manager, step)
    try:
      self._manager.save(
        step, metrics=metrics, args=ocp.args.Composite(**items)
      )
    except Exception as e:
      raise pending_saves.failed(self.directory, step, e) from e
    self._saving = step

  def _probe(self, step: int) -> None:
    """Raises where no directory can be made; process 0 makes all of them.

    Orbax makes them in the background. Where it cannot, its other threads wait
    for them for 20 minutes, and so does the end of the program.
    """
    if jax.process_index() == 0:
      try:
        _make_and_remove(self.directory)
      except OSError as e:
        raise pending_saves.failed(self.directory, step, e) from e

  def _note_damaged(self) -> None:
    """Notes the steps that are seen to be damaged, without reading them."""
    self._damaged |= self._names.left_out | {
      step
      for step in self._manager.all_steps()
      if digests.is_empty(self._path(step))
    }

  def _set_damaged_aside(self) -> None:
    """Renames the directories of damaged steps: nothing is deleted."""
    if not self._damaged:
      return
    ocp.multihost.sync_global_processes("flaxshard:damaged")
    if jax.process_index() == 0:
      for step in sorted(self._damaged):
        if os.path.isdir(self._path(step)):
          aside = digests.set_aside(self._path(step))
          _log.warning("%s is damaged: now %s", self._path(step), aside)
    ocp.multihost.sync_global_processes("flaxshard:damaged_aside")
    self._manager.reload()
    # Flax's own are in nobody's way.
    self._damaged &= set(reader.steps(self.directory, reader.FLAX))

  def _path(self, step: int) -> str:
    return os.path.join(self.directory, str(step))

  def _there(self) -> dict[int, str]:
    """Returns where the steps lie, the damaged ones too."""
    flax = reader.steps(self.directory, reader.FLAX)
    mine = {*self._manager.all_steps(), *(self._damaged - set(flax))}
    return {step: str(path) for step, path in flax.items()} | {
      step: self._path(step) for step in mine
    }

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
    first state if `state` is abstract. A wrapper with `restart`, such as `AGN`,
    starts from the restored parameters, also if the checkpoint is for another
    number of replicas: then the replicas' own values are dropped, with a
    warning. The state of a wrapper that `state` lacks stays on disk. The log
    says all of that.

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
    step_lib.check_state(state)
    self.wait()
    there = self._there()

    def restore_step(number: int) -> TrainState:
      try:
        return self._restore(state, number, there[number], data)
      except digests.Damaged:
        self._damaged.add(number)
        raise

    self._restored_step, restored = step_lib.read_newest(
      self.directory, there, step, restore_step
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
    if not os.path.isdir(os.path.join(where, _DATA)):
      raise ValueError(f"{where} has no {_DATA}: the position of the data.")
    position = iterator_state.Position(data)
    args = ocp.args.Composite(
      **{_DATA: grain.checkpoint.CheckpointRestore(position)}
    )
    restored = plan.restore()
    self._manager.restore(step, args=args)
    # Not before: a damaged step must leave the data where it is.
    position.apply()
    return restored


def check_writable(argument: str, directory: str) -> None:
  """Raises a ValueError unless `directory` exists, or is made, and is ours."""
  if "://" in directory:
    raise ValueError(
      f"{argument}={directory!r} must be a directory of a file system; mount "
      "the bucket, or take Orbax's manager with `flaxshard.checkpoint."
      "save_args` and `restore`."
    )
  try:
    os.makedirs(directory, exist_ok=True)
    _make_and_remove(directory)
  except OSError as e:
    raise ValueError(
      f"{argument}={directory!r} cannot be written: {e.strerror or e}."
    ) from e


def _make_and_remove(directory: str) -> None:
  name = f".write_test_{socket.gethostname()}_{os.getpid()}"
  probe = os.path.join(directory, name)
  os.mkdir(probe)
  os.rmdir(probe)
