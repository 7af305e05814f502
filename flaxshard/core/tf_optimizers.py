"""TensorFlow's optimizers that optax does not have: FTRL and proximal ones.

Each of them computes new parameters, not a step, so it needs `params` in
`update` and must come last in an `optax.chain`. All are elementwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flaxshard.core import checks

PyTree = Any


class FtrlState(NamedTuple):
  """State of `ftrl`; the slots have TensorFlow's names."""

  count: Any  # int32 scalar.
  accum: PyTree
  linear: PyTree


class AdagradDAState(NamedTuple):
  """State of `adagrad_da`; the slots have TensorFlow's names."""

  count: Any  # int32 scalar.
  gradient_accumulator: PyTree
  gradient_squared_accumulator: PyTree


class ProximalGradientDescentState(NamedTuple):
  """State of `proximal_gradient_descent`."""

  count: Any  # int32 scalar.


class ProximalAdagradState(NamedTuple):
  """State of `proximal_adagrad`; the slot has TensorFlow's name."""

  count: Any  # int32 scalar.
  accumulator: PyTree


def ftrl(
  learning_rate: optax.ScalarOrSchedule,
  learning_rate_power: float = -0.5,
  initial_accumulator_value: float = 0.1,
  l1_regularization_strength: float = 0.0,
  l2_regularization_strength: float = 0.0,
  l2_shrinkage_regularization_strength: float = 0.0,
  beta: float = 0.0,
) -> optax.GradientTransformation:
  r"""Follow The Regularized Leader, proximal (FTRL).

  With :math:`p` the negated `learning_rate_power` and a sign function
  :math:`s`, a step computes

  .. math::
    n' &= n + g^2 \\
    z' &= z + g + 2 \lambda_s w - (n'^p - n^p) w / \eta \\
    w' &= (\lambda_1 s(z') - z') / ((\beta + n'^p) / \eta + 2 \lambda_2)

  and :math:`w' = 0` where :math:`|z'| \le \lambda_1`: with an L1 penalty,
  parameters become exactly zero. The first step does not depend on the initial
  parameter but by its gradient, as in TensorFlow: :math:`z` begins at zero.

  Args:
    learning_rate: :math:`\eta`, a number or a schedule. TensorFlow divides by
      it; here a step in which a schedule gives zero changes nothing.
    learning_rate_power: Zero or less; zero keeps the learning rate constant.
    initial_accumulator_value: First value of the sum :math:`n`.
    l1_regularization_strength: :math:`\lambda_1`.
    l2_regularization_strength: :math:`\lambda_2`.
    l2_shrinkage_regularization_strength: :math:`\lambda_s`, the factor of an L2
      penalty that is added to the loss. Rows without a gradient do not shrink
      where updates are row-sparse.
    beta: :math:`\beta` of the paper.

  Returns:
    An optax optimizer that needs `params` in `update`.

  Raises:
    TypeError, ValueError: An argument is no number, or out of its range.

  Example:
    >>> tx = ftrl(0.1, l1_regularization_strength=1.0)
    >>> params = {"w": jnp.zeros(2)}
    >>> grads = {"w": jnp.array([0.5, 2.0])}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> print(optax.apply_updates(params, updates)["w"].round(3))
    [ 0.    -0.049]

  References:
    `tf.compat.v1.train.FtrlOptimizer`; McMahan et al., Ad Click Prediction: a
    View from the Trenches, 2013.
  """
  _check("ftrl", {"above": 0}, learning_rate=learning_rate)
  _check("ftrl", {"maximum": 0}, learning_rate_power=learning_rate_power)
  _check(
    "ftrl",
    {"minimum": 0},
    initial_accumulator_value=initial_accumulator_value,
    l1_regularization_strength=l1_regularization_strength,
    l2_regularization_strength=l2_regularization_strength,
    l2_shrinkage_regularization_strength=l2_shrinkage_regularization_strength,
    beta=beta,
  )
  power = -learning_rate_power
  l1, l2 = l1_regularization_strength, l2_regularization_strength

  def new_values(rate: jax.Array, g: Any, w: Any, n: Any, z: Any) -> Any:
    new_n = n + g * g
    sigma = (new_n**power - n**power) / rate
    shrinkage = 2 * l2_shrinkage_regularization_strength * w
    new_z = z + g + shrinkage - sigma * w
    quadratic = (beta + new_n**power) / rate + 2 * l2
    new_w = (l1 * jnp.sign(new_z) - new_z) / quadratic
    new_w = jnp.where(jnp.abs(new_z) > l1, new_w, 0)
    # A warmup may begin at zero, which would give NaN.
    return tuple(
      jnp.where(rate > 0, new, old)
      for new, old in [(new_w, w), (new_n, n), (new_z, z)]
    )

  def init(params: PyTree) -> FtrlState:
    accum = optax.tree.full_like(params, initial_accumulator_value)
    return FtrlState(_zero_count(), accum, optax.tree.zeros_like(params))

  def update(
    updates: PyTree, state: FtrlState, params: PyTree | None = None
  ) -> tuple[PyTree, FtrlState]:
    updates, accum, linear = _map_leaves(
      "ftrl",
      lambda g, w, *slots: new_values(
        _rate(learning_rate, state.count, w), g, w, *slots
      ),
      updates,
      params,
      state.accum,
      state.linear,
    )
    return updates, FtrlState(optax.safe_increment(state.count), accum, linear)

  return optax.GradientTransformation(init, update)


