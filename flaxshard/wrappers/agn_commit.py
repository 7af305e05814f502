"""What replicas commit, and how it reaches the center: together, or in turn.

`update(center, grads, shared)` is one update of the center, a pair of the
parameters and of what the optimizer keeps for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flax.training import train_state
import jax
import jax.numpy as jnp

from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import optimizer_update as update
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import agn_rows
from flaxshard.wrappers import elementwise
from flaxshard.wrappers.agn_rows import Parts

PyTree = Any
P = jax.sharding.PartitionSpec


class ModelState(NamedTuple):
  """What all replicas have together.

  Attributes:
    params: The parameters.
    opt_state: The state of the optimizer that updates them.
  """

  params: PyTree
  opt_state: PyTree


Update = Callable[[ModelState, PyTree, PyTree], ModelState]


def combined(
  op: str, update: Update, center: ModelState, grads: PyTree, shared: PyTree
) -> tuple[ModelState, PyTree]:
  """Updates the center once, with the sum or the mean of all commits.

  Args:
    op: "sum" or "mean".
    update: One update of the center.
    center: The center.
    grads: What this replica commits; None where it has nothing.
    shared: What else `update` gets, the same on all replicas.

  Returns:
    The new center, and the parameters that this replica goes on with.
  """
  center = update(center, replica_context.reduce_gradients(op, grads), shared)
  return center, center.params


def sequential(
  update: Update, center: ModelState, grads: PyTree, shared: PyTree
) -> tuple[ModelState, PyTree]:
  """Updates the center with one commit after another, in replica order.

  As a parameter server that is sharded over the replicas: each gets its part of
  everybody's commit, applies them in turn to its part of the center, and sends
  everybody the parameters as they were after their commit. That needs an update
  that treats elements by themselves; with any other, each commit is sent whole
  to all replicas, which all do all updates.

  Args:
    update: One update of the center.
    center: The center.
    grads: What this replica commits; None where it has nothing.
    shared: What else `update` gets, the same on all replicas.

  Returns:
    The new center, and the parameters that this replica goes on with: those
    right after its own commit.
  """
  if replica_context.num_replicas() == 1 or not jax.tree.leaves(grads):
    center = update(center, grads, shared)
    return center, center.params
  specs = replica_context.specs_within(center.params)
  if specs is None:
    specs = jax.tree.map(lambda _: P(), center.params)
  specs = _specs_of(center, grads, specs)
  # Checked for what each device has of it: the update might look at shapes.
  split = _Split.of(
    *jax.tree.map(replica_context.part_of, (center, grads), specs)
  )
  if all(_is_real(g) for g in jax.tree.leaves(grads)) and (
    elementwise.is_elementwise(
      update,
      (center, grads, shared),
      (split.center.shapes, split.grads.shapes, shared),
      (
        split.center.dims,
        split.grads.dims,
        jax.tree.map(lambda _: elementwise.WHOLE, shared),
      ),
    )
  ):
    return _on_each_part(update, center, grads, shared, specs)
  return _whole(update, center, grads, shared)


def _specs_of(
  center: ModelState, grads: PyTree, specs: PyTree
) -> tuple[ModelState, PyTree]:
  """Returns how the center and what is committed are split in a replica."""
  slot_specs = opt_state_lib.specs(center.opt_state, center.params, specs)
  grad_specs = jax.tree.map(
    lambda spec, g: None if g is None else spec, specs, grads
  )
  return ModelState(specs, slot_specs), grad_specs


def _on_each_part(
  update: Update, center: ModelState, grads: PyTree, shared: PyTree, specs: Any
) -> tuple[ModelState, PyTree]:
  """Lets the logical devices of each replica exchange what they have."""
  in_parts = lambda center, grads, shared: _in_parts(
    update, center, grads, shared, _Split.of(center, grads)
  )
  if not any(jax.tree.leaves(specs)):
    return in_parts(center, grads, shared)
  center_specs, grad_specs = specs
  return replica_context.on_logical_devices(
    in_parts,
    (center_specs, grad_specs, P()),
    (center_specs, center_specs.params),
  )(center, grads, shared)


class _Split(NamedTuple):
  """How center and commits are divided over the replicas."""

  center: Parts
  grads: Parts
  new_local_params: Parts  # the parameters that a commit can change

  @classmethod
  def of(cls, center: ModelState, grads: PyTree) -> _Split:
    count = replica_context.num_replicas()
    treedef: Any = jax.tree.structure(center.params)
    params = jax.tree.leaves(center.params)
    given = treedef.flatten_up_to(grads)
    dims = [
      elementwise.WHOLE if g is None else agn_rows.dim_of(p.shape, count)
      for g, p in zip(given, params, strict=True)
    ]
    # Where an optimizer's slots are divided is found as where they are placed.
    specs = [
      P(*(None,) * d, mesh_lib.REPLICA) if d != elementwise.WHOLE else P()
      for d in dims
    ]
    slot_specs = opt_state_lib.specs(
      center.opt_state, center.params, treedef.unflatten(specs)
    )
    slot_dims = jax.tree.map(
      lambda spec: len(spec) - 1 if tuple(spec) else elementwise.WHOLE,
      slot_specs,
    )
    changed = [i for i, g in enumerate(given) if g is not None]
    some = [dims[i] for i in changed]
    return cls(
      Parts.of(center, ModelState(treedef.unflatten(dims), slot_dims), count),
      Parts.of(grads, some, count),
      Parts.of([params[i] for i in changed], some, count),
    )


def _in_parts(
  update: Update,
  center: ModelState,
  grads: PyTree,
  shared: PyTree,
  split: _Split,
) -> tuple[ModelState, PyTree]:
  number = jax.lax.axis_index(mesh_lib.REPLICA)
  treedef: Any = jax.tree.structure(center.params)
  changed = [g is not None for g in treedef.flatten_up_to(grads)]
  pick = lambda params: [
    p for p, one in zip(jax.tree.leaves(params), changed, strict=True) if one
  ]
  # A row makes room for the parameters that follow from its commit.
  dtype = _common_dtype(grads, center.params)
  rows = _exchange(split.grads.to_rows(grads, dtype))

  def commit(k: jax.Array, carry: tuple[ModelState, jax.Array]) -> Any:
    part, rows = carry
    part = update(part, split.grads.from_row(rows[k]), shared)
    row = split.new_local_params.to_row(pick(part.params), dtype)
    return part, rows.at[k].set(row)

  part = split.center.part_of(center, number)
  part, rows = jax.lax.fori_loop(
    0, replica_context.num_replicas(), commit, (part, rows)
  )
  new = split.center.gather(part)
  back = split.new_local_params.from_rows(
    _exchange(rows.astype(_narrowest(dtype, pick(center.params))))
  )
  own = iter(back)
  new_local_params = [
    next(own) if one else p
    for p, one in zip(jax.tree.leaves(new.params), changed, strict=True)
  ]
  return new, treedef.unflatten(new_local_params)


def _exchange(rows: jax.Array) -> jax.Array:
  """Sends row i to replica i; row i of the result is from replica i."""
  return jax.lax.all_to_all(rows, mesh_lib.REPLICA, 0, 0)


def _whole(
  update: Update, center: ModelState, grads: PyTree, shared: PyTree
) -> tuple[ModelState, PyTree]:
  number = jax.lax.axis_index(mesh_lib.REPLICA)

  def commit(k: jax.Array, carry: tuple[ModelState, PyTree]) -> Any:
    center, new_local_params = carry
    mine = number == k
    sent = jax.tree.map(lambda g: jnp.where(mine, g, jnp.zeros_like(g)), grads)
    center = update(
      center, replica_context.reduce_over_replicas("sum", sent), shared
    )
    new_local_params = jax.tree.map(
      lambda new, old: jnp.where(mine, new, old),
      center.params,
      new_local_params,
    )
    return center, new_local_params

  # One commit at a time: all of them at once are a copy for each replica.
  return jax.lax.fori_loop(
    0, replica_context.num_replicas(), commit, (center, center.params)
  )


def _is_real(x: jax.Array) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating)


def _common_dtype(*trees: PyTree) -> Any:
  """Returns a dtype that holds every number of some trees."""
  wide = any(x.dtype == jnp.float64 for x in jax.tree.leaves(trees))
  return jnp.float64 if wide else jnp.float32


def _narrowest(dtype: Any, params: list[jax.Array]) -> Any:
  """Returns the dtype that parameters can be sent in."""
  dtypes = {p.dtype for p in params}
  return dtypes.pop() if len(dtypes) == 1 else dtype


def accumulated(dtype: Any) -> Any:
  """Returns float32 for dtypes below it, which lose what is added up."""
  return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype


def accumulate(accum: PyTree, change: PyTree, applied: jax.Array) -> PyTree:
  """Adds what a step brings to the accumulators, if it was applied."""

  def add(a: Any, x: Any) -> Any:
    if a is None or x is None:
      return a
    return a + jnp.where(applied, x, jnp.zeros_like(x)).astype(a.dtype)

  return jax.tree.map(add, accum, change, is_leaf=lambda x: x is None)


def param_delta(old: PyTree, new: PyTree) -> PyTree:
  """Returns how far parameters have gone, in the direction of gradients."""
  wide = lambda x: x.astype(accumulated(x.dtype))
  return jax.tree.map(lambda o, n: wide(o) - wide(n), old, new)


def commit_gradients(accum: PyTree, grads: PyTree, params: PyTree) -> PyTree:
  """Returns what a replica commits; None where it has no gradient.

  Args:
    accum: What has come together.
    grads: The gradients of this step, for which leaves that have none now, but
      had some in the period, make no difference.
    params: The replica's parameters.
  """

  def one(path: trees.Path, p: jax.Array, a: Any, g: Any) -> Any:
    # Of statistics that overwrite the newest, no sum of them.
    return p if gradients.is_statistic(path) and g is not None else a

  return jax.tree_util.tree_map_with_path(one, params, accum, grads)


def received_gradient(committed: PyTree, grads: PyTree) -> dict[str, jax.Array]:
  """Returns whether anything has come together for leaves without a gradient.

  Args:
    committed: What a replica commits.
    grads: The gradients of this step.

  Returns:
    A bool scalar by path, the same on all replicas, for each leaf that has no
    gradient in this step and may have had some before.
  """
  given = dict(
    jax.tree_util.tree_leaves_with_path(grads, is_leaf=lambda g: g is None)
  )
  came = {
    trees.path_string(path): jnp.any(x != 0).astype(jnp.int32)
    for path, x in jax.tree_util.tree_leaves_with_path(committed)
    if given[path] is None
  }
  some = replica_context.reduce_over_replicas("max", came) if came else came
  return {path: x > 0 for path, x in some.items()}


def keep(
  old: ModelState, new: ModelState, given: dict[str, jax.Array]
) -> ModelState:
  """Returns the new center, but for leaves to which nothing was given."""

  def chosen(path: trees.Path | None, o: jax.Array, n: jax.Array) -> jax.Array:
    name = None if path is None else trees.path_string(path)
    return jnp.where(given[name], n, o) if name in given else n

  if not given:
    return new
  params = jax.tree_util.tree_map_with_path(chosen, old.params, new.params)
  followed = opt_state_lib.parameters_of(old.opt_state, old.params)
  opt_state = jax.tree.unflatten(
    jax.tree.structure(old.opt_state),
    list(
      map(
        chosen,
        followed,
        jax.tree.leaves(old.opt_state),
        jax.tree.leaves(new.opt_state),
      )
    ),
  )
  return ModelState(params, opt_state)


def apply_tx(tx: Any, center: ModelState, grads: PyTree) -> ModelState:
  """Updates the center with an optimizer of its own."""
  state = train_state.TrainState(
    step=0,
    apply_fn=None,  # type: ignore[arg-type]
    params=center.params,
    tx=tx,
    opt_state=center.opt_state,
  )
  new = update.flax_update(state, grads, {})
  return ModelState(
    new.params, update.keep_dtypes(new.opt_state, center.opt_state)
  )
