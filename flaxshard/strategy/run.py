"""Compiles functions that run once per replica: the core of `Strategy.run`.

A call has four stages. The arguments are sorted into per-replica and replicated
leaves, and put on the mesh (`arguments`). The function becomes the body of a
`jax.shard_map` that is manual over the replicas; the logical devices are left
to XLA. The traced body is checked: a TrainState must come back the same from
every replica (`replication_check`). The results are put back together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import contextvars
import dataclasses
import functools
from typing import Any, NamedTuple

import jax

from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas.values import Replicated
from flaxshard.strategy import arguments
from flaxshard.strategy import replica_view
from flaxshard.strategy import replication
from flaxshard.strategy import replication_check
from flaxshard.strategy.arguments import Layout
from flaxshard.wrappers import stack

PyTree = Any
Function = Callable[..., PyTree]
P = jax.sharding.PartitionSpec

# The function that is called. The compiled programs look it up when JAX traces
# them: if they referred to it, the cache would keep it alive.
_called: contextvars.ContextVar[Function] = contextvars.ContextVar("called")


class _LastCall(NamedTuple):
  """The last call with arguments of one structure.

  Attributes:
    compiled: The jitted program.
    shardings: The shardings that the leaves had; None for what is no JAX array.
    stay: The indices of the leaves that were on the mesh already.
    move: The indices of the leaves that must be put there.
  """

  compiled: Any
  shardings: list[Any]
  stay: list[int]
  move: list[int]


class Program:
  """The compiled forms of one function, by structure of its arguments.

  Args:
    mesh: The strategy's mesh.
    donate_argnums: The positions of arguments that may be overwritten.
    wait: Whether a call blocks until the results are computed.
    transform: Makes the function to run from the one that is called, when that
      is traced.
  """

  def __init__(
    self,
    mesh: jax.sharding.Mesh,
    donate_argnums: Sequence[int] = (),
    wait: bool = False,
    transform: Callable[[Function], Function] | None = None,
  ):
    self._mesh = mesh
    self._donate_argnums = donate_argnums
    self._wait = wait
    self._transform = transform
    self._layouts: dict[Any, Layout] = {}
    self._compiled: dict[Any, Any] = {}
    self._last_calls: dict[Any, _LastCall] = {}

  def call(self, fn: Function, args: Any, kwargs: Any) -> PyTree:
    """Calls `fn(*args, **kwargs)` on each replica; see `Strategy.run`."""
    if replica_context.get_replica_context() is not None:
      raise TypeError(
        "run: called inside of run, where this replica's program is traced. "
        "Call the function itself."
      )
    leaves, treedef = jax.tree.flatten((args, kwargs))
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    # In a training loop the shardings are the same objects in each step. Their
    # comparison is then the only work for each leaf.
    last = self._last_calls.get(treedef)
    if (
      last is None
      or last.shardings != shardings
      or any([leaves[i].is_deleted() for i in last.stay])
    ):
      compiled, leaves = self._prepare(args, kwargs)
      stays = [
        leaf.sharding == x for leaf, x in zip(leaves, shardings, strict=True)
      ]
      last = _LastCall(
        compiled,
        shardings,
        stay=[i for i, stay in enumerate(stays) if stay],
        move=[i for i, stay in enumerate(stays) if not stay],
      )
    else:
      layout = self._layouts[treedef]
      for i in last.move:
        leaves[i] = arguments.place(self._mesh, leaves[i], layout, i)
    token = _called.set(fn)
    try:
      out = last.compiled(*leaves)
    finally:
      _called.reset(token)
    # Only now: a call that raised must sort its arguments again.
    self._last_calls[treedef] = last
    return jax.block_until_ready(out) if self._wait else out

  def lower(self, fn: Function, args: Any, kwargs: Any) -> jax.stages.Lowered:
    """Lowers the program for arguments, which may be ShapeDtypeStructs."""
    compiled, leaves = self._prepare(args, kwargs)
    token = _called.set(fn)
    try:
      return compiled.lower(*leaves)
    finally:
      _called.reset(token)

  def _prepare(self, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
    """Returns the program for some arguments, and their leaves on the mesh."""
    if any(i >= len(args) for i in self._donate_argnums):
      raise ValueError(
        f"donate_argnums={tuple(self._donate_argnums)} must be positions of "
        f"arguments, of which there are {len(args)}."
      )
    leaves, treedef = jax.tree.flatten((args, kwargs))
    if treedef not in self._layouts:
      self._layouts[treedef] = arguments.layout_of((args, kwargs))
    layout = self._layouts[treedef]
    leaves = [
      arguments.place(self._mesh, leaf, layout, i)
      for i, leaf in enumerate(leaves)
    ]
    shardings = tuple(leaf.sharding for leaf in leaves)
    if (treedef, shardings) not in self._compiled:
      self._compiled[treedef, shardings] = self._jit(treedef, shardings)
    return self._compiled[treedef, shardings], leaves

  def _jit(self, treedef: Any, shardings: tuple[Any, ...]) -> Any:
    """Returns the jitted program for one structure and sharding."""
    layout = self._layouts[treedef]
    tree = jax.tree.unflatten(treedef, shardings)
    arguments.check_wrappers(self._mesh, tree)
    on_replicas = _OnReplicas(
      self._mesh, treedef, shardings, layout, self._transform
    )
    donated = [
      i
      for i, (positional, argument, *_) in enumerate(layout.paths)
      if positional.idx == 0 and argument.idx in self._donate_argnums
    ]
    return jax.jit(on_replicas.run, donate_argnums=donated)


class CompiledFunction:
  """The result of `Strategy.jit`: a function that runs once per replica."""

  def __init__(self, fn: Function, program: Program):
    functools.update_wrapper(self, fn)
    self._fn = fn
    self._program = program

  def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
    """Runs the function on each replica."""
    return self._program.call(self._fn, args, kwargs)

  def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """Lowers the program, as `jax.jit(...).lower` does."""
    return self._program.lower(self._fn, args, kwargs)


@dataclasses.dataclass(frozen=True, eq=False)
class _OnReplicas:
  """Runs the called function, for one structure and sharding of arguments.

  Attributes:
    mesh: The strategy's mesh.
    treedef: The structure of `(args, kwargs)`.
    shardings: The sharding of each leaf.
    layout: What the leaves are.
    transform: See `Program`.
  """

  mesh: jax.sharding.Mesh
  treedef: Any
  shardings: tuple[Any, ...]
  layout: Layout
  transform: Callable[[Function], Function] | None

  def run(self, *leaves: jax.Array) -> PyTree:
    """Returns what the function returns, on all replicas; it is jitted."""
    body = _Body(self, self._context(leaves))
    in_specs = tuple(
      map(arguments.replica_spec, self.shardings, self.layout.replicated)
    )
    mapped = jax.shard_map(
      body,
      mesh=self.mesh,
      in_specs=in_specs,
      out_specs=(P(), P(mesh_lib.REPLICA)),
      axis_names={mesh_lib.REPLICA},
      # With check_vma=True, jax.grad would sum the gradients of replicated
      # parameters over the replicas, and groups could not be reduced.
      check_vma=False,
    )
    # Traced once, for the check and for the call.
    jitted = jax.jit(mapped, inline=True)
    leaves = tuple(
      map(
        arguments.gather_replicated,
        leaves,
        self.shardings,
        self.layout.replicated,
      )
    )
    traced = jitted.trace(*leaves)
    self._check(traced.jaxpr, in_specs, body.results)
    replicated, per_replica = jitted(*leaves)
    return self._assemble(body, replicated, per_replica)

  def _context(
    self, leaves: Sequence[jax.Array]
  ) -> replica_context.ReplicaContext:
    return replica_context.ReplicaContext(
      self.mesh.shape[mesh_lib.REPLICA],
      param_specs=arguments.param_specs(self.treedef, leaves, self.shardings),
    )

  def _check(self, jaxpr: Any, in_specs: Sequence[P], results: Layout) -> None:
    """Raises if a replicated result may differ between replicas."""
    count = self.mesh.shape[mesh_lib.REPLICA]
    if count == 1:
      return
    same = replication.replicated(count)
    differs = replication.per_replica(count)
    groups: list[replication.Groups] = [[range(count)]] * len(results.paths)
    for state in results.states:
      for i in range(state.start, state.start + state.treedef.num_leaves):
        groups[i] = stack.replica_groups(state.wrappers, count)
    checked = [i for i, x in enumerate(results.per_replica) if not x]
    replication_check.check(
      jaxpr,
      [differs if mesh_lib.REPLICA in spec else same for spec in in_specs],
      [trees.path_string(results.paths[i]) for i in checked],
      [groups[i] for i in checked],
      count,
    )

  def _assemble(
    self, body: _Body, replicated: Sequence[Any], per_replica: Sequence[Any]
  ) -> PyTree:
    """Puts the results of `jax.shard_map` back into what `fn` returned."""
    results = body.results
    parts = iter(replicated), iter(per_replica)
    leaves = [next(parts[kind]) for kind in results.per_replica]
    arrived = list(self.layout.states)
    for state in results.states:
      # A state leaves with the shardings that it arrived with. Others would
      # make the next step compile again.
      like = next((s for s in arrived if s.treedef == state.treedef), None)
      if like is not None:
        arrived.remove(like)
      for i in range(state.treedef.num_leaves):
        k = state.start + i
        sharding = (
          arguments.default_sharding(
            self.mesh, per_replica=results.per_replica[k]
          )
          if like is None
          else self.shardings[like.start + i]
        )
        leaves[k] = mesh_lib.constrain(leaves[k], sharding)
    return jax.tree.map(
      lambda x: x.value if isinstance(x, Replicated) else x,
      jax.tree.unflatten(body.treedef, leaves),
      is_leaf=lambda x: isinstance(x, Replicated),
    )


class _Body:
  """The body of the `jax.shard_map`: the function as one replica runs it.

  Attributes:
    treedef: The structure of what the function returned, once it is traced.
    results: The layout of that.
  """

  treedef: Any
  results: Layout

  def __init__(
    self, outer: _OnReplicas, context: replica_context.ReplicaContext
  ):
    self._outer = outer
    self._context = context

  def __call__(self, *leaves: jax.Array) -> tuple[list[Any], list[Any]]:
    outer = self._outer
    args, kwargs = replica_view.to_local(
      jax.tree.unflatten(outer.treedef, leaves)
    )
    fn = _called.get()
    if outer.transform is not None:
      fn = outer.transform(fn)
    with replica_context.activate(self._context):
      returned = fn(*args, **kwargs)
    trees.check_arrays("run: what fn returned", returned)
    returned = replica_view.to_global(returned)
    out_leaves, self.treedef = jax.tree.flatten(returned)
    self.results = arguments.layout_of(returned)
    # The replicated results have one spec, the per-replica ones another.
    parts: tuple[list[Any], list[Any]] = ([], [])
    for leaf, kind in zip(out_leaves, self.results.per_replica, strict=True):
      parts[kind].append(leaf)
    return parts