def adagrad_da(
  learning_rate: optax.ScalarOrSchedule,
  initial_gradient_squared_accumulator_value: float = 0.1,
  l1_regularization_strength: float = 0.0,
  l2_regularization_strength: float = 0.0,
) -> optax.GradientTransformation:
  r"""Adagrad dual averaging.

  With :math:`z` the sum of all gradients, :math:`n` that of their squares, and
  the number :math:`t` of the step, from one on, a step computes

  .. math::
    w' = -\eta \, \mathrm{sign}(z') \max(|z'| - \lambda_1 t, 0) /
      (\sqrt{n'} + \lambda_2 \eta t)

  The result does not depend on the initial parameters but by their gradients.
  It is zero until there is a gradient, also where the parameter was not.

  Args:
    learning_rate: :math:`\eta`, a number or a schedule.
    initial_gradient_squared_accumulator_value: First value of the sum
      :math:`n`, above zero.
    l1_regularization_strength: :math:`\lambda_1`.
    l2_regularization_strength: :math:`\lambda_2`.

  Returns:
    An optax optimizer that needs `params` in `update`. Its count of updates is
    what TensorFlow takes as `global_step`.

  Raises:
    TypeError, ValueError: An argument is no number, or out of its range.

  Example:
    >>> tx = adagrad_da(0.1, l1_regularization_strength=1.0)
    >>> params = {"w": jnp.array([1.0, 1.0])}
    >>> grads = {"w": jnp.array([0.5, 2.0])}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> print(optax.apply_updates(params, updates)["w"].round(3))
    [ 0.    -0.049]

  References:
    `tf.compat.v1.train.AdagradDAOptimizer`; Duchi et al., Adaptive Subgradient
    Methods for Online Learning and Stochastic Optimization, 2011.
  """
  initial = initial_gradient_squared_accumulator_value
  _check(
    "adagrad_da",
    {"above": 0},
    initial_gradient_squared_accumulator_value=initial,
  )
  _check(
    "adagrad_da",
    {"minimum": 0},
    learning_rate=learning_rate,
    l1_regularization_strength=l1_regularization_strength,
    l2_regularization_strength=l2_regularization_strength,
  )
  l1, l2 = l1_regularization_strength, l2_regularization_strength

  def new_values(count: Any, g: Any, w: Any, z: Any, n: Any) -> Any:
    rate = _rate(learning_rate, count, w)
    step = optax.safe_increment(count).astype(w.dtype)
    z, n = z + g, n + g * g
    numerator = jnp.sign(z) * jnp.maximum(jnp.abs(z) - l1 * step, 0)
    return -rate * numerator / (jnp.sqrt(n) + l2 * rate * step), z, n

  def init(params: PyTree) -> AdagradDAState:
    zeros = optax.tree.zeros_like(params)
    return AdagradDAState(
      _zero_count(), zeros, optax.tree.full_like(params, initial)
    )

  def update(
    updates: PyTree, state: AdagradDAState, params: PyTree | None = None
  ) -> tuple[PyTree, AdagradDAState]:
    updates, *slots = _map_leaves(
      "adagrad_da",
      lambda *leaves: new_values(state.count, *leaves),
      updates,
      params,
      state.gradient_accumulator,
      state.gradient_squared_accumulator,
    )
    return updates, AdagradDAState(optax.safe_increment(state.count), *slots)

  return optax.GradientTransformation(init, update)


