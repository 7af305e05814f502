"""An optimizer's state: its first value, its updates, and its leaves.

A leaf is a slot, an array that belongs to one parameter, such as Adam's first
moment; or a step count; or something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
import inspect
import types
from typing import Any

from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
import jax
import jax.numpy as jnp
import optax

from flaxshard.core import checks
from flaxshard.core import trees

PyTree = Any
Path = trees.Path


def optimized_params(params: PyTree) -> PyTree:
  """Returns the parameters that Flax passes to the optimizer.

  These are all parameters, without Flax's overwrite-with-gradient collection
  (the statistics of fp8 layers) if there is one.
  """
  if isinstance(params, Mapping) and OVERWRITE_WITH_GRADIENT in params:
    return params["params"]
  return params


def init(tx: Any, params: PyTree) -> PyTree:
  """Returns the first state of an optimizer, in the structure of later ones.

  `optax.monitor` adds its measurements in the first update. They are zero here:
  a step that may be skipped must return the same structure.

  Args:
    tx: The optax optimizer.
    params: The parameters; the optimizer gets its `optimized_params`.

  Raises:
    TypeError: The parameters are a pair for `optax.lookahead`.
  """
  if isinstance(params, optax.LookaheadParams):
    # Its gradients are not a tree like the parameters.
    raise TypeError(
      "params must not be a pair for optax.lookahead. Give params.fast, and "
      "EMA or AGN(outer_tx=...) as a wrapper, which keep slow parameters."
    )
  params = optimized_params(params)
  state = tx.init(params)
  is_monitor = lambda x: isinstance(x, optax.transforms.MonitorState)
  if not any(map(is_monitor, jax.tree.leaves(state, is_leaf=is_monitor))):
    return state
  first = dict(jax.tree_util.tree_leaves_with_path(state))
  loss = lambda *_: jnp.zeros(())
  # What optax documents as extra arguments, of which it may need some.
  update = functools.partial(
    optax.with_extra_args_support(tx).update, value=loss(), value_fn=loss
  )
  _, later = jax.eval_shape(
    lambda grads, state: update(grads, state, grads, grad=grads), params, state
  )
  return jax.tree_util.tree_map_with_path(
    lambda path, x: first.get(path, jnp.zeros(x.shape, x.dtype)), later
  )


def check_tx(tx: Any, argument: str = "tx") -> None:
  """Raises a TypeError unless `tx` is an optax optimizer."""
  # By attribute, because optax.MultiSteps is no GradientTransformation. What
  # `flaxshard.wrap` returns has one more, and its update returns parameters.
  is_optimizer = hasattr(tx, "init") and callable(getattr(tx, "update", None))
  if is_optimizer and not hasattr(tx, "value_and_grad"):
    return
  hint = f" Call it: {tx.__name__}(1e-3)." if inspect.isfunction(tx) else ""
  raise TypeError(
    f"{argument} must be an optax GradientTransformation, such as "
    f"optax.adam(1e-3), got {checks.describe(tx)}.{hint}"
  )


def update(
  tx: Any,
  params: PyTree,
  opt_state: PyTree,
  grads: PyTree,
  extra: Mapping[str, Any] = types.MappingProxyType({}),
  *,
  keep_dtypes: bool = True,
) -> tuple[PyTree, PyTree]:
  """Updates parameters and slots as Flax's `TrainState.apply_gradients` does.

  A leaf without a gradient keeps its parameter and its slots.

  Args:
    tx: The optax optimizer.
    params: The parameters.
    opt_state: Its state.
    grads: A tree like `params`; None where a leaf has no gradient.
    extra: Extra arguments of the optimizer's update.
    keep_dtypes: Whether the state keeps its dtypes. It takes those of the
      gradients: float32 ones of float16 parameters would change it, and the
      next step would compile again.

  Returns:
    The new parameters and the new state.
  """
  structure: Any = jax.tree.structure(params)
  is_kept = [g is None for g in structure.flatten_up_to(grads)]
  if any(is_kept):
    # The optimizer needs an array for every parameter. With a zero gradient it
    # may still change parameter and slots, by weight decay or momentum: undone.
    grads = jax.tree.map(
      lambda p, g: _zero_gradient(p) if g is None else g, params, grads
    )
  optimized = optimized_params(params)
  updates, new_state = tx.update(
    optimized_params(grads), opt_state, optimized, **extra
  )
  new = optax.apply_updates(optimized, updates)
  if optimized is not params:
    new = {**grads, "params": new}
  if any(is_kept):
    kept = structure.unflatten(is_kept)
    new, new_state = keep(kept, (params, opt_state), (new, new_state))
  if keep_dtypes:
    new_state = jax.tree.map(
      lambda n, o: n.astype(o.dtype) if n.dtype != o.dtype else n,
      new_state,
      opt_state,
    )
  return new, new_state


def keep(
  is_kept: PyTree, old: tuple[PyTree, PyTree], new: tuple[PyTree, PyTree]
) -> tuple[PyTree, PyTree]:
  """Returns an update without its effect on some leaves and their slots.

  Args:
    is_kept: For each of the parameters whether it is kept: a bool, or a bool
      scalar of a traced program.
    old: Parameters and optimizer state before the update.
    new: Those after it.
  """

  def choose(is_kept: Any, o: jax.Array, n: jax.Array) -> jax.Array:
    if isinstance(is_kept, jax.Array):
      return jnp.where(is_kept, o, n)
    return o if is_kept else n

  (old_params, old_state), (new_params, new_state) = old, new
  params = jax.tree.map(choose, is_kept, old_params, new_params)
  kept = dict(jax.tree_util.tree_leaves_with_path(optimized_params(is_kept)))
  # Leaves such as step counts belong to no parameter.
  slots = map_leaves(
    lambda parameter, o, n: choose(kept.get(parameter, False), o, n),
    optimized_params(old_params),
    old_state,
    new_state,
  )
  return params, slots


def _zero_gradient(p: jax.Array) -> jax.Array:
  # Optimizers divide and take roots, which integer arrays do not support.
  inexact = jnp.issubdtype(p.dtype, jnp.inexact)
  return jnp.zeros(p.shape, p.dtype if inexact else jnp.float32)


# -- The leaves of a state.


def parameters_of(opt_state: PyTree, params: PyTree) -> list[Path | None]:
  """Returns, for each leaf of an optimizer's state, the path of its parameter.

  In every optimizer of optax the slots form subtrees with the structure of the
  parameters, or of some of them. So a subtree consists of slots if all its
  leaves have paths of parameters.

  Args:
    opt_state: The state of an optimizer, or any tree with such subtrees.
    params: The parameters that the optimizer updates.

  Returns:
    A path for each slot, None for every other leaf, in the order of the leaves.
  """
  # Not optax.tree_utils.tree_map_params: it calls `tx.init` on placeholders,
  # which fails for L-BFGS and for optimizers that compute with the parameters.
  known = {path for path, _ in jax.tree_util.tree_leaves_with_path(params)}
  flat = jax.tree_util.tree_leaves_with_path(opt_state)
  # The roots of subtrees that have a leaf which is not a slot. A leaf alone
  # does not decide: `count` may be a parameter and a field of the optimizer.
  mixed = {
    path[:start]
    for path, _ in flat
    for start in range(len(path) + 1)
    if path[start:] not in known
  }

  def find_parameter(path: Path, leaf: Any) -> Path | None:
    if known == {()} and not jnp.issubdtype(trees.dtype_of(leaf), jnp.inexact):
      return None  # a count: every leaf ends with the path of a single array
    # The largest subtree first.
    for start in range(len(path) + 1):
      if path[:start] not in mixed:
        return path[start:]
    return None

  return [find_parameter(path, leaf) for path, leaf in flat]


def map_leaves(
  fn: Callable[..., Any], params: PyTree, opt_state: PyTree, *others: PyTree
) -> PyTree:
  """Maps a function over the leaves of an optimizer's states.

  Args:
    fn: Takes the path of the parameter that a leaf is a slot of, or None; and
      the leaf of each state.
    params: The parameters that the optimizer updates.
    opt_state: The state.
    *others: Further states with the same structure.
  """
  parameters = iter(parameters_of(opt_state, params))
  return jax.tree.map(
    lambda *leaves: fn(next(parameters), *leaves), opt_state, *others
  )


def specs(opt_state: PyTree, params: PyTree, param_specs: PyTree) -> PyTree:
  """Returns partition specs for an optimizer's state: slots follow parameters.

  Args:
    opt_state: The state, or its shapes and dtypes.
    params: The parameters, or their shapes and dtypes.
    param_specs: The partition specs of the parameters.

  Returns:
    A tree like `opt_state` of partition specs. Leaves that are not slots are
    replicated: step counts, and Adafactor's statistics of rows and columns.

  Example:
    >>> import jax.numpy as jnp, optax
    >>> params = {"w": jnp.ones((4, 2))}
    >>> state = optax.sgd(0.1, momentum=0.9).init(params)
    >>> specs(state, params, {"w": jax.P("replica")})[0].trace
    {'w': P('replica',)}
  """
  optimized = optimized_params(params)
  by_path, specs_by_path = (
    dict(jax.tree_util.tree_leaves_with_path(tree))
    for tree in (optimized, optimized_params(param_specs))
  )

  def spec_of_leaf(parameter: Path | None, leaf: Any) -> jax.P:
    if parameter is None:
      return jax.P()
    shape, spec = by_path[parameter].shape, specs_by_path[parameter]
    # L-BFGS keeps several slots of a parameter in one array, so a slot may have
    # more dimensions in front.
    extra = len(leaf.shape) - len(shape)
    if tuple(spec) and extra >= 0 and leaf.shape[extra:] == shape:
      return jax.P(*(None,) * extra, *spec)
    return jax.P()

  return map_leaves(spec_of_leaf, optimized, opt_state)


def counts(opt_state: PyTree) -> dict[str, jax.Array]:
  """Returns the step counts in an optimizer's state, by path.

  Example:
    >>> import jax.numpy as jnp, optax
    >>> list(counts(optax.adam(0.1).init({"w": jnp.ones(2)})))
    ['0/count']
  """
  return {
    trees.path_string(path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state)
    # optax has no type for a count: these are the names of its fields.
    if trees.path_strings(path[-1:]) in (("count",), ("step_count",))
    and not leaf.shape
    and jnp.issubdtype(leaf.dtype, jnp.integer)
  }


def with_counts(opt_state: PyTree, new: Mapping[str, jax.Array]) -> PyTree:
  """Returns an optimizer's state with other step counts.

  Args:
    opt_state: The state.
    new: The new step counts by path; counts without an entry stay.
  """
  changed = {path: new.get(path, x) for path, x in counts(opt_state).items()}
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: changed.get(trees.path_string(path), leaf), opt_state
  )
