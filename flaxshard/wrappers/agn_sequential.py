"""Sequential AGN commits: a parameter server, sharded over the replicas.

The center is updated with the commit of replica 0, then with that of replica 1,
and so on. Each replica continues with the parameters right after its commit.

If the update is element-wise, each replica updates one part of the center. It
receives that part of all commits, replaces each by the parameters right after
it, in the same memory, and sends them back. Every leaf is exchanged in its own
shape, so that it is not copied.

Most optimizers are element-wise: they update every element of a parameter from
the same element of its gradient and slots. Clipping by the global norm, LAMB
and factored second moments are not. The jaxpr of an update says which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import itertools
from typing import Any, NamedTuple

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np

from flaxshard.core import jaxprs
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context

PyTree = Any

# Primitives that compute what the equations of their programs compute.
_FOLLOWED = jaxprs.CALLS | jaxprs.CUSTOM_CALLS | {"cond"}
# Instead of the dimension in which a leaf is split: every replica has all of it
# and makes the same updates.
WHOLE = -1


class ModelState(NamedTuple):
  """The center: parameters and their optimizer state.

  Attributes:
    params: The parameters.
    opt_state: The state of the optimizer that updates them.
  """

  params: PyTree
  opt_state: PyTree


# One update of the center: `update(center, grads, shared)` returns the new one.
# `shared` are further values that are the same on all replicas.
Update = Callable[[ModelState, PyTree, PyTree], ModelState]


def commit_sequentially(
  update: Update, center: ModelState, grads: PyTree, shared: PyTree
) -> tuple[ModelState, PyTree]:
  """Updates the center with one commit after another, in replica order.

  If `update` is element-wise, each replica updates one part of the center. An
  all-to-all sends it that part of every commit. A second one returns that part
  of the parameters after every commit. With any other update, every commit is
  sent to all replicas, and all replicas do all updates.

  Args:
    update: One update of the center.
    center: The center.
    grads: The gradients that this replica commits; None for leaves without.
    shared: Further arguments of `update`.

  Returns:
    The new center, and the new local parameters: those of the center right
    after this replica's commit.
  """
  if replica_context.num_replicas() == 1 or not jax.tree.leaves(grads):
    center = update(center, grads, shared)
    return center, center.params
  # Over the logical devices of a replica.
  param_specs = replica_context.specs_within(center.params)
  slot_specs = opt_state_lib.specs(center.opt_state, center.params, param_specs)
  specs = ModelState(param_specs, slot_specs), _pick(param_specs, grads)
  # Decided for the shapes on one logical device: an update may depend on them.
  own = jax.tree.map(_shape_on_device, (center, grads), specs)
  dims = jax.tree.map(_choose_dim, own)
  parts = jax.eval_shape(lambda x: jax.tree.map(_own_part, x, dims), own)
  is_split = is_elementwise(update, (center, grads, shared), (*parts, shared))
  if not is_split:
    dims = jax.tree.map(lambda _: WHOLE, dims)
  commit: Callable[..., Any] = functools.partial(_apply_commits, update, dims)
  if is_split and any(jax.tree.leaves(specs)):
    # So that a device exchanges its shard with the same device of the other
    # replicas.
    mesh: Any = jax.sharding.get_abstract_mesh()
    commit = jax.shard_map(
      commit,
      in_specs=(*specs, jax.P()),
      out_specs=(specs[0], param_specs),
      axis_names=set(mesh_lib.logical_axes(mesh)),
      check_vma=False,
    )
  return commit(center, grads, shared)


def _apply_commits(
  update: Update,
  dims: tuple[ModelState, PyTree],
  center: ModelState,
  grads: PyTree,
  shared: PyTree,
) -> tuple[ModelState, PyTree]:
  """Applies all commits to this replica's part of the center.

  Args:
    update: One update of the center.
    dims: The dimensions in which center and gradients are split.
    center: The center.
    grads: The gradients that this replica commits.
    shared: Further arguments of `update`.

  Returns:
    As `commit_sequentially`.
  """
  center_dims, grad_dims = dims

  def apply_commit(
    k: jax.Array, carry: tuple[ModelState, PyTree]
  ) -> tuple[ModelState, PyTree]:
    part, received = carry
    read = lambda x, g, dim: _read(x, dim, k).astype(g.dtype)
    part = update(part, jax.tree.map(read, received, grads, grad_dims), shared)
    write = lambda x, p, dim: _write(x, dim, k, p)
    new = _pick(part.params, grads)
    return part, jax.tree.map(write, received, new, grad_dims)

  old = _pick(center.params, grads)
  received = jax.tree.map(_send, grads, old, grad_dims)
  part = jax.tree.map(_own_part, center, center_dims)
  part, received = jax.lax.fori_loop(
    0, replica_context.num_replicas(), apply_commit, (part, received)
  )
  new = ModelState(_pick(part.params, grads), part.opt_state)
  old_center = ModelState(old, center.opt_state)
  center_dims = ModelState(grad_dims, center_dims.opt_state)
  new = jax.tree.map(_gather, new, old_center, center_dims)
  local = jax.tree.map(_send_back, received, old, grad_dims)
  merge = functools.partial(trees.map_both, lambda _, new: new, center.params)
  return new._replace(params=merge(new.params)), merge(local)


def _pick(tree: PyTree, grads: PyTree) -> PyTree:
  """Returns a tree like the parameters, with None where `grads` has None."""
  return jax.tree.map(lambda x, g: None if g is None else x, tree, grads)


def _shape_on_device(x: Any, spec: jax.P) -> jax.ShapeDtypeStruct:
  """Returns shape and dtype of the part of a leaf on one logical device."""
  sizes = jax.sharding.get_abstract_mesh().shape
  parts = mesh_lib.parts(spec, x.ndim, sizes)
  shape = tuple(n // count for n, count in zip(x.shape, parts, strict=True))
  return jax.ShapeDtypeStruct(shape, x.dtype)


# -- One leaf, which is split in the dimension `dim`, or `WHOLE`.


def _choose_dim(x: Any) -> int:
  """Returns the dimension that splits into equal parts with least padding.

  Of an array of one element or none it is `WHOLE`.
  """
  dims = [d for d, n in enumerate(x.shape) if n > 1 and 0 not in x.shape]
  padding = lambda d: _part_size(x, d) / x.shape[d]
  return min(dims, key=padding, default=WHOLE)


def _part_size(x: Any, dim: int) -> int:
  return -(-x.shape[dim] // replica_context.num_replicas())


def _pad(x: jax.Array, dim: int) -> jax.Array:
  """Appends zeros, so that all parts have the same size."""
  size = _part_size(x, dim) * replica_context.num_replicas()
  widths = [(0, size - n if d == dim else 0) for d, n in enumerate(x.shape)]
  return jnp.pad(x, widths)


def _own_part(x: jax.Array, dim: int) -> jax.Array:
  """Returns this replica's part of a leaf."""
  if dim == WHOLE:
    return x
  return _read(_pad(x, dim), dim, jax.lax.axis_index(mesh_lib.REPLICA))


