"""One step of a checkpoint: what is written, and how it becomes a state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
import dataclasses
import logging
import os
from typing import Any

import jax
import orbax.checkpoint as ocp

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import migrate
from flaxshard.checkpoint import reader
from flaxshard.checkpoint import templates
from flaxshard.checkpoint import validation
from flaxshard.checkpoint import wrapper_states as wrapper_states_lib
from flaxshard.core import multihost
from flaxshard.core import trees
from flaxshard.replicas import values
from flaxshard.state import fields as fields_lib
from flaxshard.state import replica_groups
from flaxshard.state.train_state import TrainState

_log = logging.getLogger(__name__)

PyTree = Any
Path = tuple[str, ...]

_WRAPPERS = wrapper_states_lib.ITEM
_LOSS_SCALE = migrate.LOSS_SCALE[-1]


def save_args(
  state: TrainState, *, plain_item: str = "default"
) -> ocp.args.Composite:
  """Returns what Orbax is to save of a state, for a manager of one's own.

  A manager that is used through this and `restore` alone needs nothing special,
  in any process; see `item_handlers` for others. Items of one's own go with
  these: `ocp.args.Composite(**save_args(state), data=...)`.

  Args:
    state: The state. Of groups of replicas that differ, what replica 0 has is
      saved, and the log says so.
    plain_item: The item for what a plain Flax program has: `"default"`, where
      Orbax's `CheckpointManager` has it, or `"state"`, as in Orbax v1.

  Returns:
    The arguments of the items: `plain_item` and, unless the wrappers have no
    states, `wrappers`.

  Raises:
    TypeError: `state` is no `TrainState`, or a leaf of it is not an array.
    ValueError: A leaf has no elements, or was deleted, or `plain_item` is
      another name.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax, tempfile
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.adam(0.1),
    ...     wrappers=[fs.LossScale("dynamic")])
    >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
    ...   saved = manager.save(1, args=fs.checkpoint.save_args(state))
    ...   state = fs.checkpoint.restore(manager, state)
  """
  check_state(state)
  check_plain_item(plain_item)
  validation.check("state", state)
  note = replica_groups.note(state)
  if note:
    _log.info("step %d: %s", int(state.step), note)
    state = replica_groups.of_first_replica(state)
  items: dict[str, Any] = {
    plain_item: ocp.args.StandardSave(state.without_wrappers())
  }
  wrapper_states = wrapper_states_lib.nonempty(state.wrapper_states)
  if wrapper_states:
    items[_WRAPPERS] = ocp.args.PyTreeSave(wrapper_states)
  return ocp.args.Composite(**items)


def item_handlers(
  *, plain_item: str = "default"
) -> dict[str, ocp.CheckpointHandler]:
  """Returns handlers to make an Orbax manager of one's own with.

  A manager without any takes a step for a single item once it has read one
  with Orbax's own calls, and then refuses `save_args`. With these it does both.

  Args:
    plain_item: As in `save_args`.

  Returns:
    Handlers by item, for `ocp.CheckpointManager(directory, item_handlers=...)`.

  Raises:
    ValueError: `plain_item` is another name.

  Example:
    >>> sorted(item_handlers())
    ['default', 'wrappers']
  """
  check_plain_item(plain_item)
  return {
    plain_item: ocp.StandardCheckpointHandler(),
    # This one, unlike Standard's, can leave out what is not wanted.
    _WRAPPERS: ocp.PyTreeCheckpointHandler(),
  }


def restore(
  manager: Any,
  state: TrainState,
  step: int | None = None,
  *,
  plain_item: str | None = None,
) -> TrainState:
  """Restores a checkpoint, whoever wrote it, into the shardings of `state`.

  It may be of flaxshard or of a plain Flax program: by Orbax's
  `CheckpointManager` or `StandardCheckpointer`, by Orbax v1, or by
  `flax.training.checkpoints`, as Orbax's or as msgpack files. A field
  `dynamic_scale` (Flax's `DynamicScale`) becomes the state of `LossScale`;
  `optax.apply_if_finite` and `optax.MultiSteps` around the whole optimizer are
  taken off, or start fresh, as `state` has them or not. What is left alone,
  dropped or started fresh is told in the log.

  What `Checkpointer` has written is compared with its digests first. A damaged
  step is told in the log and passed over.

  Args:
    manager: Orbax's manager, or a path: a directory of steps
      (`1200`, `checkpoint_1200`), or one checkpoint.
    state: A state of the same model and optimizer.
    step: The step to restore; None is the latest that is not damaged.
    plain_item: The item that the train state is in; None is the first there is
      of `default`, `state` and `pytree`.

  Returns:
    The restored state; see `Checkpointer.restore`.

  Raises:
    TypeError: `state` is no `TrainState`.
    ValueError: There is no such checkpoint, or it is damaged, or its tree
      differs from `state`; the message names the file, or the first path that
      differs. Nothing is cast or filled, or changed on disk.
  """
  check_state(state)

  def read(where: reader.Directory) -> TrainState:
    return open_step(where, plain_item).plan(state).restore()

  if isinstance(manager, (str, os.PathLike)):
    directory = reader.as_path(manager)
    if step is None and reader.is_one(directory):
      return read(directory)
  elif hasattr(manager, "directory"):
    directory = manager.directory
    if hasattr(manager, "wait_until_finished"):
      manager.wait_until_finished()  # the newest may be on its way
  else:
    raise TypeError(
      f"manager must be an Orbax CheckpointManager or a path, got {manager!r}."
    )
  there = reader.steps(directory)
  return read_newest(directory, there, step, lambda i: read(there[i]))[1]


def read_newest(
  directory: reader.Directory,
  steps: Collection[int],
  step: int | None,
  read: Callable[[int], TrainState],
) -> tuple[int, TrainState]:
  """Reads the newest step that is not damaged; returns its number, too.

  Args:
    directory: Where the steps lie.
    steps: The steps that are there.
    step: The only one to read; None is any.
    read: Reads a step, or raises `digests.Damaged`.

  Raises:
    ValueError: There is no such step, or it is damaged, or all are.
  """
  if not steps or (step is not None and step not in steps):
    raise ValueError(
      f"no checkpoint of step {step} in {directory}; there are {sorted(steps)}."
    )
  if step is not None:
    return step, read(step)
  damages = []
  for newest in sorted(steps, reverse=True):
    try:
      return newest, read(newest)
    except digests.Damaged as e:
      _log.warning("step %d is damaged, passed over: %s", newest, e)
      damages.append(str(e))
  raise ValueError(
    f"{directory} has no checkpoint that is complete: " + " ".join(damages)
  )


def check_state(state: Any) -> None:
  """Raises a TypeError unless it is a state of ours."""
  if not isinstance(state, TrainState):
    raise TypeError(
      f"state must be a flaxshard TrainState, got {type(state).__name__}."
    )


def check_plain_item(plain_item: Any) -> None:
  """Raises a ValueError unless others find an item of that name."""
  # Further items sort after these: Orbax v1 may take the first for the state.
  if plain_item not in ("default", "state"):
    raise ValueError(f"plain_item={plain_item!r}; allowed: 'default', 'state'.")


@dataclasses.dataclass(frozen=True)
class CheckpointStep:
  """What lies in a step.

  Attributes:
    where: The step.
    plain: The train state.
    wrappers: Shapes and dtypes of the wrappers' states, by name.
    verified: Whether its files are known to be what was saved.
  """

  where: reader.Directory
  plain: reader.SavedTree
  wrappers: Mapping[str, PyTree]
  verified: bool

  def plan(self, state: TrainState) -> RestorePlan:
    """Compares the step with the state that it is to be restored into.

    Raises:
      ValueError: They differ; the message names the first path.
    """
    where = str(self.where)
    plain = state.without_wrappers()
    wanted = trees.leaves_by_path(templates.abstract(plain))
    mine = wrapper_states_lib.nonempty(state.wrapper_states)
    scale = mine.get(_LOSS_SCALE)
    scales: dict[Path, Any] = {}
    if scale is not None and _LOSS_SCALE not in self.wrappers:
      abstract = trees.leaves_by_path(templates.abstract(scale, like=state))
      scales = {(*migrate.LOSS_SCALE, *path): x for path, x in abstract.items()}
    moves = migrate.plan(self.plain.leaves, {**wanted, **scales})
    wanted |= {path: scales[path] for path in moves.sources if path in scales}
    has = {
      path: wanted[path]
      if isinstance(x, reader.SavedScalar) and x.fits(wanted.get(path, x))
      else x
      for path, x in moves.renamed(self.plain.leaves).items()
    }
    templates.check_same(
      where,
      self.plain.item,
      has,
      {path: x for path, x in wanted.items() if path not in moves.fresh},
    )
    elsewhere = {path[1] for path in moves.sources if path in scales}
    wrappers = wrapper_states_lib.plan(where, state, self.wrappers, elsewhere)
    for note in moves.notes:
      _log.info("%s: %s", where, note)
    return RestorePlan(self, state, plain, wanted, moves, wrappers)


@dataclasses.dataclass(frozen=True)
class RestorePlan:
  """What is read of a step, and where it goes.

  Attributes:
    opened: The step.
    state: The state that is restored into.
    plain: That without its wrappers.
    wanted: What is to be there in the end, by path.
    moves: Which saved leaf goes where.
    wrappers: What becomes of the wrappers.
  """

  opened: CheckpointStep
  state: TrainState
  plain: TrainState
  wanted: Mapping[Path, jax.ShapeDtypeStruct]
  moves: migrate.LeafMapping
  wrappers: wrapper_states_lib.WrapperRestorePlan

  def restore(self, also: Callable[[], Any] | None = None) -> TrainState:
    """Reads the step; returns the restored state.

    Args:
      also: Reads what else is wanted of the step.

    Raises:
      Damaged: Something cannot be read.
      ValueError: Something did not come back as it was asked for.
    """
    # Several processes cannot go on together from an error of one.
    verified = self.opened.verified or jax.process_count() > 1
    with digests.errors_as_damage(str(self.opened.where), verified):
      leaves, wrapper_item = self._read()
      if also is not None:
        also()
    return self._finish(leaves, wrapper_item)

  def _read(self) -> tuple[dict[Path, Any], PyTree]:
    """Returns leaves by their saved paths, and the item of the wrappers."""
    leaves = self.opened.plain.read(
      {source: self.wanted[path] for path, source in self.moves.sources.items()}
    )
    directory = reader.items(self.opened.where).get(_WRAPPERS)
    if directory is None:
      return leaves, {}
    return leaves, reader.read_item(directory, self.wrappers.item)

  def _finish(
    self, leaves: Mapping[Path, Any], wrapper_item: PyTree
  ) -> TrainState:
    found = {path: leaves[s] for path, s in self.moves.sources.items()}
    for path, x in trees.leaves_by_path(self.plain).items():
      if path in self.moves.fresh:
        # A copy: what is restored may be donated.
        sharding = self.wanted[path].sharding
        found[path] = jax.device_put(x, sharding, may_alias=False)
    where = str(self.opened.where)
    templates.check_restored(where, found, dict(self.wanted))
    restored = jax.tree.unflatten(
      jax.tree.structure(self.plain),
      [found[path] for path in trees.leaves_by_path(self.plain)],
    )
    new = {
      name: values.broadcast_to_replicas(
        getattr(restored, name), getattr(self.state, name)
      )
      for name in fields_lib.array_field_names(self.plain)
    }
    if self.state.wrapper_states:
      states = self.wrappers.finish(restored, wrapper_item)
      scale = {
        path[-1]: x
        for path, x in found.items()
        if path[:2] == migrate.LOSS_SCALE
      }
      if scale:
        states[_LOSS_SCALE] = states[_LOSS_SCALE]._replace(**scale)
      new["wrapper_states"] = states
    return self.state.replace(**new)


def open_step(
  where: reader.Directory, plain_item: str | None = None
) -> CheckpointStep:
  """Verifies a step, and reads what lies in it, without the values.

  Args:
    where: The step.
    plain_item: The item that the train state is in; None looks for it.

  Raises:
    Damaged: It is not what was saved, or there is no train state in it.
  """
  verified = digests.verify_together(where)
  with (
    multihost.raise_on_all_processes(digests.Damaged, ValueError),
    digests.errors_as_damage(str(where), verified),
  ):
    plain = reader.plain(where, plain_item)
    directory = reader.items(where).get(_WRAPPERS)
    wrappers = {} if directory is None else reader.metadata(directory)
  return CheckpointStep(reader.as_path(where), plain, wrappers, verified)
