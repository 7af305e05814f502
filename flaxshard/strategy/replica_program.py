"""The program that `Strategy.run` compiles: one function, on all replicas.

The function is the body of a `jax.shard_map` that is manual over the replicas;
the logical devices are left to XLA. The traced body is checked: a TrainState
must come back the same from every replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax.extend import core

from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas.values import Replicated
from flaxshard.strategy import arguments
from flaxshard.strategy import mesh_types
from flaxshard.strategy import narrow_sums
from flaxshard.strategy import replica_view
from flaxshard.strategy import replication
from flaxshard.strategy import replication_check
from flaxshard.strategy import step_warnings
from flaxshard.strategy.arguments import Layout
from flaxshard.wrappers import stack

# Errors of JAX for Python code that asks for the value of a traced array.
_NOT_KNOWN_WHILE_TRACING = (
  jax.errors.ConcretizationTypeError,
  jax.errors.TracerArrayConversionError,
  jax.errors.TracerIntegerConversionError,
)

PyTree = Any
P = jax.sharding.PartitionSpec


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaProgram:
  """A function on all replicas, for one structure and sharding of arguments.

  Attributes:
    mesh: The strategy's mesh.
    treedef: The structure of `(args, kwargs)`.
    shardings: The sharding of each leaf.
    layout: What the leaves are.
    get_function: Returns the function, when the program is traced.
    unplaced: The indices of the leaves that were not on a mesh when `run` was
      called.
    batch_dim: The dimension of a batch with the examples.
    warnings: The warnings of each traced program, by kind.
  """

  mesh: jax.sharding.Mesh
  treedef: Any
  shardings: tuple[Any, ...]
  layout: Layout
  get_function: Callable[[], Callable[..., PyTree]]
  unplaced: tuple[int, ...]
  batch_dim: int
  warnings: dict[str, str] = dataclasses.field(default_factory=dict)

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
    self._check(traced.jaxpr, in_specs, body.results, leaves)
    program = traced.jaxpr
    # On CPU bfloat16 is summed in float32.
    if self.mesh.devices.flat[0].platform != "cpu":
      program = narrow_sums.sum_before_widening(program)
    types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
    del types[mesh_lib.REPLICA]
    # Types of Explicit axes say how values are split.
    if set(types.values()) == {jax.sharding.AxisType.Auto}:
      program = mesh_types.forget_mesh(program)
    out = core.jaxpr_as_fun(program)(*leaves)
    count = body.results.per_replica.count(False)
    return self._assemble(body, out[:count], out[count:])

  def _context(
    self, leaves: Sequence[jax.Array]
  ) -> replica_context.ReplicaContext:
    return replica_context.ReplicaContext(
      self.mesh.shape[mesh_lib.REPLICA],
      param_specs=arguments.param_specs(self.treedef, leaves, self.shardings),
    )

  def _check(
    self,
    jaxpr: Any,
    in_specs: Sequence[P],
    results: Layout,
    leaves: Sequence[jax.Array],
  ) -> None:
    """Raises if a replicated result may differ; collects the warnings."""
    count = self.mesh.shape[mesh_lib.REPLICA]
    if count == 1:
      return
    inputs = [
      replication.by_groups(groups, count)
      for groups in _groups_of(self.layout, count)
    ]
    for i, spec in enumerate(in_specs):
      if mesh_lib.REPLICA in spec:
        inputs[i] = replication.per_replica(count)
    gradients = step_warnings.Gradients()
    outputs = replication_check.propagate(
      jaxpr, inputs, count, gradients.observe
    )
    # The outputs are ordered: first all that replicas must share.
    order = sorted(range(len(outputs)), key=results.per_replica.__getitem__)
    shared = order[: results.per_replica.count(False)]
    groups = _groups_of(results, count)
    replication_check.check(
      outputs[: len(shared)],
      [trees.path_string(results.paths[i]) for i in shared],
      [groups[i] for i in shared],
    )
    in_states = {
      state.start + i
      for state in results.states
      for i in range(state.treedef.num_leaves)
    }
    step = step_warnings.TracedStep(
      jaxpr,
      self.layout,
      inputs,
      in_specs,
      leaves,
      self.unplaced,
      self.batch_dim,
      [k for k, i in enumerate(order) if i not in in_states],
    )
    self.warnings.update(step.warnings(gradients))

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


def _groups_of(layout: Layout, num_replicas: int) -> list[replication.Groups]:
  """Returns, for each leaf, the groups of replicas that share its value.

  That is one group of all replicas, but for a TrainState whose wrappers reduce
  gradients within smaller groups.
  """
  groups: list[replication.Groups] = [[range(num_replicas)]] * len(layout.paths)
  for state in layout.states:
    count = state.treedef.num_leaves
    shared = stack.replica_groups(state.wrappers, num_replicas)
    groups[state.start : state.start + count] = [shared] * count
  return groups


class _Body:
  """The body of the `jax.shard_map`: the function as one replica runs it.

  Attributes:
    treedef: The structure of what the function returned, once it is traced.
    results: The layout of that.
  """

  treedef: Any
  results: Layout

  def __init__(
    self, outer: ReplicaProgram, context: replica_context.ReplicaContext
  ):
    self._outer = outer
    self._context = context

  def __call__(self, *leaves: jax.Array) -> tuple[list[Any], list[Any]]:
    outer = self._outer
    args, kwargs = replica_view.to_local(
      jax.tree.unflatten(outer.treedef, leaves)
    )
    fn = outer.get_function()
    with replica_context.activate(self._context):
      returned = _call(fn, args, kwargs)
    trees.check_arrays("run: what fn returned", returned)
    returned = replica_view.to_global(returned)
    out_leaves, self.treedef = jax.tree.flatten(returned)
    self.results = arguments.layout_of(returned)
    # The replicated results have one spec, the per-replica ones another.
    parts: tuple[list[Any], list[Any]] = ([], [])
    for leaf, kind in zip(out_leaves, self.results.per_replica, strict=True):
      parts[kind].append(leaf)
    return parts


def _call(fn: Callable[..., PyTree], args: Any, kwargs: Any) -> PyTree:
  """Calls `fn`, and says in errors of JAX what is special inside of `run`."""
  try:
    return fn(*args, **kwargs)
  except _NOT_KNOWN_WHILE_TRACING as e:
    # JAX names the arguments by their number among all leaves.
    e.add_note(
      "run: fn is traced, and so are all its arguments, numbers and booleans "
      "too. Bind what Python code decides by, such as "
      "functools.partial(fn, train=True), created once; or decide with "
      "jnp.where or jax.lax.cond."
    )
    raise
  except NameError as e:
    # The interpreter says which variable does not exist. JAX raises a NameError
    # without a `name` for a collective over an axis that does not exist.
    if type(e) is not NameError or e.name is not None:
      raise
    raise ValueError(
      f"run: {e} Inside of run the replicas are the axis "
      f"{mesh_lib.REPLICA!r}: write axis_name={mesh_lib.REPLICA!r}, as in "
      f"nn.BatchNorm(axis_name={mesh_lib.REPLICA!r}) or jax.lax.pmean(x, "
      f"{mesh_lib.REPLICA!r})."
    ) from e
