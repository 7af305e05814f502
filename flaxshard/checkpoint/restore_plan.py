"""Restores one step of a checkpoint into a train state.

open_step        compares the files with their digests, reads the metadata
.plan(state)     maps every leaf of the state to a saved leaf
.restore()       reads the leaves, computes the missing ones
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import logging
from typing import Any, TypeVar

from flax.training import train_state
import jax

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import migrate
from flaxshard.checkpoint import reader
from flaxshard.checkpoint import step_names
from flaxshard.checkpoint import validation
from flaxshard.checkpoint import wrapper_states
from flaxshard.core import multihost
from flaxshard.core import trees
from flaxshard.replicas import values
from flaxshard.state import fields as fields_lib
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import base

_log = logging.getLogger(__name__)

PyTree = Any
Path = tuple[str, ...]
# A train state, or several by name.
S = TypeVar("S", bound="TrainState | Mapping[str, TrainState]")


@dataclasses.dataclass(frozen=True)
class CheckpointStep:
  """An opened step of a checkpoint: which leaves it has, without their values.

  Attributes:
    directory: The directory of the step, or its file.
    saved_trees: The train state and, if there are any, the wrapper states.
      Paths of the latter begin with `wrapper_states`.
  """

  directory: step_names.Directory
  saved_trees: tuple[reader.SavedTree, ...]

  def part(self, name: str) -> CheckpointStep:
    """Returns the step with one alone of several train states, by its name."""
    return CheckpointStep(
      self.directory,
      tuple(
        tree.part(name, at=int(tree.item == wrapper_states.ITEM))
        for tree in self.saved_trees
      ),
    )

  def plan(self, state: TrainState | Mapping[str, TrainState]) -> Any:
    """Maps every leaf of a train state to a saved leaf, and compares the two.

    Args:
      state: The state to restore into: arrays, or `jax.ShapeDtypeStruct`s. Or
        states by name.

    Returns:
      A `RestorePlan`, or `RestorePlans`.

    Raises:
      TypeError: `state` is not a `TrainState`.
      ValueError: They differ; the message names the first path.
    """
    check_state(state)
    if isinstance(state, Mapping):
      return RestorePlans({n: self.part(n).plan(s) for n, s in state.items()})
    template = _template(state)
    targets = _leaves_by_path(template)
    saved: dict[Path, Any] = {}
    for tree in self.saved_trees:
      saved |= tree.leaves
    mapping = migrate.map_leaves(
      saved, targets, wrapper_states.foreign_paths(state.wrappers)
    )
    try:
      restarts = wrapper_states.find_restarts(
        state.wrappers, template.get(migrate.WRAPPER_STATES, {}), saved
      )
    except ValueError as e:
      raise ValueError(f"{self.directory}: {e}") from e
    derived = wrapper_states.derived_paths(state.wrappers, [*saved, *targets])
    # Those of another shape, as of other hyper-parameters, count as missing.
    expected_shapes = wrapper_states.expected_shapes(targets, restarts)
    saved = {
      p: x
      for p, x in saved.items()
      if p not in derived
      or (p in targets and tuple(x.shape) == expected_shapes[p])
    }
    empty = [p for p in targets if p in derived and p not in saved]
    # What the checkpoint must have, and what is read of that: a wrapper that
    # restarts needs few of its saved leaves.
    expected = {p: x for p, x in targets.items() if p not in mapping.fresh}
    reads = dict(expected)
    # In the order of the state, not of a set: the fresh leaves are the outputs
    # of a jitted function, which must be the same one in all processes.
    fresh = [path for path in targets if path in mapping.fresh]
    for restart in restarts:
      expected |= restart.saved_leaves()
      restarted = wrapper_states.leaves_of(restart.template, restart.path)
      fresh = [path for path in fresh if path not in restarted]
      reads = {p: x for p, x in reads.items() if p not in restarted}
      reads |= restart.read_leaves()
    for path in empty:
      expected.pop(path, None)
      reads.pop(path, None)
    # Programs save numbers of their own beside the state, such as an epoch.
    extra_numbers = {
      path
      for path, x in saved.items()
      if path[0] not in template
      and path not in mapping.sources.values()
      and isinstance(x, reader.SavedScalar)
      and x.is_python
    }
    # A saved Python number has no dtype of its own, so it has the wanted one.
    has = {
      path: expected[path] if _fits(x, expected.get(path)) else x
      for path, x in mapping.rename(saved).items()
      if path not in extra_numbers
    }
    items = (self.saved_trees[0].item, wrapper_states.ITEM)
    for item, mine, theirs in zip(
      items, _split_items(has), _split_items(expected), strict=True
    ):
      validation.check_saved(str(self.directory), item, mine, theirs)
    for note in mapping.notes:
      _log.info("%s: %s", self.directory, note)
    for path in sorted(extra_numbers - mapping.dropped):
      _log.info(
        "%s: it has a number %r, and the train state no such field: left alone",
        self.directory,
        "/".join(path),
      )
    return RestorePlan(
      self, state, template, reads, mapping.sources, fresh, restarts, empty
    )


@dataclasses.dataclass(frozen=True)
class RestorePlan:
  """The source of each leaf of a train state.

  Attributes:
    step: The step to read.
    state: The state to restore into.
    template: Shape, dtype and sharding of every leaf of the result, by field.
      A `PerReplica` stands there as one value, as it is saved.
    reads: Shape, dtype and sharding of the leaves to read, by their path in
      the state.
    sources: The saved path of each of them.
    fresh: The paths of leaves that the checkpoint lacks, in their order.
    restarts: The wrappers that start from the restored parameters.
    empty: The paths of leaves that start as zeros; their wrapper computes them
      from its other leaves.
  """

  step: CheckpointStep
  state: TrainState
  template: Mapping[str, PyTree]
  reads: Mapping[Path, jax.ShapeDtypeStruct]
  sources: Mapping[Path, Path]
  fresh: Sequence[Path]
  restarts: Sequence[wrapper_states.Restart]
  empty: Sequence[Path]

  def restore(self) -> TrainState:
    """Reads the leaves of the plan, and returns the restored state.

    Raises:
      Damaged: The files are damaged.
      ValueError: A leaf was not restored as it was asked for.
    """
    where = str(self.step.directory)
    # Reading needs no other process; later parts do.
    with multihost.raise_on_all_processes(digests.Damaged, ValueError):
      found = self._read(self.reads)
      validation.check_restored(where, found, self.reads)
    fields = self._complete_fields(found)
    # Every replica gets the one value of a per-replica collection.
    given = {name: getattr(self.state, name) for name in fields}
    return self.state.replace(**values.broadcast_to_replicas(fields, given))

  def _read(
    self, wanted: Mapping[Path, jax.ShapeDtypeStruct]
  ) -> dict[Path, jax.Array]:
    """Reads leaves, given by their paths in the state."""
    found: dict[Path, jax.Array] = {}
    for tree in self.step.saved_trees:
      mine = {
        self.sources[path]: path
        for path in wanted
        if self.sources[path] in tree.leaves
      }
      read = tree.read({source: wanted[path] for source, path in mine.items()})
      found |= {path: read[source] for source, path in mine.items()}
    return found

  def _complete_fields(
    self, found: Mapping[Path, jax.Array]
  ) -> dict[str, PyTree]:
    """Returns the fields of the state, with the leaves that were not read."""
    leaves = {
      **found,
      **self._copy_fresh_leaves(),
      **wrapper_states.zeros_like(self.template, self.empty),
    }
    collections = {
      name: _unflatten(tree, (name,), leaves)
      for name, tree in self.template.items()
      if name not in ("step", "opt_state", migrate.WRAPPER_STATES)
    }
    params = collections.pop("params")
    # An abstract state has no values for its fresh leaves.
    if missing := [path for path in self.fresh if path not in leaves]:
      leaves |= wrapper_states.compute_first_leaves(
        self.state.wrappers,
        self.state.tx,
        params,
        collections,
        self.template,
        missing,
      )
    # Last: the local copies of the replicas start from the optimizer state too.
    for restart in self.restarts:
      target = base.Target(
        leaves["step",],
        params,
        _unflatten(self.template["opt_state"], ("opt_state",), leaves),
        collections,
        wrapper_states={},
        new_collections={},
      )
      new = restart.compute_state(self.state.tx, target, found)
      leaves |= wrapper_states.leaves_of(new, restart.path)
      if restart.saved_replicas is not None:
        _log.warning(
          "%s has %s", self.step.directory, restart.describe_loss(new, found)
        )
    fields = {
      name: _unflatten(tree, (name,), leaves)
      for name, tree in self.template.items()
    }
    # Orbax returns arrays that are complete; so does this function.
    return jax.block_until_ready(fields)

  def _copy_fresh_leaves(self) -> dict[Path, jax.Array]:
    """Returns the fresh leaves that the given state has values of."""
    given = trees.leaves_by_path(
      {name: getattr(self.state, name) for name in self.template}
    )
    targets = trees.leaves_by_path(self.template)
    return {
      # A copy: a step may donate the restored state.
      path: jax.device_put(given[path], targets[path].sharding, may_alias=False)
      for path in self.fresh
      if not isinstance(given[path], jax.ShapeDtypeStruct)
    }


@dataclasses.dataclass(frozen=True)
class RestorePlans:
  """The plans for several train states by name, which one step holds."""

  plans: Mapping[str, Any]

  def restore(self) -> dict[str, TrainState]:
    """Restores each of the states, as `RestorePlan.restore`."""
    return {name: plan.restore() for name, plan in self.plans.items()}


def open_step(
  directory: step_names.Directory, plain_item: str | None = None
) -> CheckpointStep:
  """Compares the files of a step with their digests, and reads its metadata.

  Args:
    directory: The directory of the step, or its file.
    plain_item: The item that holds the train state; None looks for it.

  Raises:
    Damaged: The files differ from those that were saved, or hold no train
      state.
  """
  # Before Orbax reads anything: it returns wrong values for flipped bits.
  digests.verify_together(directory)
  with multihost.raise_on_all_processes(digests.Damaged, ValueError):
    plain = reader.plain(directory, plain_item)
    wrappers = reader.items(directory).get(wrapper_states.ITEM)
    saved_trees: tuple[reader.SavedTree, ...] = (plain,)
    if wrappers is not None:
      name = wrapper_states.ITEM
      tree = reader.orbax_tree(wrappers, name, migrate.WRAPPER_STATES)
      saved_trees = (plain, tree)
  return CheckpointStep(step_names.as_path(directory), saved_trees)


def check_state(state: Any) -> None:
  """Raises a TypeError unless `state` is a TrainState, or a dict of some."""
  if isinstance(state, Mapping) and state:
    for s in state.values():
      check_state(s)
    return
  if isinstance(state, TrainState):
    return
  kind = type(state)
  remedy = "make one with flaxshard.create_train_state."
  if isinstance(state, train_state.TrainState):
    remedy = (
      "use flaxshard.TrainState.create in place of Flax's, with the same "
      "arguments. flaxshard.checkpoint.restore reads what Flax's own state was "
      "saved as."
    )
  raise TypeError(
    f"state must be a flaxshard TrainState, got {kind.__module__}."
    f"{kind.__qualname__}: {remedy}"
  )


def _template(state: TrainState) -> dict[str, PyTree]:
  """Returns shape, dtype and sharding of the leaves to restore, by field."""

  def drop_replica_axis(x: Any) -> PyTree:
    if not values.is_per_replica(x):
      return x
    return jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), x.value
    )

  fields = {
    name: getattr(state, name) for name in fields_lib.array_field_names(state)
  }
  # A collection of the replicas was saved as one, their mean.
  template = validation.abstract(
    jax.tree.map(drop_replica_axis, fields, is_leaf=values.is_per_replica)
  )
  return {name: template[name] for name in fields}


def _fits(saved: Any, wanted: Any) -> bool:
  """Returns whether a saved Python number may become the wanted leaf."""
  return (
    isinstance(saved, reader.SavedScalar)
    and wanted is not None
    and saved.fits(wanted)
  )


def _leaves_by_path(fields: Mapping[str, PyTree]) -> dict[Path, Any]:
  """Returns the leaves of some fields of a train state, in their order."""
  leaves: dict[Path, Any] = {}
  # As a dict they would be sorted, and errors name the first path that differs:
  # a parameter says more than an optimizer slot.
  for name, tree in fields.items():
    leaves |= {
      (name, *path): x for path, x in trees.leaves_by_path(tree).items()
    }
  return leaves


def _split_items(
  leaves: Mapping[Path, Any],
) -> tuple[dict[Path, Any], dict[Path, Any]]:
  """Divides leaves into those of the train state and of the wrappers' item."""
  plain, wrappers = {}, {}
  for path, x in leaves.items():
    if path[0] == migrate.WRAPPER_STATES:
      wrappers[path[1:]] = x
    else:
      plain[path] = x
  return plain, wrappers


def _unflatten(
  tree: PyTree, at: Path, leaves: Mapping[Path, jax.Array]
) -> PyTree:
  """Returns a tree with the leaves that lie below a path."""
  return jax.tree.unflatten(
    jax.tree.structure(tree),
    [leaves[path] for path in wrapper_states.leaves_of(tree, at)],
  )