def proximal_gradient_descent(
  learning_rate: optax.ScalarOrSchedule,
  l1_regularization_strength: float = 0.0,
  l2_regularization_strength: float = 0.0,
) -> optax.GradientTransformation:
  r"""Gradient descent with the proximal operator of L1 and L2 penalties.

  A step computes, with :math:`v = w - \eta g`,

  .. math::
    w' = \mathrm{sign}(v) \max(|v| - \eta \lambda_1, 0) / (1 + \eta \lambda_2)

  Args:
    learning_rate: :math:`\eta`, a number or a schedule.
    l1_regularization_strength: :math:`\lambda_1`.
    l2_regularization_strength: :math:`\lambda_2`.

  Returns:
    An optax optimizer that needs `params` in `update`.

  Raises:
    TypeError, ValueError: An argument is no number, or out of its range.

  Example:
    >>> tx = proximal_gradient_descent(0.5, l1_regularization_strength=1.0)
    >>> params = {"w": jnp.array([0.1, 2.0])}
    >>> grads = {"w": jnp.array([0.5, 2.0])}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> print(optax.apply_updates(params, updates)["w"].round(3))
    [0.  0.5]

  References:
    `tf.compat.v1.train.ProximalGradientDescentOptimizer`; Duchi and Singer,
    Efficient Learning using Forward-Backward Splitting, 2009.
  """
  _check(
    "proximal_gradient_descent",
    {"minimum": 0},
    learning_rate=learning_rate,
    l1_regularization_strength=l1_regularization_strength,
    l2_regularization_strength=l2_regularization_strength,
  )

  def init(params: PyTree) -> ProximalGradientDescentState:
    del params
    return ProximalGradientDescentState(_zero_count())

  def update(
    updates: PyTree,
    state: ProximalGradientDescentState,
    params: PyTree | None = None,
  ) -> tuple[PyTree, ProximalGradientDescentState]:
    def new_values(g: Any, w: Any) -> Any:
      rate = _rate(learning_rate, state.count, w)
      return (
        _shrink(
          w - rate * g,
          rate,
          l1_regularization_strength,
          l2_regularization_strength,
        ),
      )

    (updates,) = _map_leaves(
      "proximal_gradient_descent", new_values, updates, params
    )
    return updates, ProximalGradientDescentState(
      optax.safe_increment(state.count)
    )

  return optax.GradientTransformation(init, update)


