"""Saves and restores a train state with an Orbax manager of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import logging
import os
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import locate
from flaxshard.checkpoint import metadata_item
from flaxshard.checkpoint import reader
from flaxshard.checkpoint import restore_plan
from flaxshard.checkpoint import step_names
from flaxshard.checkpoint import validation
from flaxshard.checkpoint import wrapper_states
from flaxshard.checkpoint.restore_plan import S
from flaxshard.core import checks
from flaxshard.core import multihost
from flaxshard.core import trees
from flaxshard.state import fields as fields_lib
from flaxshard.state import replica_groups
from flaxshard.state.train_state import TrainState

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


def save_args(
  state: TrainState | Mapping[str, TrainState], *, plain_item: str = "default"
) -> ocp.args.Composite:
  """Returns the arguments with which an Orbax manager saves a state.

  A manager that is used with this function and `restore` alone needs no
  options, in any process; see `item_handlers` for other managers. Add items
  with `ocp.args.Composite(**save_args(state), data=...)`.

  Args:
    state: The state, or a dict of states by name: then each item is a dict of
      what it has for each of them. If groups of replicas differ, replica 0 is
      saved, and the log says so.
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
  if isinstance(state, Mapping):
    state = {name: _of_first_replica(s) for name, s in state.items()}
    plain: Any = {n: fields_lib.plain_state(s) for n, s in state.items()}
    by_name = {
      n: wrapper_states.nonempty(s.wrapper_states) for n, s in state.items()
    }
    states = {name: s for name, s in by_name.items() if s}
  else:
    state = _of_first_replica(state)
    plain = fields_lib.plain_state(state)
    states = wrapper_states.nonempty(state.wrapper_states)
  items: dict[str, Any] = {plain_item: ocp.args.StandardSave(plain)}
  if states:
    items[wrapper_states.ITEM] = ocp.args.PyTreeSave(states)
  return ocp.args.Composite(**items)


def _of_first_replica(state: TrainState) -> TrainState:
  """Returns the state of replica 0; logs it if groups of replicas differ."""
  note = replica_groups.describe_divergence(state)
  if note is None:
    return state
  _log.info("step %d: %s", int(state.step), note)
  return replica_groups.of_first_replica(state)


