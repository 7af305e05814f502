"""Saves and restores a train state with an Orbax manager of the user's."""

from __future__ import annotations

from collections.abc import Callable, Collection
import logging
import os
from typing import Any

import orbax.checkpoint as ocp

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import reader
from flaxshard.checkpoint import restore_plan
from flaxshard.checkpoint import validation
from flaxshard.checkpoint import wrapper_states
from flaxshard.core import checks
from flaxshard.state import replica_groups
from flaxshard.state.train_state import plain_state
from flaxshard.state.train_state import TrainState

_log = logging.getLogger(__name__)

_CHECKPOINTS = "checkpoints"  # where a workdir has its steps


def save_args(
  state: TrainState, *, plain_item: str = "default"
) -> ocp.args.Composite:
  """Returns the arguments with which an Orbax manager saves a state.

  A manager that is used with this function and `restore` alone needs no
  options, in any process; see `item_handlers` for other managers. Add items
  with `ocp.args.Composite(**save_args(state), data=...)`.

  Args:
    state: The state. If groups of replicas differ, replica 0 is saved, and the
      log says so.
    plain_item: The item for the plain train state: `"default"`, the name in
      Orbax's `CheckpointManager`, or `"state"`, the name in Orbax v1.

  Returns:
    The arguments for the items `plain_item` and, unless the wrappers have no
    states, `wrappers`.

  Raises:
    TypeError: `state` is not a `TrainState`, or a leaf of it is not an array.
    ValueError: A leaf has no elements or was deleted, or `plain_item` has
      another value.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax, tempfile
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.adam(0.1),
    ...     wrappers=[fs.LossScale("dynamic")])
    >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
    ...   saved = manager.save(1, args=fs.checkpoint.save_args(state))
    ...   state = fs.checkpoint.restore(manager, state)
  """
  restore_plan.check_state(state)
  check_plain_item(plain_item)
  validation.check_savable("state", state)
  note = replica_groups.describe_divergence(state)
  if note:
    _log.info("step %d: %s", int(state.step), note)
    state = replica_groups.copy_first_replica(state)
  items: dict[str, Any] = {
    plain_item: ocp.args.StandardSave(plain_state(state))
  }
  states = wrapper_states.nonempty(state.wrapper_states)
  if states:
    items[wrapper_states.ITEM] = ocp.args.PyTreeSave(states)
  return ocp.args.Composite(**items)


def item_handlers(
  *, plain_item: str = "default"
) -> dict[str, ocp.CheckpointHandler]:
  """Returns the handlers with which to construct an Orbax manager.

  Without them a manager takes a step for a single item once it has read one
  with Orbax's own calls, and then refuses `save_args`. With them it can do
  both.

  Args:
    plain_item: As in `save_args`.

  Returns:
    Handlers by item, for `ocp.CheckpointManager(directory, item_handlers=...)`.

  Raises:
    ValueError: `plain_item` has another value.

  Example:
    >>> sorted(item_handlers())
    ['default', 'wrappers']
  """
  check_plain_item(plain_item)
  return {
    plain_item: ocp.StandardCheckpointHandler(),
    # Unlike Standard's, this handler can leave out leaves.
    wrapper_states.ITEM: ocp.PyTreeCheckpointHandler(),
  }


def restore(
  manager: Any,
  state: TrainState,
  step: int | None = None,
  *,
  plain_item: str | None = None,
) -> TrainState:
  """Restores a checkpoint of flaxshard or of a plain Flax program.

  The latter may be written by Orbax's `CheckpointManager` or
  `StandardCheckpointer`, by Orbax v1, or by `flax.training.checkpoints` (Orbax
  or msgpack files). A field `dynamic_scale` (Flax's `DynamicScale`) becomes the
  state of `LossScale`. `optax.apply_if_finite` and `optax.MultiSteps` around
  the whole optimizer are taken off or start fresh, as `state` has them or not.
  The log says what is left alone, dropped or started fresh.

  A checkpoint of `Checkpointer` is compared with its digests first. A damaged
  step is passed over, with a warning in the log.

  Args:
    manager: An Orbax manager, or a path: of a directory of steps (`1200`,
      `checkpoint_1200`), of a workdir with such a directory `checkpoints`, or
      of one checkpoint.
    state: A state of the same model and optimizer, with the shardings to
      restore into. With `jax.ShapeDtypeStruct`s for arrays (see
      `create_train_state(..., abstract=True)`) only one state is in memory.
    step: The step to restore; None is the latest that is not damaged.
    plain_item: The item that holds the train state; None is the first of
      `default`, `state` and `pytree` that exists.

  Returns:
    The restored state; see `Checkpointer.restore`.

  Raises:
    TypeError: `state` is not a `TrainState`.
    ValueError: There is no such checkpoint, it is damaged, or its tree differs
      from `state`. The message names the file, or the first path that differs.
      Nothing is cast or filled in, and nothing on disk is changed.
  """
  restore_plan.check_state(state)

  def restore_from(where: reader.Directory) -> TrainState:
    return restore_plan.open_step(where, plain_item).plan(state).restore()

  if isinstance(manager, (str, os.PathLike)):
    directory = reader.as_path(manager)
    if step is None and reader.is_step(directory):
      return restore_from(directory)
    if not reader.steps(directory) and (directory / _CHECKPOINTS).is_dir():
      directory = directory / _CHECKPOINTS
  elif hasattr(manager, "directory"):  # Orbax's managers have no common class
    directory = manager.directory
    if isinstance(manager, ocp.CheckpointManager):
      manager.wait_until_finished()  # the newest step may not be complete yet
  else:
    raise TypeError(
      f"manager must be an Orbax CheckpointManager or a path, got {manager!r}."
    )
  there = reader.steps(directory)
  return read_newest(
    directory, there, step, lambda number: restore_from(there[number])
  )[1]


def read_newest(
  directory: reader.Directory,
  steps: Collection[int],
  step: int | None,
  read_step: Callable[[int], TrainState],
) -> tuple[int, TrainState]:
  """Reads the newest step that is not damaged.

  Args:
    directory: The directory of the steps.
    steps: The steps in it.
    step: The only step to read; None means the newest.
    read_step: Reads a step, or raises `digests.Damaged`.

  Returns:
    The number of the step, and its state.

  Raises:
    ValueError: There is no such step, or it is damaged, or all are.
  """
  if not steps:
    exists = reader.as_path(directory).exists()
    reason = "it has no steps" if exists else "there is no such path"
    raise ValueError(f"no checkpoint in {directory}: {reason}.")
  if step is not None:
    if step not in steps:
      raise ValueError(
        f"no checkpoint of step {step} in {directory}; there are "
        f"{sorted(steps)}."
      )
    return step, read_step(step)
  damages = []
  for newest in sorted(steps, reverse=True):
    try:
      return newest, read_step(newest)
    except digests.Damaged as e:
      _log.warning("step %d is damaged, passed over: %s", newest, e)
      damages.append(str(e))
  raise ValueError(
    f"{directory} has no checkpoint that is complete: " + " ".join(damages)
  )


def check_plain_item(plain_item: Any) -> None:
  """Raises a ValueError unless other programs find an item of that name."""
  # Both sort before our other items. Orbax v1 takes the first item for the
  # train state if none is called "state".
  checks.one_of("plain_item", plain_item, ("default", "state"))
