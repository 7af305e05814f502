"""Functions that run once per replica, compiled: what `Strategy.run` calls.

The arguments are sorted into what each replica has its own part of and what is
mirrored; the function becomes the body of a `jax.shard_map` that is manual over
the replicas and leaves the logical devices to XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas.values import is_per_replica
from flaxshard.replicas.values import Replicated
from flaxshard.strategy import replica_view
from flaxshard.strategy import replication_check
from flaxshard.wrappers import stack

PyTree = Any

P = jax.sharding.PartitionSpec


def compile(
  mesh: jax.sharding.Mesh,
  fn: Callable[..., PyTree],
  donate_argnums: Sequence[int] = (),
  waits: bool = False,
) -> Callable[..., PyTree]:
  """Returns `fn`, run once per replica; see `Strategy.jit`."""
  context = replica_context.ReplicaContext(mesh.shape[mesh_lib.REPLICA])
  layouts: dict[Any, _Layout] = {}
  recent: dict[Any, _Recent] = {}

  @functools.lru_cache(maxsize=128)
  def program(treedef: Any, shardings: tuple[Any, ...]) -> Any:
    """Returns what is jitted for one structure and layout of arguments."""
    layout = layouts[treedef]
    _check_wrappers(mesh, jax.tree.unflatten(treedef, shardings))

    def once(*leaves: jax.Array) -> PyTree:
      out: Any = None  # the structure of what comes back, and its layout
      within = dataclasses.replace(
        context, param_specs=_param_specs(treedef, leaves, shardings)
      )

      def per_replica(*leaves: jax.Array) -> tuple[list[Any], list[Any]]:
        nonlocal out
        args, kwargs = replica_view.to_local(
          jax.tree.unflatten(treedef, leaves)
        )
        with replica_context.activate(within):
          returned = fn(*args, **kwargs)
        trees.check_arrays("run: what fn returned", returned)
        returned = replica_view.to_global(returned)
        out_leaves, structure = jax.tree.flatten(returned)
        out = structure, _layout(returned)
        parts: tuple[list[Any], list[Any]] = ([], [])
        for leaf, own in zip(out_leaves, out[1].own, strict=True):
          parts[own].append(leaf)
        return parts

      in_specs = tuple(map(_replica_spec, shardings, layout.mirrored))
      parallel = jax.shard_map(
        per_replica,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=(P(), P(mesh_lib.REPLICA)),
        axis_names={mesh_lib.REPLICA},
        # Gradients stay this replica's own until they are reduced, however
        # they were taken, and groups of replicas can be reduced.
        check_vma=False,
      )
      # Traced once, for the check and for the call.
      body = jax.jit(parallel, inline=True)
      leaves = tuple(map(_gathered, leaves, shardings, layout.mirrored))
      traced = body.trace(*leaves)
      structure, out_layout = out
      if context.num_replicas_in_sync > 1:
        replication_check.check(
          traced.jaxpr,
          [mesh_lib.REPLICA in spec for spec in in_specs],
          out_layout.shared_paths(),
        )
      mirrored, own = body(*leaves)
      parts = iter(mirrored), iter(own)
      out_leaves = [next(parts[own]) for own in out_layout.own]
      came = list(layout.states)
      for treedef_, start in out_layout.states:
        # A state comes back laid out as it came, so that nothing recompiles.
        like = [state for state in came if state[0] == treedef_]
        if like:
          came.remove(like[0])
        for i in range(treedef_.num_leaves):
          sharding = _sharding(mesh, own=out_layout.own[start + i])
          if like:
            sharding = shardings[like[0][1] + i]
          out_leaves[start + i] = mesh_lib.constrain(
            out_leaves[start + i], sharding
          )
      tree = jax.tree.unflatten(structure, out_leaves)
      return jax.tree.map(
        lambda x: x.value if isinstance(x, Replicated) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Replicated),
      )

    donated = [
      i
      for i, (positional, argument, *_) in enumerate(layout.paths)
      if positional.idx == 0 and argument.idx in donate_argnums
    ]
    return jax.jit(once, donate_argnums=donated)

  def placed(args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
    """Returns the program for arguments, and their leaves, on the mesh."""
    if any(i >= len(args) for i in donate_argnums):
      raise ValueError(
        f"donate_argnums={tuple(donate_argnums)} must be positions of "
        f"arguments, of which there are {len(args)}."
      )
    leaves, treedef = jax.tree.flatten((args, kwargs))
    if treedef not in layouts:
      layouts[treedef] = _layout((args, kwargs))
    layout = layouts[treedef]
    leaves = [_place(mesh, leaf, layout, i) for i, leaf in enumerate(leaves)]
    return program(treedef, tuple(leaf.sharding for leaf in leaves)), leaves

  @functools.wraps(fn)
  def call(*args: Any, **kwargs: Any) -> PyTree:
    if replica_context.get_replica_context() is not None:
      raise TypeError(
        "run: called inside of run, where this replica's program is traced. "
        "Call the function itself."
      )
    leaves, treedef = jax.tree.flatten((args, kwargs))
    given = [getattr(leaf, "sharding", None) for leaf in leaves]
    # Step after step these are the same objects, which compare fast.
    last = recent.get(treedef)
    if (
      last is None
      or last.given != given
      or any([leaves[i].is_deleted() for i in last.stay])
    ):
      compiled, leaves = placed(args, kwargs)
      stays = [
        leaf.sharding == x for leaf, x in zip(leaves, given, strict=True)
      ]
      last = _Recent(
        compiled,
        given,
        stay=[i for i, stay in enumerate(stays) if stay],
        move=[i for i, stay in enumerate(stays) if not stay],
      )
    else:
      for i in last.move:
        leaves[i] = _place(mesh, leaves[i], layouts[treedef], i)
    out = last.compiled(*leaves)
    recent[treedef] = last
    return jax.block_until_ready(out) if waits else out

  def lower(*args: Any, **kwargs: Any) -> Any:
    compiled, leaves = placed(args, kwargs)
    return compiled.lower(*leaves)

  call.lower = lower  # type: ignore[attr-defined]
  return call


class _Recent(NamedTuple):
  """What was called last with arguments of one structure."""

  compiled: Any
  given: list[Any]  # the shardings of the leaves; None: no JAX array
  stay: list[int]  # the leaves that were on the mesh
  move: list[int]  # those that are put there


@dataclasses.dataclass(frozen=True)
class _Layout:
  """What the leaves of a tree of arguments or outputs are.

  Attributes:
    own: Of each leaf, whether its first dimension is the replicas.
    mirrored: Of each leaf, whether it is whole on each replica however it is
      sharded: the leaves of a TrainState that are not `own`.
    paths: Of each leaf, where it is.
    states: Of each TrainState, its structure and its first leaf.
  """

  own: tuple[bool, ...]
  mirrored: tuple[bool, ...]
  paths: tuple[Any, ...]
  states: tuple[tuple[Any, int], ...]

  def shared_paths(self) -> list[str]:
    """Returns where the leaves are that are one for all replicas."""
    return [
      trees.path_string(path)
      for path, own in zip(self.paths, self.own, strict=True)
      if not own
    ]


def _layout(tree: PyTree) -> _Layout:
  own: list[bool] = []
  mirrored: list[bool] = []
  paths: list[Any] = []
  states: list[tuple[Any, int]] = []
  nodes = jax.tree_util.tree_leaves_with_path(
    tree, is_leaf=replica_view.is_node
  )
  for path, node in nodes:
    inner = [p for p, _ in jax.tree_util.tree_leaves_with_path(node)]
    paths += [(*path, *p) for p in inner]
    if replica_view.is_state(node):
      states.append((jax.tree.structure(node), len(own)))
      own += jax.tree.leaves(replica_view.per_replica_mask(node))
      mirrored += [not x for x in own[states[-1][1] :]]
    else:
      own += [is_per_replica(node)] * len(inner)
      mirrored += [isinstance(node, Replicated)] * len(inner)
  return _Layout(tuple(own), tuple(mirrored), tuple(paths), tuple(states))


def _param_specs(
  treedef: Any, leaves: Sequence[Any], shardings: Sequence[Any]
) -> tuple[Any, ...]:
  """Returns how the parameters of TrainStates are split in a replica."""
  nodes = (
    jax.tree.leaves(
      jax.tree.unflatten(treedef, x), is_leaf=replica_view.is_state
    )
    for x in (leaves, shardings)
  )
  return tuple(
    (
      jax.tree.map(_logical_spec, split.params),
      [x.shape for x in jax.tree.leaves(state.params)],
    )
    for state, split in zip(*nodes, strict=True)
    if replica_view.is_state(state)
  )


def _check_wrappers(mesh: jax.sharding.Mesh, tree: PyTree) -> None:
  """Raises where the wrappers of a TrainState, of shardings, cannot run."""
  for state in jax.tree.leaves(tree, is_leaf=replica_view.is_state):
    wrappers = getattr(state, "wrappers", ())
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
    mirrored = jax.tree.map(
      lambda x: () if is_per_replica(x) else x,
      state.replace(wrapper_states=()),
      is_leaf=is_per_replica,
    )
    for path, sharding in jax.tree_util.tree_leaves_with_path(mirrored):
      if mesh_lib.REPLICA in specs_lib.axes_in(sharding.spec):
        raise ValueError(
          f"run: state[{trees.path_string(path)}] is split over 'replica', "
          f"{sharding.spec}, {note}"
        )


def _sharding(
  mesh: jax.sharding.Mesh, *, own: bool
) -> jax.sharding.NamedSharding:
  return jax.sharding.NamedSharding(mesh, P(mesh_lib.REPLICA) if own else P())


def _replica_spec(sharding: jax.sharding.NamedSharding, mirrored: bool) -> P:
  """Returns what a sharding says of the replicas."""
  if mirrored:
    return P()
  return P(
    *(
      mesh_lib.REPLICA if mesh_lib.REPLICA in specs_lib.axes_of(entry) else None
      for entry in sharding.spec
    )
  )


def _gathered(
  x: jax.Array, sharding: jax.sharding.NamedSharding, mirrored: bool
) -> jax.Array:
  """Makes what is split over replicas, but mirrored, whole on each of them."""
  if not mirrored or mesh_lib.REPLICA not in specs_lib.axes_in(sharding.spec):
    return x
  # Where axes are Explicit, shard_map does not do that by itself.
  return mesh_lib.constrain(
    x, jax.sharding.NamedSharding(sharding.mesh, _logical_spec(sharding))
  )


def _logical_spec(sharding: jax.sharding.NamedSharding) -> P:
  """Returns what a sharding says of the logical devices."""
  dims = map(specs_lib.axes_of, sharding.spec)
  return P(
    *(tuple(a for a in d if a != mesh_lib.REPLICA) or None for d in dims)
  )


def _place(
  mesh: jax.sharding.Mesh, leaf: Any, layout: _Layout, index: int
) -> Any:
  """Returns the leaf on the mesh, where it is not there already."""
  where = f"run: argument {trees.path_string(layout.paths[index][1:])}"
  if isinstance(leaf, jax.core.Tracer):
    raise _traced(where)
  trees.check_arrays(where, leaf)
  if trees.dtype_of(leaf) == jax.dtypes.float0:
    raise TypeError(f"{where} is of dtype float0, which no device can hold.")
  if isinstance(leaf, jax.Array) and leaf.is_deleted():
    raise ValueError(f"{where} is deleted: it was donated to an earlier call.")
  own = layout.own[index]
  replicas = mesh.shape[mesh_lib.REPLICA]
  if own and (not np.ndim(leaf) or np.shape(leaf)[0] != replicas):
    kind = "a PerReplica"
    if "wrapper_states" in trees.path_strings(layout.paths[index]):
      kind = (
        "which create_train_state(..., strategy=...) makes for each replica"
      )
    raise ValueError(
      f"{where}, {kind}, must have the {replicas} replicas "
      f"as its first dimension, got shape {np.shape(leaf)}."
    )
  target = _sharding(mesh, own=own)
  sharding = getattr(leaf, "sharding", None)
  if isinstance(sharding, jax.sharding.NamedSharding):
    if sharding.mesh == mesh:
      spec = sharding.spec
      if layout.mirrored[index]:
        # Written as XLA gives it back, or the next step would compile again.
        dims = tuple(map(specs_lib.axes_of, spec))
        spec = specs_lib.shortest(dims, mesh)
      if own and mesh_lib.REPLICA not in specs_lib.axes_of((*spec, None)[0]):
        spec = P(mesh_lib.REPLICA, *spec[1:])
      target = jax.sharding.NamedSharding(
        mesh, spec, memory_kind=sharding.memory_kind
      )
    elif not own and not sharding.is_fully_replicated:
      raise ValueError(
        f"{where} is sharded on another mesh, of other axes or devices, or in "
        f"another order: {sharding}. Shard it on strategy.mesh, {mesh}."
      )
  if isinstance(leaf, jax.ShapeDtypeStruct):  # which `lower` takes
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target)
  placed = mesh_lib.put(leaf, target)
  if isinstance(placed, jax.core.Tracer):
    raise _traced(where)
  return placed


def _traced(where: str) -> TypeError:
  return TypeError(
    f"{where} is traced: a Strategy compiles by itself. Call it outside of "
    "jax.jit; for several steps in one program there is run_steps."
  )
