"""The leaves of an optimizer's state: slots of parameters, and step counts.

A slot is an array that belongs to one parameter, such as Adam's first moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import trees

PyTree = Any
Path = trees.Path


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
  params = gradients.optimized_params(params)
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
  # By attribute, because optax.MultiSteps is no GradientTransformation.
  if hasattr(tx, "init") and callable(getattr(tx, "update", None)):
    return
  hint = f" Call it: {tx.__name__}(1e-3)." if inspect.isfunction(tx) else ""
  raise TypeError(
    f"{argument} must be an optax GradientTransformation, such as "
    f"optax.adam(1e-3), got {checks.describe(tx)}.{hint}"
  )


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
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(opt_state)]
  # The roots of subtrees that have a leaf which is not a slot. A leaf alone
  # does not decide: `count` may be a parameter and a field of the optimizer.
  mixed = {
    path[:start]
    for path in paths
    for start in range(len(path) + 1)
    if path[start:] not in known
  }

  def find_parameter(path: Path) -> Path | None:
    # The largest subtree first.
    for start in range(len(path) + 1):
      if path[:start] not in mixed:
        return path[start:]
    return None

  return [find_parameter(path) for path in paths]


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
  optimized = gradients.optimized_params(params)
  by_path, specs_by_path = (
    dict(jax.tree_util.tree_leaves_with_path(tree))
    for tree in (optimized, gradients.optimized_params(param_specs))
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