def proximal_adagrad(
  learning_rate: optax.ScalarOrSchedule,
  initial_accumulator_value: float = 0.1,
  l1_regularization_strength: float = 0.0,
  l2_regularization_strength: float = 0.0,
) -> optax.GradientTransformation:
  r"""Adagrad with the proximal operator of L1 and L2 penalties.

  A step is that of `proximal_gradient_descent` with the learning rate
  :math:`\eta / \sqrt{n'}` of each element, where :math:`n' = n + g^2`.

  Args:
    learning_rate: :math:`\eta`, a number or a schedule.
    initial_accumulator_value: First value of the sum :math:`n`, above zero.
    l1_regularization_strength: Factor of the L1 penalty.
    l2_regularization_strength: Factor of the L2 penalty.

  Returns:
    An optax optimizer that needs `params` in `update`.

  Raises:
    TypeError, ValueError: An argument is no number, or out of its range.

  Example:
    >>> tx = proximal_adagrad(0.5, 0.75, l1_regularization_strength=1.0)
    >>> params = {"w": jnp.array([0.1, 2.0])}
    >>> grads = {"w": jnp.array([0.5, 0.5])}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> print(optax.apply_updates(params, updates)["w"].round(3))
    [0.   1.25]

  References:
    `tf.compat.v1.train.ProximalAdagradOptimizer`; Duchi and Singer, Efficient
    Learning using Forward-Backward Splitting, 2009.
  """
  _check(
    "proximal_adagrad",
    {"above": 0},
    initial_accumulator_value=initial_accumulator_value,
  )
  _check(
    "proximal_adagrad",
    {"minimum": 0},
    learning_rate=learning_rate,
    l1_regularization_strength=l1_regularization_strength,
    l2_regularization_strength=l2_regularization_strength,
  )

  def init(params: PyTree) -> ProximalAdagradState:
    accumulator = optax.tree.full_like(params, initial_accumulator_value)
    return ProximalAdagradState(_zero_count(), accumulator)

  def update(
    updates: PyTree, state: ProximalAdagradState, params: PyTree | None = None
  ) -> tuple[PyTree, ProximalAdagradState]:
    def new_values(g: Any, w: Any, n: Any) -> Any:
      n = n + g * g
      rate = _rate(learning_rate, state.count, w) * jax.lax.rsqrt(n)
      return (
        _shrink(
          w - rate * g,
          rate,
          l1_regularization_strength,
          l2_regularization_strength,
        ),
        n,
      )

    updates, accumulator = _map_leaves(
      "proximal_adagrad", new_values, updates, params, state.accumulator
    )
    return updates, ProximalAdagradState(
      optax.safe_increment(state.count), accumulator
    )

  return optax.GradientTransformation(init, update)


def _shrink(w: jax.Array, rate: jax.Array, l1: float, l2: float) -> jax.Array:
  """Returns the proximal operator of L1 and L2 penalties."""
  return jnp.sign(w) * jnp.maximum(jnp.abs(w) - rate * l1, 0) / (1 + rate * l2)


def _map_leaves(
  optimizer: str,
  new_values: Callable[..., tuple[jax.Array, ...]],
  grads: PyTree,
  params: PyTree | None,
  *slots: PyTree,
) -> list[PyTree]:
  """Maps a function to the leaves of gradients, parameters and slots.

  Args:
    optimizer: Name of the optimizer, for the error message.
    new_values: Takes a gradient, a parameter and its slots, and returns the new
      parameter and the new slots.
    grads: The gradients.
    params: The parameters.
    *slots: Trees like `params`.

  Returns:
    The updates to add to the parameters, and the new slots.

  Raises:
    ValueError: There are no parameters.
  """
  if params is None:
    raise ValueError(
      f"{optimizer} computes new parameters from the old ones: write "
      "tx.update(grads, state, params)."
    )

  def changes(g: jax.Array, w: jax.Array, *old: jax.Array) -> Any:
    if not jnp.issubdtype(w.dtype, jnp.inexact):
      return jnp.zeros_like(w), *old  # integers have no gradient
    # Gradients in a wider dtype would change the dtype of the slots.
    new_w, *new = new_values(g.astype(w.dtype), w, *old)
    return new_w - w, *new

  results = jax.tree.map(changes, grads, params, *slots)
  return list(
    jax.tree.transpose(
      jax.tree.structure(grads),
      jax.tree.structure((0,) * (1 + len(slots))),
      results,
    )
  )


def _rate(
  learning_rate: optax.ScalarOrSchedule, count: jax.Array, like: jax.Array
) -> jax.Array:
  """Returns the learning rate of a step, in the dtype of a parameter."""
  rate = learning_rate(count) if callable(learning_rate) else learning_rate
  return jnp.asarray(rate, like.dtype)


def _zero_count() -> jax.Array:
  return jnp.zeros([], jnp.int32)


def _check(optimizer: str, limits: dict[str, float], **values: Any) -> None:
  """Raises if a number is out of its limits, those of `checks.number`."""
  for name, value in values.items():
    # A schedule, or an array (maybe traced) of `optax.inject_hyperparams`.
    if not callable(value) and not isinstance(value, jax.Array):
      checks.number(f"{optimizer}: {name}", value, **limits)
