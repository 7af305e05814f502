"""Starts the states of wrappers that a checkpoint cannot restore as saved.

A checkpoint may have no state of a wrapper, or one for another number of
replicas. A wrapper with a `restart` method then starts from the restored
parameters. Any other wrapper starts with its first state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from flaxshard.checkpoint import migrate
from flaxshard.checkpoint import reader
from flaxshard.core import trees
from flaxshard.wrappers import base
from flaxshard.wrappers import config as wrappers_config
from flaxshard.wrappers import stack

PyTree = Any
Path = tuple[str, ...]

ITEM = reader.WRAPPERS_ITEM


def nonempty(states: Mapping[str, PyTree]) -> dict[str, PyTree]:
  """Returns the states that have leaves to save."""
  return {name: s for name, s in states.items() if jax.tree.leaves(s)}


def foreign_paths(
  wrappers: Sequence[base.Base],
) -> dict[str, dict[Path, Path]]:
  """Returns which leaves of plain Flax train states wrappers can migrate.

  Args:
    wrappers: The wrappers of the train state. Those of flaxshard are added: a
      checkpoint may hold a field that the train state has no wrapper for.

  Returns:
    By wrapper name, those of the train state first: the path in the wrapper's
    state for each path in a plain train state.
  """
  known = {base.name_of(w): w.foreign_paths for w in wrappers}
  for cls in wrappers_config.built_in_wrappers():
    known.setdefault(base.name_of(cls), cls.foreign_paths)
  return {
    name: {
      tuple(path.split("/")): tuple(own.split("/"))
      for path, own in paths.items()
    }
    for name, paths in known.items()
    if paths
  }


def leaves_of(tree: PyTree, at: Path) -> dict[Path, Any]:
  """Returns the leaves of a subtree by their paths in the train state."""
  return {(*at, *path): x for path, x in trees.leaves_by_path(tree).items()}


@dataclasses.dataclass(frozen=True)
class Restart:
  """A wrapper whose state starts from the restored parameters.

  Attributes:
    wrapper: The wrapper.
    path: The path of its state in the train state.
    template: Shapes, dtypes and shardings of its state.
    per_replica: The paths of its per-replica leaves.
    replicas: The number of replicas of the train state.
    saved_replicas: The number of replicas that the checkpoint has its state
      for; None if it has no state of the wrapper.
    saved_per_replica: The paths of the leaves that are per replica in the
      checkpoint. With other hyper-parameters of the wrapper, as the `transport`
      of AGN, they are others.
  """

  wrapper: base.Base
  path: Path
  template: PyTree
  per_replica: tuple[Path, ...]
  replicas: int
  saved_replicas: int | None
  saved_per_replica: tuple[Path, ...]

  def saved_leaves(self) -> dict[Path, jax.ShapeDtypeStruct]:
    """Returns the leaves that the checkpoint must have."""
    count = self.saved_replicas
    if count is None:
      return {}
    leaves = {}
    for path, x in leaves_of(self.template, self.path).items():
      has_axis, sharding = path in self.per_replica, x.sharding
      shape = x.shape[1:] if has_axis else x.shape
      if path in self.saved_per_replica:
        shape = (count, *shape)
      if has_axis != (path in self.saved_per_replica):
        # The spec is for another number of dimensions.
        sharding = _replicate(sharding)
      leaves[path] = jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
    return leaves

  def read_leaves(self) -> dict[Path, jax.ShapeDtypeStruct]:
    """Returns the leaves that are of use for any number of replicas.

    These are the replicated leaves and the scalars of the replicas. The other
    saved leaves are compared with the state, but not read.
    """
    leaves = {}
    for path, x in self.saved_leaves().items():
      has_axis = path in self.saved_per_replica
      if not has_axis and path not in self.per_replica:
        leaves[path] = x
      elif x.ndim == has_axis and not jnp.issubdtype(
        x.dtype, jax.dtypes.prng_key
      ):
        # The mesh of now may not divide the number of saved replicas.
        sharding = _replicate(x.sharding)
        leaves[path] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return leaves

  def compute_state(
    self, tx: Any, target: base.Target, found: Mapping[Path, jax.Array]
  ) -> PyTree:
    """Returns the new state of the wrapper.

    Args:
      tx: The optimizer.
      target: The restored step, parameters, optimizer state and collections.
      found: The arrays that were read for `read_leaves`.

    Raises:
      ValueError: The wrapper's `restart` returns a tree unlike its state.
    """
    at, name = self.path, self.path[-1]

    def restart_on_replicas(
      target: base.Target, found: list[jax.Array]
    ) -> PyTree:
      # The wrapper sees one replica: the scalars of the first stand for all.
      saved = {
        "/".join(path[len(at) :]): x[0] if path in self.saved_per_replica else x
        for path, x in zip(paths, found, strict=True)
      }
      wrappers = (self.wrapper,)
      first = stack.drop_replica_axis(
        wrappers, stack.init(wrappers, target.params, tx, target.collections)
      )
      new = self.wrapper.restart(first[name], target, saved)
      states = stack.add_replica_axis(wrappers, {name: new}, self.replicas)
      new = trees.conform(
        f"wrapper {name!r}: restart", states[name], self.template
      )
      # Not the buffers of the parameters: a step may donate both.
      return trees.unshare_buffers((target, new))[1]

    paths = [path for path in self.read_leaves() if path in found]
    # Sharded outputs, so that no device ever holds the copies of all replicas.
    shardings = jax.tree.map(lambda x: x.sharding, self.template)
    jitted = jax.jit(restart_on_replicas, out_shardings=shardings)
    return jitted(target, [found[path] for path in paths])

  def describe_loss(self, new: PyTree, found: Mapping[Path, jax.Array]) -> str:
    """Returns what a restart on another number of replicas loses.

    Args:
      new: The new state of the wrapper.
      found: The arrays that were read for `read_leaves`.
    """
    at = self.path
    lost = [
      f"; {'/'.join(path[len(at) :])} goes back from {int(found[path])} to "
      f"{int(x)} (accumulated steps lost: {int(found[path]) - int(x)})"
      for path, x in leaves_of(new, at).items()
      if path in found
      and path not in self.saved_per_replica
      and not x.shape
      and jnp.issubdtype(x.dtype, jnp.integer)
      and int(x) < int(found[path])
    ]
    dropped = dict.fromkeys(
      path[len(at)] for path in self.saved_per_replica or self.per_replica
    )
    saved, now = f"{self.saved_replicas} replicas", f"there are {self.replicas}"
    if not self.saved_per_replica:
      saved, now = "all replicas of a process together", f"{now} with their own"
    elif not self.per_replica:
      now = "it is one for all replicas of a process"
    return (
      f"the state of wrapper {at[-1]!r} for {saved}, now {now}: each begins at "
      "the restored parameters. Dropped are the per-replica "
      f"{', '.join(dropped)}{''.join(lost)}."
    )


def find_restarts(
  wrappers: Sequence[base.Base],
  templates: Mapping[str, PyTree],
  saved: Mapping[Path, Any],
) -> list[Restart]:
  """Returns the wrappers that start from the restored parameters.

  Args:
    wrappers: The wrappers of the train state.
    templates: Shapes, dtypes and shardings of their states, by name.
    saved: The leaves of the checkpoint, by path in the train state.

  Raises:
    ValueError: A wrapper without `restart` was saved with another number of
      replicas.
  """
  restarts = []
  for wrapper in wrappers:
    path = (migrate.WRAPPER_STATES, base.name_of(wrapper))
    template = templates[path[-1]]
    if not jax.tree.leaves(template):
      continue
    mask = base.per_replica_mask(wrapper, template)
    leaves = leaves_of(template, path)
    per_replica = tuple(itertools.compress(leaves, mask))
    if not base.overrides(wrapper, "restart"):
      _check_num_replicas(path[-1], {p: leaves[p] for p in per_replica}, saved)
      continue
    replicas = leaves[per_replica[0]].shape[0] if per_replica else 1
    saved_replicas, saved_per_replica = None, per_replica
    if migrate.has_prefix(saved, path):
      saved_per_replica = _saved_per_replica(leaves, per_replica, saved)
      # By the first leaf that is saved; the plan compares the others with it.
      counts = [
        saved[p].shape[0]
        for p in saved_per_replica
        if p in saved and saved[p].shape
      ]
      if saved_per_replica == per_replica and (
        not counts or counts[0] == replicas
      ):
        continue  # it is restored as it was saved
      saved_replicas = counts[0] if counts else 1
    restarts.append(
      Restart(
        wrapper,
        path,
        template,
        per_replica,
        replicas,
        saved_replicas,
        saved_per_replica,
      )
    )
  return restarts


def _saved_per_replica(
  leaves: Mapping[Path, Any],
  per_replica: Sequence[Path],
  saved: Mapping[Path, Any],
) -> tuple[Path, ...]:
  """Returns the leaves of a wrapper that are per replica in a checkpoint.

  Args:
    leaves: The leaves of its state, by path.
    per_replica: Those that are per replica in the state.
    saved: The leaves of the checkpoint.
  """
  shapes = {
    path: (tuple(saved[path].shape), tuple(x.shape))
    for path, x in leaves.items()
    if path in saved
  }
  if not per_replica:
    return tuple(
      path
      for path, (shape, own) in shapes.items()
      if len(shape) > len(own) and shape[1:] == own
    )
  known = [shapes[path] for path in per_replica if path in shapes]
  # All of them or none: otherwise they are leaves of another model.
  if known and all(shape == own[1:] for shape, own in known):
    return ()
  return tuple(per_replica)


def _replicate(sharding: Any) -> Any:
  """Returns a sharding on the same devices that splits nothing."""
  if isinstance(sharding, jax.sharding.NamedSharding):
    return jax.sharding.NamedSharding(sharding.mesh, jax.P())
  return sharding


def _check_num_replicas(
  name: str, leaves: Mapping[Path, Any], saved: Mapping[Path, Any]
) -> None:
  """Raises a ValueError if only the number of replicas differs in a leaf."""
  for path, leaf in leaves.items():
    shape = saved[path].shape if path in saved else leaf.shape
    if shape[1:] == leaf.shape[1:] and shape != leaf.shape and shape:
      raise ValueError(
        f"wrapper {name!r} was saved with {shape[0]} replicas, and has "
        f"{leaf.shape[0]} here: it keeps a value for each replica, and does "
        "not define `restart`, which makes a state for another number."
      )


def derived_paths(
  wrappers: Sequence[base.Base], paths: Sequence[Path]
) -> set[Path]:
  """Returns the paths of leaves in the `derived_fields` of wrappers.

  Args:
    wrappers: The wrappers of the train state.
    paths: Paths of leaves, of a train state or of a checkpoint.
  """
  roots = {
    (migrate.WRAPPER_STATES, base.name_of(w), field)
    for w in wrappers
    for field in w.derived_fields
  }
  return {path for path in paths if path[:3] in roots}


def expected_shapes(
  targets: Mapping[Path, Any], restarts: Sequence[Restart]
) -> dict[Path, tuple[int, ...]]:
  """Returns the shapes that leaves of a state have in its checkpoint.

  Args:
    targets: The leaves of the state, by path.
    restarts: The wrappers that were saved with another number of replicas.
  """
  shapes = {path: tuple(x.shape) for path, x in targets.items()}
  for restart in restarts:
    for path, x in restart.saved_leaves().items():
      shapes[path] = tuple(x.shape)
  return shapes


def zeros_like(
  template: Mapping[str, PyTree], paths: Sequence[Path]
) -> dict[Path, jax.Array]:
  """Returns zeros for leaves of a train state.

  Args:
    template: Shapes, dtypes and shardings of the train state, by field.
    paths: The paths of the leaves.
  """
  if not paths:
    return {}
  leaves = trees.leaves_by_path(template)
  create = jax.jit(
    lambda: [jnp.zeros(leaves[p].shape, leaves[p].dtype) for p in paths],
    out_shardings=[leaves[p].sharding for p in paths],
  )
  return dict(zip(paths, create(), strict=True))


def compute_first_leaves(
  wrappers: Sequence[base.Base],
  tx: Any,
  params: PyTree,
  collections: dict[str, PyTree],
  template: Mapping[str, PyTree],
  wanted: Sequence[Path],
) -> dict[Path, jax.Array]:
  """Computes leaves that the checkpoint lacks, as a new train state has them.

  Args:
    wrappers: The wrappers of the train state.
    tx: The optimizer.
    params: The restored parameters.
    collections: The other restored collections, by name.
    template: Shapes, dtypes and shardings of the train state, by field.
    wanted: The paths of the leaves, in `wrapper_states`.
  """

  def compute_leaves(params: PyTree, collections: Any) -> list[jax.Array]:
    leaves: dict[Path, Any] = {}
    for wrapper in wrappers:
      name = base.name_of(wrapper)
      if any(path[:2] == (migrate.WRAPPER_STATES, name) for path in wanted):
        state = template[migrate.WRAPPER_STATES][name]
        mask = base.per_replica_mask(wrapper, state)
        lengths = [
          x.shape[0] for x in itertools.compress(jax.tree.leaves(state), mask)
        ]
        states = stack.init(
          (wrapper,), params, tx, collections, lengths[0] if lengths else 1
        )
        leaves |= leaves_of(states, (migrate.WRAPPER_STATES,))
    # Not the buffers of the parameters: a step may donate both.
    given = (params, collections)
    return trees.unshare_buffers((given, [leaves[path] for path in wanted]))[1]

  leaf_templates = trees.leaves_by_path(template)
  jitted = jax.jit(
    compute_leaves, out_shardings=[leaf_templates[p].sharding for p in wanted]
  )
  return dict(zip(wanted, jitted(params, collections), strict=True))