def _gather(part: jax.Array, old: jax.Array, dim: int) -> jax.Array:
  """Returns a leaf, like `old`, from the part of each replica."""
  if dim == WHOLE:
    return part
  new = jax.lax.all_gather(part, mesh_lib.REPLICA, axis=dim, tiled=True)
  return _without_padding(new, old, dim)


def _send(g: jax.Array, p: jax.Array, dim: int) -> jax.Array:
  """Sends part i of a gradient to replica i; part i is then from replica i."""
  # In a dtype that holds the parameters exactly as well.
  g = g.astype(jnp.promote_types(g.dtype, p.dtype))
  return g if dim == WHOLE else _exchange(_pad(g, dim), dim)


def _send_back(received: jax.Array, old: jax.Array, dim: int) -> jax.Array:
  """Returns the parameters, like `old`, that replaced this replica's commit."""
  received = received.astype(old.dtype)
  if dim == WHOLE:
    return received
  return _without_padding(_exchange(received, dim), old, dim)


def _exchange(x: jax.Array, dim: int) -> jax.Array:
  return jax.lax.all_to_all(x, mesh_lib.REPLICA, dim, dim, tiled=True)


def _read(received: jax.Array, dim: int, k: jax.Array) -> jax.Array:
  """Returns this replica's part of what replica `k` sent."""
  if dim == WHOLE:
    # The sum of replica k's leaf and zeros. One at a time: an all-gather would
    # hold a copy for each replica.
    is_sender = jax.lax.axis_index(mesh_lib.REPLICA) == k
    sent = jnp.where(is_sender, received, jnp.zeros_like(received))
    return replica_context.reduce_over_replicas("sum", sent)
  size = _part_size(received, dim)
  return jax.lax.dynamic_slice_in_dim(received, k * size, size, dim)


def _write(
  received: jax.Array, dim: int, k: jax.Array, part: jax.Array
) -> jax.Array:
  """Replaces what replica `k` sent."""
  part = part.astype(received.dtype)
  if dim == WHOLE:
    is_sender = jax.lax.axis_index(mesh_lib.REPLICA) == k
    return jnp.where(is_sender, part, received)
  start = k * part.shape[dim]
  return jax.lax.dynamic_update_slice_in_dim(received, part, start, dim)