def check_same(
  step_dir: str,
  state: TrainState | Mapping[str, TrainState],
  items: ocp.args.Composite,
) -> None:
  """Raises an error if a step was saved from another state.

  Compares the trees with their shapes and dtypes, and `state.step`. No array is
  read. A step that another program saved is not compared.

  Args:
    step_dir: Path of the directory of the step.
    state: The state, or states by name.
    items: What `save_args` returned for the state.

  Raises:
    ValueError: The states differ; the message names the first difference.
  """
  metadata = metadata_item.read_metadata(step_dir)
  if metadata is None:
    return
  difference = None
  saved_step = metadata["state_step"]
  state_step = metadata_item.state_step(state)
  if saved_step != state_step:
    difference = f"state.step is {state_step}, {saved_step} was saved"
  item_dirs = reader.items(step_dir)
  current_items = dict(items.items())
  # A wrapper's state may be on one side only, and with it the whole item.
  for name in sorted({*current_items, *item_dirs}):
    saved: Mapping[tuple[str, ...], Any] = {}
    current: Mapping[tuple[str, ...], Any] = {}
    if name in item_dirs:
      saved = reader.orbax_tree(item_dirs[name], name).leaves
    if name in current_items:
      types = jax.tree.map(validation.as_saved, current_items[name].item)
      current = trees.leaves_by_path(types)
    difference = difference or trees.difference_by_path(saved, current)
  if difference:
    raise ValueError(
      f"{step_dir} was saved from another state: {difference}. Save under "
      "another step, or in another directory."
    )


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
  state: S,
  step: int | None = None,
  *,
  plain_item: str | None = None,
) -> S:
  """Restores a checkpoint of flaxshard or of a plain Flax program.

  The latter may be written by Orbax's `CheckpointManager` or
  `StandardCheckpointer`, by Orbax v1, or by `flax.training.checkpoints` (Orbax
  or msgpack files). A field `dynamic_scale` (Flax's `DynamicScale`) becomes the
  state of `LossScale`. The log says what is left alone, dropped or started
  fresh.

  A checkpoint of `Checkpointer` is compared with its digests first. A damaged
  step, and one that was copied or renamed from another step, is passed over,
  with a warning in the log. The saved state may have wrapper states of its own.
  A loss scale outside of the configured bounds is moved into them, with a
  UserWarning.

  Args:
    manager: An Orbax manager, or a path: of a directory of steps (`1200`,
      `checkpoint_1200`), of a workdir with such a directory `checkpoints`, or
      of one checkpoint.
    state: A state of the same model and optimizer, with the shardings to
      restore into. With `jax.ShapeDtypeStruct`s for arrays (see
      `create_train_state(..., abstract=True)`) only one state is in memory.
      Or a dict of some of the states that were saved as a dict.
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
  if isinstance(manager, (str, os.PathLike)):
    directory = step_names.as_path(manager)
    if reader.is_step(directory) and step in (None, locate.step_of(directory)):
      plan = restore_plan.open_step(directory, plain_item).plan(state)
      restored: S = plan.restore()
      return restored
    directory = locate.directory_of_steps(directory)
  elif hasattr(manager, "directory"):  # Orbax's managers have no common class
    directory = manager.directory
    if isinstance(manager, ocp.CheckpointManager):
      manager.wait_until_finished()  # the newest step may not be complete yet
  else:
    raise TypeError(
      f"manager must be an Orbax CheckpointManager or a path, got {manager!r}."
    )
  return restore_from_directory(directory, state, step, plain_item)[1]


def restore_from_directory(
  directory: step_names.Directory,
  state: S,
  step: int | None,
  plain_item: str | None = None,
) -> tuple[int, S]:
  """Returns the step that was restored, and its state.

  Args:
    directory: The directory of the steps.
    state: As in `restore`, like the following two.
    step: See there.
    plain_item: See there.
  """
  return read_newest(
    directory,
    lambda: step_names.steps(directory),
    step,
    lambda _, where: (
      restore_plan.open_step(where, plain_item).plan(state).restore()
    ),
  )


def read_newest(
  directory: step_names.Directory,
  list_steps: Callable[[], Mapping[int, step_names.Directory]],
  step: int | None,
  read_step: Callable[[int, step_names.Directory], _T],
) -> tuple[int, _T]:
  """Reads the newest step that is not damaged.

  Another program may save in the directory at the same time, and delete steps
  that are being read. Then the steps are listed again.

  Args:
    directory: The directory of the steps.
    list_steps: Returns the path of each step in it.
    step: The only step to read; None means the newest.
    read_step: Reads a step, or raises `digests.Damaged`.

  Returns:
    The number of the step, and what `read_step` returned.

  Raises:
    ValueError: There is no such step, or it is damaged, or all are, or the
      processes find different steps.
  """
  if step is not None:
    step = checks.integer("step", step, minimum=0)
  steps = list_steps()
  _check_same_steps(directory, steps)
  if not steps:
    which = "" if step is None else f" of step {step}"
    raise ValueError(
      f"no checkpoint{which} in {directory}: "
      f"{locate.describe_missing(directory)}"
    )
  if step is not None and step not in steps:
    raise ValueError(
      f"no checkpoint of step {step} in {directory}; there are {sorted(steps)}."
    )
  wanted = list(steps) if step is None else [step]
  failures: dict[int, str] = {}
  while remaining := [n for n in wanted if n not in failures]:
    number = max(remaining)
    try:
      return number, read_step(number, steps[number])
    except Exception as e:
      error = _find_damage(steps[number], e)
      if error is e and not (step is None and isinstance(e, digests.Damaged)):
        raise
      if step is not None:
        raise error from e
      _log.warning("step %d is damaged, passed over: %s", number, error)
      failures[number] = str(error)
    # All processes must read the same step, so they list the steps once.
    if step is None and jax.process_count() == 1:
      steps = list_steps()
      wanted = list(steps)
  raise ValueError(
    f"{directory} has no checkpoint that is complete: "
    + " ".join(failures.values())
  )


def _check_same_steps(
  directory: step_names.Directory, steps: Iterable[int]
) -> None:
  """Raises a ValueError unless all processes find the same steps."""
  texts = multihost.exchange(", ".join(map(str, sorted(steps))) or "none")
  for process, text in enumerate(texts):
    if text != texts[0]:
      raise ValueError(
        f"the processes find different steps in {directory}: process 0 finds "
        f"{texts[0]}, process {process} finds {text}. All processes must read "
        "the same directory."
      )


def _find_damage(where: step_names.Directory, error: Exception) -> Exception:
  """Returns the damage of a step that caused an error, or the error itself.

  Another program may delete a step while it is read, file by file: what Orbax
  then raises depends on the file.
  """
  # The processes of one program may see different moments of it.
  if isinstance(error, digests.Damaged) or jax.process_count() > 1:
    return error
  try:
    digests.verify(where, contents=False)
  except digests.Damaged as e:
    return e
  except ValueError:
    pass  # this process cannot read the files: the first error says why
  return error


def check_plain_item(plain_item: Any) -> None:
  """Raises a ValueError unless other programs find an item of that name."""
  # Both sort before our other items. Orbax v1 takes the first item for the
  # train state if none is called "state".
  checks.one_of("plain_item", plain_item, ("default", "state"))
