"""Optimizers that treat parameters by patterns: frozen, or at other rates.

`freeze` and `scale_learning_rates` wrap an optax optimizer. Patterns are
regular expressions, searched in paths such as `encoder/layer0/kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any

import jax
import optax

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import patterns as patterns_lib
from flaxshard.core import trees

PyTree = Any


def freeze(
  tx: Any, patterns: Sequence[str], *, argument: str = "freeze: patterns"
) -> gradients.Frozen:
  """Returns an optimizer that does not train some of the parameters.

  A `TrainState` with this optimizer computes no gradient for a frozen
  parameter: `value_and_grad` returns None for it. So it takes no memory for a
  gradient or for slots, no communication, no weight decay, and no part in the
  finite check of `LossScale`. `apply_gradients` ignores a gradient that another
  function has computed for it.

  Call it last, around the whole optimizer: inside `optax.chain` the frozen
  parameters stay as they are too, but their gradients are computed.

  Args:
    tx: The optax optimizer of the other parameters. Transformations in it, such
      as `optax.clip_by_global_norm`, do not see the frozen parameters.
    patterns: Regular expressions. A parameter is frozen if one of them is found
      in its path, such as `encoder/layer0/kernel`.
    argument: Name of `patterns` for errors.

  Returns:
    An optax optimizer. Its state is that of `optax.partition`.

  Raises:
    TypeError: `patterns` is not a sequence of strings.
    ValueError: There is no pattern, or one is not a regular expression. From
      `init`: a pattern matches no parameter.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax
    >>> params = {"encoder": {"w": jnp.ones(())}, "head": {"w": jnp.ones(())}}
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params=params,
    ...     tx=fs.freeze(optax.sgd(0.25), ["^encoder/"]))
    >>> loss, grads = state.value_and_grad(
    ...     lambda p: p["encoder"]["w"] * p["head"]["w"])
    >>> grads
    {'encoder': {'w': None}, 'head': {'w': Array(1., dtype=float32)}}
    >>> state = state.apply_gradients(grads=grads)
    >>> {name: float(p["w"]) for name, p in state.params.items()}
    {'encoder': 1.0, 'head': 0.75}
  """
  _check_order("freeze", tx, gradients.SparseRows)
  patterns = patterns_lib.check(argument, patterns)
  if not patterns:
    raise ValueError(f"{argument} must have at least one pattern.")

  inner = optax.partition(
    {"train": tx, "freeze": optax.set_to_zero()},
    lambda params: jax.tree.map(
      lambda is_frozen: "freeze" if is_frozen else "train",
      gradients.matching(patterns, params),
    ),
    mask_compatible_extra_args=True,
  )

  def init(params: PyTree) -> PyTree:
    patterns_lib.check_used(argument, patterns, trees.names(params))
    return inner.init(params)

  def update(
    updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
  ) -> tuple[PyTree, PyTree]:
    if params is not None:
      # `value_and_grad` returns None where a parameter is frozen. The optimizer
      # of the others, such as a line search, has no value there either.
      complete = functools.partial(
        jax.tree.map,
        lambda is_frozen, p, x: p if is_frozen else x,
        gradients.matching(patterns, params),
        params,
      )
      updates = complete(updates)
      if "grad" in extra:
        extra["grad"] = complete(extra["grad"])
      if "value_fn" in extra:
        value_fn = extra["value_fn"]
        extra["value_fn"] = lambda trained: value_fn(complete(trained))
    return inner.update(updates, state, params, **extra)

  return gradients.Frozen(init, update, frozen=patterns)


def scale_learning_rates(
  tx: Any,
  factors: Sequence[tuple[str, float]],
  *,
  argument: str = "scale_learning_rates: factors",
) -> optax.GradientTransformationExtraArgs:
  """Returns an optimizer with other learning rates for some parameters.

  The updates of `tx` are multiplied by a factor. Where an update is
  proportional to the learning rate, as in the optimizers of optax, this is the
  learning rate times the factor. A decoupled weight decay that is multiplied by
  the learning rate, as in `optax.adamw`, is multiplied by the factor too.

  Args:
    tx: The optax optimizer.
    factors: `(pattern, factor)` pairs. The first pattern that is found in the
      path of a parameter gives its factor, above 0. Others have factor 1.
    argument: Name of `factors` for errors.

  Returns:
    An optax optimizer. Its state is the state of `tx`.

  Raises:
    TypeError: `factors` is not a sequence of pairs.
    ValueError: There is no pair, a pattern is not a regular expression, a
      factor is not above 0, or `tx` is a result of `freeze`. From `init`: a
      pattern matches no parameter, or earlier patterns match all of its
      parameters.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax
    >>> params = {"body": jnp.ones(()), "head": jnp.ones(())}
    >>> tx = fs.scale_learning_rates(optax.sgd(0.25), [("head", 2.0)])
    >>> updates, _ = tx.update(params, tx.init(params), params)
    >>> {name: float(update) for name, update in updates.items()}
    {'body': -0.25, 'head': -0.5}
  """
  _check_order(
    "scale_learning_rates", tx, gradients.SparseRows, gradients.Frozen
  )
  factors = check_factors(argument, factors)
  if not factors:
    raise ValueError(f"{argument} must have at least one pair.")
  patterns = tuple(pattern for pattern, _ in factors)
  inner = optax.with_extra_args_support(tx)

  def init(params: PyTree) -> PyTree:
    patterns_lib.check_used(argument, patterns, trees.names(params))
    return inner.init(params)

  def update(
    updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
  ) -> tuple[PyTree, PyTree]:
    updates, state = inner.update(updates, state, params, **extra)

    def scale(path: trees.Path, update: jax.Array) -> jax.Array:
      i = patterns_lib.first_match(patterns, trees.path_string(path))
      # A Python number keeps the dtype of the update.
      return update if i is None else update * factors[i][1]

    return jax.tree_util.tree_map_with_path(scale, updates), state

  return optax.GradientTransformationExtraArgs(init, update)


def check_factors(argument: str, factors: Any) -> tuple[tuple[str, float], ...]:
  """Returns `(pattern, factor)` pairs as tuples.

  Args:
    argument: Name of the argument, for errors.
    factors: A sequence of pairs.

  Raises:
    TypeError, ValueError: See `scale_learning_rates`.
  """
  pairs = patterns_lib.check_pairs(
    argument, factors, "(pattern, factor) pairs such as (('head/', 10.0),)"
  )
  return tuple(
    (pattern, checks.number(f"{argument}[{i}]", factor, above=0, below=1e38))
    for i, (pattern, factor) in enumerate(pairs)
  )


def _check_order(function: str, tx: Any, *outer: type[Any]) -> None:
  """Raises if `tx` is no optimizer, or one of a function to call later."""
  opt_state_lib.check_tx(tx, f"{function}: tx")
  if isinstance(tx, outer):
    raise ValueError(
      f"{function}: tx is a result of {tx.function}; call {tx.function} last: "
      f"{tx.function}({function}(tx, ...), patterns)."
    )
