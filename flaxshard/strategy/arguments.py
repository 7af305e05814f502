"""The arguments and results of `Strategy.run`: what kind of leaf each one is.

A leaf is `OWN` (it has a leading replica axis, sharded over `"replica"`), or
`SHARED` (each replica sees all of it), or `SPLIT`: a plain array, of which each
replica sees the part that its sharding gives it. Inside of `run` a replica has
its own row of each `OWN` leaf: the value itself in place of a `PerReplica`, and
its own wrapper states and collections.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from flax import nnx
from flax.training import train_state as flax_train_state
import jax
import numpy as np

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import values
from flaxshard.wrappers import stack

PyTree = Any
Mesh = jax.sharding.Mesh
NamedSharding = jax.sharding.NamedSharding

OWN, SHARED, SPLIT = "own", "shared", "split"


class Leaf(NamedTuple):
  """A leaf of arguments or results: its place and its kind, not its value.

  Attributes:
    path: Its path.
    kind: `OWN`, `SHARED` or `SPLIT`.
    wrappers: The wrappers of the TrainState that it is part of, or None.
    sharding: That of an argument on the strategy's mesh; None before.
    is_placed: Whether the user has put an argument on a mesh, or it has no
      values.
  """

  path: Any
  kind: str
  wrappers: stack.Wrappers | None
  sharding: Any = None
  is_placed: bool = False

  @property
  def argument(self) -> str:
    """Its path in the arguments of a call, for messages."""
    return f"argument {trees.path_string(self.path[1:])}"

  @property
  def spec(self) -> jax.P:
    """The dimensions of which each replica sees its part."""
    if self.kind == SPLIT and self.sharding is not None:
      return mesh_lib.only(self.sharding.spec, [mesh_lib.REPLICA])
    return jax.P(mesh_lib.REPLICA) if self.kind == OWN else jax.P()

  def check_rows(self, shape: tuple[int, ...], num_replicas: int) -> None:
    """Raises a ValueError if it lacks rows, or has more rows than replicas."""
    if self.kind == OWN and shape[:1] != (num_replicas,):
      raise ValueError(
        f"run: {self.argument}, which each replica has for itself, must have "
        f"the {num_replicas} replicas as its first dimension, got shape "
        f"{shape}."
      )


def is_state(x: Any) -> bool:
  """Returns whether `x` is a TrainState, Flax's own or ours."""
  return isinstance(x, flax_train_state.TrainState)


def is_node(x: Any) -> bool:
  """Returns whether `x` is a TrainState, a `PerReplica` or a `Replicated`."""
  return is_state(x) or isinstance(x, (values.PerReplica, values.Replicated))


def flatten(tree: PyTree) -> Iterator[tuple[Leaf, Any]]:
  """Yields what each leaf of arguments or results is, and the leaf."""
  # What kind of leaf it is depends on the node around it.
  for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_node):
    wrappers = getattr(node, "wrappers", ()) if is_state(node) else None
    shared = wrappers is not None or isinstance(node, values.Replicated)
    if wrappers:
      # A wrapper says by its specs which of its leaves are per replica.
      states = stack.map_per_replica(
        lambda name, x: values.PerReplica(x), wrappers, node.wrapper_states
      )
      node = node.replace(wrapper_states=states)
    for inner, x in jax.tree_util.tree_leaves_with_path(
      node, is_leaf=values.is_per_replica
    ):
      kind = SHARED if shared else SPLIT
      if values.is_per_replica(x):
        kind, x = OWN, x.value
      for rest, value in jax.tree_util.tree_leaves_with_path(x):
        yield Leaf((*path, *inner, *rest), kind, wrappers), value


# -- The arguments, before they are on the mesh.


def refuse_modules(args: PyTree) -> None:
  """Raises a TypeError if NNX modules or optimizers are among arguments."""
  is_module = lambda x: isinstance(x, nnx.Pytree)
  for path, x in jax.tree_util.tree_leaves_with_path(args, is_leaf=is_module):
    # As a tree it is copied, so that what changes in it would be lost.
    if is_module(x):
      raise TypeError(
        f"run: argument {trees.path_string(path[1:])} is a "
        f"{type(x).__name__} of NNX, whose changes would be lost: parameters, "
        "batch statistics, random streams. Make a TrainState with "
        "create_train_state(model, ...), or call the step under nnx.jit. To "
        "compute with a model that does not change, pass nnx.state(model) as "
        "the argument, and call nnx.merge in fn."
      )