def _without_padding(x: jax.Array, old: jax.Array, dim: int) -> jax.Array:
  """Returns the result of a collective in the shape of the old leaf.

  The TPU compiler (libtpu 0.0.42) keeps the result of a collective in memory of
  its own. As the result of a conditional's branch, it would be copied into the
  memory of the state, and so would be the old state, also in the steps that do
  not take this branch. So on TPU another operation returns it.
  """
  x = jax.lax.slice_in_dim(x, 0, old.shape[dim], axis=dim)
  # Behind the barrier XLA does not see that the condition is True.
  select = lambda x: jnp.where(
    jax.lax.optimization_barrier(jnp.array(True)), x, jnp.zeros_like(x)
  )
  return jax.lax.platform_dependent(x, tpu=select, default=lambda x: x)


# -- Whether an update is element-wise.


def is_elementwise(
  fn: Callable[..., PyTree], args: Sequence[PyTree], parts: Sequence[PyTree]
) -> bool:
  """Returns whether `fn` of parts of its arguments gives that part of `fn`.

  `fn` is traced with the whole arguments and with the parts. The two programs
  are then compared equation by equation. A function that cannot be decided
  counts as not element-wise.

  Args:
    fn: A function that returns a tree like its first argument.
    args: Its arguments, trees of arrays.
    parts: The same trees with a part of each array, or its shape and dtype. An
      array of the same shape in both is not split.

  Example:
    >>> import jax.numpy as jnp
    >>> args, parts = (jnp.ones((4, 3)),), (jnp.ones((2, 3)),)
    >>> is_elementwise(jnp.sqrt, args, parts)
    True
    >>> is_elementwise(lambda x: x / x.sum(), args, parts)
    False
  """
  whole = jax.make_jaxpr(fn)(*args)
  try:
    part = jax.make_jaxpr(fn)(*parts)
  except Exception:
    # An optimizer may raise any error for a state of other shapes.
    return False
  if any(isinstance(x, jax.core.Tracer) for x in whole.consts):
    # A value that `fn` captures from an outer trace: it may be per replica.
    return False
  return _same_values(whole.consts, part.consts) and all(
    a is not None and b is not None and _agree(a, b)
    for a, b in itertools.zip_longest(
      jaxprs.equations(whole), jaxprs.equations(part)
    )
  )


def _agree(eqn: Any, twin: Any) -> bool:
  """Returns whether an equation gives its twin's part of its result.

  Args:
    eqn: An equation of the whole arrays.
    twin: That of the parts. A value of another shape there is split.
  """
  name, params = eqn.primitive.name, _semantics(eqn.params)
  # Literals differ where they follow from a shape: x / x.shape[0].
  if eqn.primitive is not twin.primitive or not _same_values(
    _literals(eqn), _literals(twin)
  ):
    return False
  if name in _FOLLOWED:
    # A program that JAX does not show here is not known.
    return any(True for _ in jax_core.jaxprs_in_params(eqn.params))
  inputs = zip(eqn.invars, twin.invars, strict=True)
  split = {_shapes(x, y) for x, y in inputs if _is_split(x, y)}
  if split:
    # A barrier returns its inputs. Other operations repeat dimensions of size
    # 1: a part of such an array, or a part of size 1, would belong to others.
    is_kept = name == "optimization_barrier" or (
      name in jaxprs.ELEMENTWISE
      and split == {_shapes(eqn.outvars[0], twin.outvars[0])}
    )
    return is_kept and params == _semantics(twin.params)
  if any(map(_is_split, eqn.outvars, twin.outvars)):
    # All elements are equal, so a part of them fits any part.
    return name == "broadcast_in_dim" and not eqn.invars[0].aval.shape
  # An axis_index depends on the replica.
  return name != "axis_index" and params == _semantics(twin.params)


def _shapes(x: Any, y: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
  return x.aval.shape, y.aval.shape


def _is_split(x: Any, y: Any) -> bool:
  return x.aval.shape != y.aval.shape


def _semantics(params: dict[str, Any]) -> dict[str, str]:
  """Returns the parameters of an equation that affect its values."""
  return {k: str(v) for k, v in params.items() if k != "sharding"}


def _literals(eqn: Any) -> list[Any]:
  """Returns the constants in the inputs of an equation."""
  return [x.val for x in eqn.invars if isinstance(x, jax_core.Literal)]


def _same_values(some: Sequence[Any], others: Sequence[Any]) -> bool:
  return len(some) == len(others) and all(map(np.array_equal, some, others))
