"""Restores a step into a train state: maps what is saved to what is wanted.

`{path: leaf}` of both sides are compared. The source of a wanted leaf is the
saved leaf of the same path, or that of another program's layout. A wrapper
whose state the checkpoint lacks, or has for other replicas, makes a new one
from the restored parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
import functools
import logging
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from flaxshard.checkpoint import items
from flaxshard.checkpoint import reader
from flaxshard.checkpoint import step_files
from flaxshard.checkpoint import steps
from flaxshard.checkpoint.reader import Path
from flaxshard.checkpoint.reader import WRAPPER_STATES
from flaxshard.core import multihost
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import values
from flaxshard.state import fields as fields_lib
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import base
from flaxshard.wrappers import stack

_log = logging.getLogger(__name__)

PyTree = Any
S = TypeVar("S", bound=items.States)


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
  items.check_state(state)
  where = manager
  if hasattr(manager, "directory"):
    where = manager.directory  # Orbax's managers have no common class
    if isinstance(manager, ocp.CheckpointManager):
      manager.wait_until_finished()  # the newest step may not be complete yet
  read_step = functools.partial(
    restore_step, state=state, plain_item=plain_item
  )
  return steps.read(where, step, read_step)[1]


def restore_step(
  where: Any, state: S, plain_item: str | None = None, data: Any = None
) -> S:
  """Restores one step, as `restore`.

  Args:
    where: The directory of the step, or its file.
    state: See `restore`.
    plain_item: See there.
    data: The iterator to set to the position in the step.

  Raises:
    Damaged: The files are damaged.
    ValueError: The leaves differ, or one was not restored as it was asked for;
      the message names the first path.
  """
  if (mesh := fields_lib.mesh_in(state)) is not None:
    mesh_lib.check_can_run("restore: state", mesh)
  saved = reader.open_step(where, plain_item)
  with multihost.raise_on_all_processes(*reader.ERRORS):
    position = None if data is None else items.read_position(data, where)
  _check_names(where, saved, state)
  restored: Any = {}
  for name, one in items.by_name(state).items():
    label = f"{where}, state {name!r}" if name else where
    restored[name] = _Plan(label, reader.part(saved, name), one).restore()
  if data is not None:
    # Not before: a damaged step must leave the data where it is.
    with multihost.raise_on_all_processes(TypeError, ValueError):
      data.set_state(position)
  return restored if isinstance(state, Mapping) else restored[""]


def _check_names(where: Any, saved: reader.Leaves, state: items.States) -> None:
  """Raises a ValueError if a step lacks one of the states to restore.

  One state that is no dict has the name `""`.
  """
  names = {path[0]: None for path in saved if path[1:2] == ("params",)}
  names = {"": None} if ("step",) in saved else names
  wanted = items.by_name(state)
  if names and not wanted.keys() <= names.keys():
    had, given = (
      "one state" if "" in n else f"a dict of states {', '.join(map(repr, n))}"
      for n in (names, wanted)
    )
    allowed = "one, too" if "" in names else "a dict of one or more of them"
    raise ValueError(
      f"{where} has {had}: state must be {allowed}, got {given}."
    )


def check_same(where: Any, state: items.States) -> None:
  """Raises an error if a step was saved from another state.

  Compares the trees with their shapes and dtypes, and `state.step`. No array is
  read. A step that another program saved is not compared.

  Args:
    where: The directory of the step.
    state: The state, or states by name.

  Raises:
    ValueError: The states differ; the message names the first difference.
  """
  metadata = step_files.check(where)
  if metadata is None:
    return
  difference = None
  if metadata["state_step"] != (step := items.step_of(state)):
    difference = f"state.step is {step}, {metadata['state_step']} was saved"
  saved = reader.open_unverified(where)
  for name, one in items.by_name(state).items():
    wanted = trees.leaves_by_path(_template(one))
    difference = difference or _difference(reader.part(saved, name), wanted)
  if difference:
    raise ValueError(
      f"{where} was saved from another state: {difference}. Save under "
      "another step, or in another directory."
    )


def sources(
  saved: Iterable[Path], wanted: Collection[Path]
) -> dict[Path, Path]:
  """Returns the saved path of each wanted leaf that a checkpoint has.

  Args:
    saved: The leaves on disk, by path.
    wanted: The leaves of the train state to restore, by path.

  Example:
    >>> sources({("w", "value"): 1, ("b",): 2}, {("w",): 3, ("b",): 4})
    {('w',): ('w', 'value'), ('b',): ('b',)}
  """
  found: dict[Path, Path] = {}
  for path in saved:
    here = reader.in_train_state(path)
    if path in wanted:
      found[path] = path
    elif here in wanted:
      found.setdefault(here, path)
  return found


class _Plan:
  """The source of each leaf of a train state.

  Creating it compares the leaves by their metadata alone; `restore` reads them.
  """

  def __init__(self, where: Any, saved: reader.Leaves, state: TrainState):
    self._where, self._saved, self._state = where, saved, state
    self._template = _template(state)
    # Errors name the first path that differs, and a parameter, which is before
    # the optimizer's slots in a train state, says more than a slot.
    self._wanted = trees.leaves_by_path(self._template)
    self._sources = sources(saved, self._wanted)
    # Wrappers that make a new state, and how the saved one differs.
    self._new: dict[Path, tuple[base.Base, str | None]] = {}
    for wrapper in state.wrappers:
      self._plan_wrapper(wrapper)
    # First: the copies of another model's parameters differ as well.
    self._check_others()
    for wrapper, difference in self._new.values():
      if difference and not stack.overrides(wrapper, "restart"):
        raise ValueError(
          f"{where} has another state of wrapper {wrapper.name!r}, which does "
          f"not define `restart` to go on from it: {difference}."
        )

  def _note(self, note: str) -> None:
    _log.info("%s: %s", self._where, note)

  def _plan_wrapper(self, wrapper: base.Base) -> None:
    """Notes that a wrapper makes its state, unless it is as it was saved."""
    name, at = wrapper.name, (WRAPPER_STATES, wrapper.name)
    saved = reader.below(self._saved, at)
    wanted = reader.below(self._wanted, at)
    difference = _difference(saved, wanted)
    if not wanted or not difference:
      return
    if not saved:
      difference = None
      fields = {path[0] for path in reader.below(self._sources, at).values()}
      for field in fields:
        self._note(f"its field {field!r} becomes the state of wrapper {name!r}")
      if not fields:
        self._note(f"it has no state of wrapper {name!r}: that starts fresh")
    else:
      for path in wanted:
        self._sources.pop((*at, *path), None)
    self._new[at] = wrapper, difference

  def _check_others(self) -> None:
    """Raises a ValueError unless all other leaves are there, and no more."""
    # Wrappers that do not make their state have been compared.
    wanted = {p: x for p, x in self._wanted.items() if p[0] != WRAPPER_STATES}
    has = {p: self._saved[s] for p, s in self._sources.items() if p in wanted}
    used, left = set(self._sources.values()), set()
    for path, leaf in self._saved.items():
      if path in used or path[:2] in self._new:
        continue
      if path[0] == WRAPPER_STATES:
        left.add(f"a state of wrapper {path[1]!r}")
      elif reader.in_train_state(path)[0] == WRAPPER_STATES:
        left.add(f"a field {path[0]!r}")
      elif leaf.is_number and path[0] not in vars(self._state):
        # Programs save numbers of their own beside the state, as an epoch.
        left.add(f"a number {'/'.join(path)!r}")
      else:
        has[path] = leaf
    for what in sorted(left):
      self._note(f"it has {what}: left alone")
    if difference := _difference(has, wanted):
      raise ValueError(
        f"{self._where} was written by another model or optimizer: "
        f"{difference}."
      )

  def restore(self) -> TrainState:
    """Reads the leaves of the plan, and returns the restored state."""
    asked = {}
    for path, source in self._sources.items():
      asked[path] = self._saved[source], self._wanted[path]
    leaves = reader.read(self._where, asked)
    for at, (wrapper, difference) in self._new.items():
      made = self._make_state(wrapper, difference, leaves)
      for path, x in trees.leaves_by_path(made).items():
        leaves.setdefault((*at, *path), x)
    # Orbax returns arrays that are complete; so does this function.
    restored = jax.block_until_ready(self._unflatten(leaves))
    # Every replica gets the one value of a `PerReplica`.
    return values.broadcast_to_replicas(restored, self._state)

  def _make_state(
    self, wrapper: base.Base, difference: str | None, leaves: dict[Path, Any]
  ) -> PyTree:
    """Returns a new state of a wrapper.

    Args:
      wrapper: The wrapper.
      difference: How the saved state differs; None if there is none.
      leaves: The leaves that were read, by path.

    Raises:
      ValueError: The wrapper's `restart` returns a tree unlike its state.
    """
    wrappers, name = (wrapper,), wrapper.name
    template = self._template.wrapper_states[name]
    # The wrapper sees one replica. There may be others than those saved.
    row = lambda _, x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    of_one = stack.map_per_replica(row, wrappers, {name: template})[name]
    shapes = {p: x.shape for p, x in trees.leaves_by_path(of_one).items()}
    found = reader.below(self._saved, (WRAPPER_STATES, name))
    # Of use are the replicated leaves, and the scalars of the replicas.
    useful = {}
    for path, x in trees.leaves_by_path(template).items():
      leaf, shape = found.get(path), shapes[path]
      if leaf and shape == x.shape and not _difference({path: leaf}, {path: x}):
        useful[path] = leaf, x
      elif leaf and leaf.dtype == x.dtype and not shape and len(leaf.shape) < 2:
        # The mesh may not divide another number of replicas.
        like = x if leaf.shape == x.shape else self._template.step
        useful[path] = leaf, like.update(shape=leaf.shape, dtype=x.dtype)
    saved = reader.read(self._where, useful)
    if difference:
      dropped = {p[0]: None for p in {**shapes, **found} if p not in saved}
      _log.warning(
        "%s has another state of wrapper %r, as for other replicas: %s. It "
        "begins at the restored parameters. Dropped are %s.",
        self._where,
        name,
        difference,
        ", ".join(dropped),
      )
    restored = self._unflatten(leaves)
    target = base.Target(
      restored.step,
      restored.params,
      restored.opt_state,
      fields_lib.collections(restored),
      wrapper_states={},
      new_collections={},
    )

    def make(target: base.Target, saved: Mapping[Path, jax.Array]) -> PyTree:
      first = stack.init(
        wrappers, target.params, self._state.tx, target.collections
      )
      first = stack.local_states(wrappers, first)[name]
      # The first row stands for all.
      own = {}
      for path, x in saved.items():
        own["/".join(path)] = x if x.shape == shapes[path] else x[0]
      new = wrapper.restart(first, target, own)
      new = trees.conform(f"wrapper {name!r}: restart", new, of_one)
      spread = lambda x, like: jnp.broadcast_to(x, like.shape)
      new = jax.tree.map(spread, new, template)
      # Not the buffers of the parameters: a step may donate both.
      return trees.unshare_buffers((target, new))[1]

    # Sharded outputs, so that no device ever holds the copies of all replicas.
    shardings = jax.tree.map(lambda x: x.sharding, template)
    return jax.jit(make, out_shardings=shardings)(target, saved)

  def _unflatten(self, leaves: dict[Path, Any]) -> Any:
    """Returns the state; what is not made yet stays abstract."""
    return jax.tree.unflatten(
      jax.tree.structure(self._template),
      list((self._wanted | leaves).values()),
    )


def _template(state: TrainState) -> Any:
  """Returns a state with shape, dtype and sharding of the leaves to restore.

  A leaf that is not placed on a mesh is replicated over the mesh of the others.
  A `PerReplica` stands there as one value, as it is saved.
  """
  mesh = fields_lib.mesh_in(state)
  default: Any = jax.device_put(0).sharding  # of the default device
  if mesh is not None:
    default = jax.sharding.NamedSharding(mesh, jax.P())

  def describe(x: Any) -> PyTree:
    if values.is_per_replica(x):
      row = lambda rows: jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)
      return jax.tree.map(lambda rows: describe(row(rows)), x.value)
    sharding = getattr(x, "sharding", None)
    # Restored arrays are committed, and jit refuses arrays that are committed
    # to different devices: an optimizer's count must not stay on device 0.
    if not isinstance(sharding, jax.sharding.NamedSharding) and not (
      isinstance(x, jax.Array) and x.committed
    ):
      sharding = default if mesh is not None else sharding or default
    dtype = trees.dtype_of(x)  # a step may have been replaced by a number
    return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=sharding)

  return jax.tree.map(describe, state, is_leaf=values.is_per_replica)


def _difference(saved: reader.Leaves, wanted: Mapping[Path, Any]) -> str | None:
  """Returns where and how saved leaves differ from the wanted ones, or None."""
  given, as_saved = dict[Path, Any](saved), dict(wanted)
  for path, x in wanted.items():
    if trees.is_prng_key(x):
      # Orbax saves its integers.
      as_saved[path] = x = jax.eval_shape(jax.random.key_data, x)
    leaf = saved.get(path)
    if leaf and leaf.is_number and leaf.shape == x.shape == ():
      if np.can_cast(leaf.dtype, x.dtype, "same_kind"):
        given[path] = x  # reading it says whether the value is exact
  return trees.difference_by_path(given, as_saved)