def place(mesh: Mesh, x: Any, leaf: Leaf) -> Any:
  """Puts an argument on the mesh, if it is not there already.

  Args:
    mesh: The strategy's mesh.
    x: The argument; a `jax.ShapeDtypeStruct` for lowering.
    leaf: What it is. If an argument like it was put on the mesh before, it has
      the sharding of that one.

  Returns:
    The array, with a sharding on the mesh.

  Raises:
    TypeError: The argument is not an array, or is traced.
    ValueError: It was donated, is per replica for another number of replicas,
      is sharded on another mesh, is split over replicas though the wrappers let
      replicas differ in it, has integers that do not fit their dtype in JAX, or
      is not the same in all processes.
  """
  placed = x
  if not isinstance(x, jax.core.Tracer):
    if isinstance(x, jax.Array):
      if x.is_deleted():
        raise ValueError(
          f"run: {leaf.argument} is deleted: it was donated to an earlier call."
        )
    elif trees.is_array(x):
      trees.check_integers(f"run: {leaf.argument}", x)
    else:
      raise TypeError(
        f"run: {leaf.argument} must be an array or a number, got "
        f"{checks.describe(x)}. Values of other types are bound to the "
        "function: functools.partial(fn, name=value), created once."
      )
    leaf.check_rows(np.shape(x), mesh.shape[mesh_lib.REPLICA])
    target = leaf.sharding or _sharding_on(mesh, x, leaf)
    if getattr(x, "sharding", None) == target:
      return x
    is_shape = isinstance(x, jax.ShapeDtypeStruct)
    if is_shape or mesh_lib.is_compile_only(mesh):
      return mesh_lib.abstract_array(x, target)
    try:
      placed = mesh_lib.put(x, target)
    except AssertionError as e:  # JAX has compared the processes
      raise ValueError(
        f"run: {leaf.argument} must be the same in all processes: {e}"
      ) from e
  # A NumPy array is traced only now, if `run` is called inside jax.jit.
  if isinstance(placed, jax.core.Tracer):
    raise TypeError(
      f"run: {leaf.argument} is traced: a Strategy compiles by itself. Call it "
      "outside of jax.jit, jax.grad, jax.vmap, jax.eval_shape and run; for "
      "several steps in one program there is run_steps."
    )
  return placed


def _sharding_on(mesh: Mesh, x: Any, leaf: Leaf) -> NamedSharding:
  """Returns the sharding with which an argument enters the program."""
  sharding = getattr(x, "sharding", None)
  if not isinstance(sharding, NamedSharding):
    return NamedSharding(mesh, leaf.spec)
  if sharding.mesh != mesh:
    # A whole copy can be moved. The parts of a batch of another strategy lie on
    # the wrong devices, or in the wrong order: most likely a mistake.
    if leaf.kind != OWN and not sharding.is_fully_replicated:
      raise ValueError(
        f"run: {leaf.argument} is sharded on another mesh, of other axes or "
        f"devices, or in another order: {sharding}. Shard it on strategy.mesh, "
        f"{mesh}."
      )
    return NamedSharding(mesh, leaf.spec)
  spec = sharding.spec
  if leaf.kind == SHARED:
    # XLA returns the state with this form of the spec. Any other form would
    # make the second step compile again.
    spec = mesh_lib.shortest(spec, mesh)
    w = leaf.wrappers or ()
    steps_alone = stack.groups_of(w) or stack.reduces(w) == "local"
    if steps_alone and mesh_lib.REPLICA in mesh_lib.axes_in(spec):
      raise ValueError(
        f"run: {leaf.argument} is split over 'replica', {spec}, though its "
        "wrappers let replicas step alone: split it over logical axes. "
        f"{stack.divergence(w) or ''}"
      )
  elif leaf.kind == OWN and not values.has_replica_axis(spec):
    spec = jax.P(mesh_lib.REPLICA, *spec[1:])
  # An array that was offloaded to host memory stays there.
  return NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)


# -- Between the view of all replicas and that of one.


def to_local(node: Any) -> Any:
  """Returns a node of the arguments as a replica sees it, without `PerReplica`.

  Args:
    node: A TrainState, a `PerReplica`, or an array. Of what each replica has
      for itself it has this replica's row.
  """
  if values.is_per_replica(node):
    return node.value
  if not is_state(node):
    return node
  node = _swap_collections(node)
  # Not without one: Flax's own TrainState has no field for the paths.
  if own_paths := values.paths_of_per_replica(node):
    node = jax.tree.map(to_local, node, is_leaf=values.is_per_replica)
    node = node.replace(own_paths=own_paths)
  return node


def to_global(node: Any) -> Any:
  """Undoes `to_local` on a node of what a function returned.

  Args:
    node: A TrainState, a `Replicated`, or an array, which becomes a
      `PerReplica`.

  Raises:
    TypeError: The function returned a `PerReplica`.
  """
  if values.paths_of_per_replica(node):
    raise TypeError(
      "run: fn returned a PerReplica. fn must return this replica's value; "
      "run returns a PerReplica with the values of all replicas."
    )
  if not is_node(node):
    return values.PerReplica(node)
  if own_paths := getattr(node, "own_paths", None):
    is_own = lambda path, _: trees.path_strings(path) in own_paths
    node = jax.tree.map_with_path(
      lambda path, x: values.PerReplica(x) if is_own(path, x) else x,
      node,
      is_leaf=is_own,
      is_leaf_takes_path=True,
    ).replace(own_paths=frozenset())
  return _swap_collections(node)


def _swap_collections(state: Any) -> Any:
  """Exchanges the collections of a state for those that a wrapper keeps."""
  for w in getattr(state, "wrappers", ()):
    kept = state.wrapper_states[w.name]
    if stack.keeps_collections(kept):
      given = {name: getattr(state, name) for name in kept.collections}
      own = kept._replace(collections=given)
      states = {**state.wrapper_states, w.name: own}
      state = state.replace(wrapper_states=states, **kept.collections)
  return state
