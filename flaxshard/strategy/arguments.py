"""The arguments and results of `Strategy.run`: what kind of leaf each one is.

A leaf is *per replica* (it has a leading replica axis, sharded over
`"replica"`), or *replicated* (each replica sees all of it), or a plain array,
of which each replica sees the part that its sharding gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

from flax import nnx
import jax
import numpy as np

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.partitioning import compile_only
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib
from flaxshard.replicas.values import is_per_replica
from flaxshard.replicas.values import Replicated
from flaxshard.strategy import replica_view
from flaxshard.wrappers import stack

PyTree = Any
Mesh = jax.sharding.Mesh
NamedSharding = jax.sharding.NamedSharding
P = jax.sharding.PartitionSpec


class StateLeaves(NamedTuple):
  """The place of a TrainState among the leaves of a tree.

  Attributes:
    treedef: The structure of the state.
    start: The index of its first leaf.
    wrappers: Its wrappers.
  """

  treedef: Any
  start: int
  wrappers: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
  """The kind and the path of each leaf of arguments or results.

  Attributes:
    per_replica: For each leaf, whether it is per replica.
    replicated: For each leaf, whether it is replicated, however it is sharded:
      so are the other leaves of a TrainState.
    paths: For each leaf, its path.
    states: The TrainStates in the tree.
  """

  per_replica: tuple[bool, ...]
  replicated: tuple[bool, ...]
  paths: tuple[Any, ...]
  states: tuple[StateLeaves, ...]


def layout_of(tree: PyTree) -> Layout:
  """Returns the layout of a tree of arguments or results.

  Raises:
    TypeError: The tree has an `nnx.Optimizer`.
  """
  per_replica: list[bool] = []
  replicated: list[bool] = []
  paths: list[Any] = []
  states: list[StateLeaves] = []
  # What kind of leaf it is depends on the node around it.
  nodes = jax.tree_util.tree_leaves_with_path(
    tree,
    is_leaf=lambda x: replica_view.is_node(x) or isinstance(x, nnx.Optimizer),
  )
  for path, node in nodes:
    # As a tree it is copied, so that its update would be lost.
    if isinstance(node, nnx.Optimizer):
      raise TypeError(
        f"run: argument {trees.path_string(path[1:])} is an nnx.Optimizer, "
        "whose update and whose module's changes would be lost. Call the step "
        "under nnx.jit, or make a TrainState with create_train_state(model, "
        "...)."
      )
    inner = [p for p, _ in jax.tree_util.tree_leaves_with_path(node)]
    paths += [(*path, *p) for p in inner]
    if replica_view.is_state(node):
      treedef = jax.tree.structure(node)
      wrappers = replica_view.wrappers_of(node)
      states.append(StateLeaves(treedef, len(per_replica), wrappers))
      mask = jax.tree.leaves(replica_view.per_replica_mask(node))
      per_replica += mask
      replicated += [not x for x in mask]
    else:
      per_replica += [is_per_replica(node)] * len(inner)
      replicated += [isinstance(node, Replicated)] * len(inner)
  return Layout(
    tuple(per_replica), tuple(replicated), tuple(paths), tuple(states)
  )


def check_wrappers(mesh: Mesh, shardings: PyTree) -> None:
  """Raises if the wrappers of a TrainState cannot run on a mesh.

  Args:
    mesh: The strategy's mesh.
    shardings: The arguments, with their shardings for leaves.

  Raises:
    ValueError: A wrapper does not fit the number of replicas, or a leaf is
      split over replicas though the wrappers let replicas differ in it.
  """
  for state in jax.tree.leaves(shardings, is_leaf=replica_view.is_state):
    wrappers = replica_view.wrappers_of(state)
    stack.check_replicas(wrappers, mesh.shape[mesh_lib.REPLICA])
    note = stack.divergence(wrappers)
    if note is not None:
      note = f"which groups that differ cannot be. {note}"
    elif stack.has_local_updates(wrappers):
      note = (
        "and would be gathered at every step, where replicas that step alone "
        "have nothing to communicate. Split over logical axes."
      )
    else:
      continue
    # Per-replica leaves are split over the replicas on purpose.
    others = jax.tree.map(
      lambda x: () if is_per_replica(x) else x,
      state.replace(wrapper_states=()),
      is_leaf=is_per_replica,
    )
    for path, sharding in jax.tree_util.tree_leaves_with_path(others):
      if mesh_lib.REPLICA in specs_lib.axes_in(sharding.spec):
        raise ValueError(
          f"run: state[{trees.path_string(path)}] is split over 'replica', "
          f"{sharding.spec}, {note}"
        )


# -- Where arguments lie.


def place(mesh: Mesh, leaf: Any, layout: Layout, index: int) -> Any:
  """Puts an argument on the mesh, if it is not there already.

  Args:
    mesh: The strategy's mesh.
    leaf: A leaf of the arguments; a `jax.ShapeDtypeStruct` for lowering.
    layout: The layout of the arguments.
    index: The index of the leaf.

  Returns:
    The array, with a sharding on the mesh.

  Raises:
    TypeError: The leaf is not an array, or is traced.
    ValueError: The leaf was donated, is per replica for another number of
      replicas, is sharded on another mesh, has integers that do not fit their
      dtype in JAX, or is not the same in all processes.
  """
  where = f"run: argument {trees.path_string(layout.paths[index][1:])}"
  if isinstance(leaf, jax.core.Tracer):
    raise _traced_error(where)
  if not trees.is_array(leaf):
    raise TypeError(
      f"{where} must be an array or a number, got {checks.describe(leaf)}. "
      "Values of other types are bound to the function: "
      "functools.partial(fn, name=value), created once."
    )
  trees.check_integers(where, leaf)
  if isinstance(leaf, jax.Array) and leaf.is_deleted():
    raise ValueError(f"{where} is deleted: it was donated to an earlier call.")
  replicas = mesh.shape[mesh_lib.REPLICA]
  if layout.per_replica[index] and np.shape(leaf)[:1] != (replicas,):
    raise ValueError(
      f"{where}, which each replica has for itself, must have the {replicas} "
      f"replicas as its first dimension, got shape {np.shape(leaf)}."
    )
  target = _target_sharding(where, mesh, leaf, layout, index)
  if isinstance(leaf, jax.ShapeDtypeStruct) or compile_only.is_compile_only(
    mesh
  ):
    return compile_only.abstract_array(leaf, target)
  try:
    placed = mesh_lib.put(leaf, target)
  except AssertionError as e:  # JAX has compared the processes
    raise ValueError(f"{where} must be the same in all processes: {e}") from e
  # A NumPy array is traced only now, if `run` is called inside jax.jit.
  if isinstance(placed, jax.core.Tracer):
    raise _traced_error(where)
  return placed


def default_sharding(mesh: Mesh, *, per_replica: bool) -> NamedSharding:
  """Returns the sharding of an array that has none on the mesh."""
  return NamedSharding(mesh, P(mesh_lib.REPLICA) if per_replica else P())


def _target_sharding(
  where: str, mesh: Mesh, leaf: Any, layout: Layout, index: int
) -> NamedSharding:
  """Returns the sharding with which an argument enters the program."""
  per_replica = layout.per_replica[index]
  sharding = getattr(leaf, "sharding", None)
  if not isinstance(sharding, NamedSharding):
    return default_sharding(mesh, per_replica=per_replica)
  if sharding.mesh != mesh:
    # A whole copy can be moved. The parts of a batch of another strategy lie on
    # the wrong devices, or in the wrong order: most likely a mistake.
    if not per_replica and not sharding.is_fully_replicated:
      raise ValueError(
        f"{where} is sharded on another mesh, of other axes or devices, or in "
        f"another order: {sharding}. Shard it on strategy.mesh, {mesh}."
      )
    return default_sharding(mesh, per_replica=per_replica)
  spec = sharding.spec
  if layout.replicated[index]:
    # XLA returns the state with this form of the spec. Any other form would
    # make the second step compile again.
    dims = tuple(map(specs_lib.axes_of, spec))
    spec = specs_lib.shortest(dims, mesh)
  if per_replica and mesh_lib.REPLICA not in specs_lib.axes_of(
    (*spec, None)[0]
  ):
    spec = P(mesh_lib.REPLICA, *spec[1:])
  # An array that was offloaded to host memory stays there.
  return NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)


def _traced_error(where: str) -> TypeError:
  return TypeError(
    f"{where} is traced: a Strategy compiles by itself. Call it outside of "
    "jax.jit, jax.grad, jax.vmap and jax.eval_shape; for several steps in one "
    "program there is run_steps."
  )


# -- How `jax.shard_map` splits them.


def replica_spec(sharding: NamedSharding, replicated: bool) -> P:
  """Returns the part of a sharding that concerns replicas."""
  if replicated:
    return P()
  return P(
    *(
      mesh_lib.REPLICA if mesh_lib.REPLICA in specs_lib.axes_of(entry) else None
      for entry in sharding.spec
    )
  )


def logical_spec(sharding: NamedSharding) -> P:
  """Returns the part of a sharding that concerns logical devices."""
  dims = map(specs_lib.axes_of, sharding.spec)
  return P(
    *(tuple(a for a in d if a != mesh_lib.REPLICA) or None for d in dims)
  )


def gather_replicated(
  x: jax.Array, sharding: NamedSharding, replicated: bool
) -> jax.Array:
  """Gathers a replicated leaf that is stored split over the replicas."""
  if not replicated or mesh_lib.REPLICA not in specs_lib.axes_in(sharding.spec):
    return x
  # jax.shard_map gathers by itself only where the axes are Auto.
  return mesh_lib.constrain(
    x, NamedSharding(sharding.mesh, logical_spec(sharding))
  )


def param_specs(
  treedef: Any, leaves: Sequence[Any], shardings: Sequence[Any]
) -> tuple[Any, ...]:
  """Returns how the parameters of each TrainState are split in a replica.

  Args:
    treedef: The structure of the arguments.
    leaves: Their leaves.
    shardings: The sharding of each leaf.

  Returns:
    For each TrainState, PartitionSpecs over the logical axes like `params`, and
    a list of the shapes of the parameters.
  """
  # Two states may have the same structure: the shapes tell them apart.
  arrays, splits = (
    jax.tree.leaves(
      jax.tree.unflatten(treedef, x), is_leaf=replica_view.is_state
    )
    for x in (leaves, shardings)
  )
  return tuple(
    (
      jax.tree.map(logical_spec, split.params),
      [x.shape for x in jax.tree.leaves(state.params)],
    )
    for state, split in zip(arrays, splits, strict=True)
    if replica_view.is_state(state)
  )
