"""The program that `Strategy.run` compiles: one function, on all replicas.

The function is the body of a `jax.shard_map` that is manual over the replicas;
the logical devices are left to XLA. The traced body is checked: a TrainState
must come back the same from every replica. For `Strategy.run_steps` the
function is a loop over batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas.values import has_replica_axis
from flaxshard.replicas.values import is_per_replica
from flaxshard.replicas.values import Replicated
from flaxshard.strategy import arguments
from flaxshard.strategy import mistakes
from flaxshard.strategy import rewrites
from flaxshard.wrappers import stack

PyTree = Any
NamedSharding = jax.sharding.NamedSharding
Function = Callable[..., PyTree]
# The structure of a tree of reductions; each of them: None, "sum" or "mean".
Reductions = tuple[Any, tuple[str | None, ...]]


class Options(NamedTuple):
  """The options with which a function is compiled.

  Attributes:
    mesh: The strategy's mesh.
    donate_argnums: The positions of arguments that may be overwritten.
    reductions: Of a function for `Strategy.run_steps`: how the outputs of the
      last step are reduced; else None.
  """

  mesh: jax.sharding.Mesh
  donate_argnums: tuple[int, ...] = ()
  reductions: Reductions | None = None


def run(
  get_function: Callable[[], Function | None],
  options: Options,
  leaves: Sequence[arguments.Leaf],
  /,
  *args: PyTree,
  **kwargs: PyTree,
) -> PyTree:
  """Returns what a function returns, on all replicas; it is jitted.

  Args:
    get_function: Returns the function, when the program is traced.
    options: How it is compiled.
    leaves: What the leaves of the arguments are.
    *args: The positional arguments, on the mesh.
    **kwargs: The keyword arguments, on the mesh.
  """
  arrays = jax.tree.leaves((args, kwargs))
  treedef: Any = jax.tree.structure((args, kwargs))
  mesh, replicas = options.mesh, options.mesh.shape[mesh_lib.REPLICA]
  given = treedef.unflatten(
    [
      jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=leaf.sharding)
      for x, leaf in zip(arrays, leaves, strict=True)
    ]
  )
  nodes = jax.tree.leaves(given, is_leaf=arguments.is_state)
  states = [x for x in nodes if arguments.is_state(x)]
  context = replica_context.ReplicaContext(
    replicas, params=tuple([state.params for state in states])
  )
  for wrappers in {getattr(state, "wrappers", ()) for state in states}:
    stack.check_replicas(wrappers, replicas)
  # Batches that are no list have the steps as their first dimension.
  is_stacked = options.reductions is not None and not isinstance(
    given[0][1], list
  )
  if is_stacked:
    _check_stacked(given[0][1])
  returned: list[Any] = []

  def body(*arrays: jax.Array) -> tuple[dict[int, Any], dict[int, Any]]:
    rows = [
      x[0] if leaf.kind == arguments.OWN else x
      for x, leaf in zip(arrays, leaves, strict=True)
    ]
    args, kwargs = jax.tree.map(
      arguments.to_local, treedef.unflatten(rows), is_leaf=arguments.is_node
    )
    fn = get_function()
    assert fn is not None
    if options.reductions is not None:
      fn = functools.partial(run_loop, fn, options.reductions)
    with replica_context.activate(context):
      out = _call(fn, args, kwargs)
    trees.check_arrays("run: what fn returned", out)
    out = jax.tree.map(arguments.to_global, out, is_leaf=arguments.is_node)
    # What each replica has for itself has another spec.
    kinds, shared, own = [], dict[int, Any](), dict[int, Any]()
    for i, (leaf, x) in enumerate(arguments.flatten(out)):
      kinds.append(leaf)
      if leaf.kind == arguments.OWN:
        own[i] = jnp.asarray(x)[None]  # an axis of one replica
      else:
        shared[i] = x
    returned[:] = jax.tree.structure(out), kinds
    return shared, own

  parts = []
  for x, leaf in zip(arrays, leaves, strict=True):
    # Arrays that were on the mesh already may have other shapes than before.
    leaf.check_rows(x.shape, replicas)
    if leaf.kind == arguments.SHARED:
      # jax.shard_map gathers what is stored split over the replicas, but only
      # where the axes are Auto.
      stored = leaf.sharding.spec
      gathered = mesh_lib.only(stored, mesh_lib.logical_axes(mesh))
      if gathered != stored:
        x = mesh_lib.constrain(x, NamedSharding(mesh, gathered))
    parts.append(x)
  mapped = jax.shard_map(
    body,
    mesh=mesh,
    in_specs=tuple(leaf.spec for leaf in leaves),
    out_specs=(jax.P(), jax.P(mesh_lib.REPLICA)),
    axis_names={mesh_lib.REPLICA},
    # With check_vma=True, jax.grad would sum the gradients of replicated
    # parameters over the replicas, and groups could not be reduced.
    check_vma=False,
  )
  # Traced once, for the check and for the call.
  traced = jax.jit(mapped, inline=True).trace(*parts)
  program = traced.jaxpr
  out_treedef, kinds = returned
  # The numbers of the leaves, in the order in which the program returns them.
  order = [i for group in traced.out_info for i in group]
  results = [kinds[i] for i in order]
  mistakes.check_program(program, leaves, results, replicas, is_stacked)
  # On CPU bfloat16 is summed in float32.
  if mesh.devices.flat[0].platform != "cpu":
    program = rewrites.sum_before_widening(program)
  # Types of Explicit axes say how values are split.
  if set(mesh.axis_types[1:]) == {jax.sharding.AxisType.Auto}:
    program = rewrites.forget_mesh(program)
  by_number = dict(zip(order, core.jaxpr_as_fun(program)(*parts), strict=True))
  out = out_treedef.unflatten([by_number[i] for i in range(len(order))])
  place = functools.partial(_place, mesh, states)
  return jax.tree.map(place, out, is_leaf=arguments.is_node)


def _place(mesh: jax.sharding.Mesh, arrived: list[Any], node: Any) -> Any:
  """Gives a TrainState that a function returns its shardings.

  Args:
    mesh: The strategy's mesh.
    arrived: The states among the arguments, as shapes with shardings; those
      that have come back already are at the end.
    node: A TrainState, or another part of the results.
  """
  if isinstance(node, Replicated):
    return node.value
  if not arguments.is_state(node):
    return node
  treedef: Any = jax.tree.structure(node)
  # A state leaves with the shardings that it arrived with. Others would make
  # the next step compile again, and what was split would be whole.
  arrived.sort(key=lambda x: jax.tree.structure(x) != treedef)
  arrived[:] = arrived[1:] + arrived[:1]
  known = {
    (leaf.path, x.shape): x.sharding
    for state in arrived[-1:]
    for leaf, x in arguments.flatten(state)
  }
  return treedef.unflatten(
    [
      mesh_lib.constrain(
        x, known.get((leaf.path, x.shape)) or NamedSharding(mesh, leaf.spec)
      )
      for leaf, x in arguments.flatten(node)
    ]
  )


def _call(fn: Function, args: Any, kwargs: Any) -> PyTree:
  """Calls `fn`, and says in an error of JAX which axis the replicas are."""
  try:
    return fn(*args, **kwargs)
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


# -- A loop over several steps, for `Strategy.run_steps`.


def _check_stacked(batches: PyTree) -> None:
  """Raises a ValueError if one batch is given in place of several.

  Args:
    batches: Shapes `[steps, ...]` with shardings.
  """
  for path, x in jax.tree.leaves_with_path(batches, is_leaf=is_per_replica):
    if not is_per_replica(x) and has_replica_axis(x.sharding.spec):
      # Its examples, split over the replicas, would be taken for steps.
      raise ValueError(
        f"run_steps: batches[{trees.path_string(path)}] of shape {x.shape} is "
        "split over the replicas along its first dimension, which is that of "
        "the steps. Pass a list of batches, [batch], or arrays [steps, batch, "
        "...] with the sharding PartitionSpec(None, 'replica')."
      )


def run_loop(
  step_fn: Function,
  reductions: Reductions,
  state: PyTree,
  batches: PyTree,
) -> tuple[PyTree, PyTree]:
  """Takes a step for each batch, on one replica.

  Args:
    step_fn: See `Strategy.run_steps`.
    reductions: How the outputs of the last step are reduced.
    state: The first state.
    batches: See `Strategy.run_steps`.

  Returns:
    The last state, and the outputs of the last step.
  """

  def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
    out = step_fn(state, batch)
    # By type: a state may be a NamedTuple.
    return out if type(out) is tuple and len(out) == 2 else (out, None)

  if isinstance(batches, list) and batches:
    batches = jax.tree.map(lambda *x: jnp.stack(x), *batches)
  steps = {np.shape(x)[:1] for x in jax.tree.leaves(batches)}
  if len(steps) != 1 or steps & {(), (0,)}:
    raise ValueError(
      "run_steps: all leaves of batches must have the same number of steps, at "
      f"least one, as their first dimension, got {sorted(steps)}."
    )
  # jax.lax.scan needs an initial carry of the outputs' shapes.
  _, outputs = jax.eval_shape(
    lambda batches: step(state, jax.tree.map(lambda x: x[0], batches)),
    batches,
  )
  # The outputs are carried, not stacked: only those of the last step are
  # returned.
  zeros = jax.tree.map(
    lambda x: jax.lax.full(x.shape, 0, x.dtype, sharding=x.sharding), outputs
  )
  (state, outputs), _ = jax.lax.scan(
    lambda carry, batch: (step(carry[0], batch), None),
    (state, zeros),
    batches,
  )
  context = replica_context.get_replica_context()
  structure, ops = reductions
  reduced = [
    part if op is None else Replicated(context.all_reduce(op, part))
    for op, part in zip(ops, structure.flatten_up_to(outputs), strict=True)
  ]
  return state, structure.unflatten(reduced)
