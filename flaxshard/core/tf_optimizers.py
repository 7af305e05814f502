"""TensorFlow's optimizers that optax does not have: FTRL and proximal ones.

Each of them computes new parameters, not a step, so it needs `params` in
`update` and must come last in an `optax.chain`. All are elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    >>> import flaxshard as fs, jax.numpy as jnp, optax
    >>> tx = fs.optimizers.ftrl(0.1, l1_regularization_strength=1.0)
    >>> params = {"w": jnp.zeros(2)}
    >>> grads = {"w": jnp.array([0.5, 2.0])}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> print(optax.apply_updates(params, updates)["w"].round(3))
    [ 0.    -0.049]

  References:
    `tf.compat.v1.train.FtrlOptimizer`; McMahan et al., Ad Click Prediction: a
    View from the Trenches, 2013.
  """
  _check("ftrl", locals(), learning_rate_power={"maximum": 0})
  power = -learning_rate_power
  l1, l2 = l1_regularization_strength, l2_regularization_strength

  def new_values(
    rate: jax.Array, step: jax.Array, g: Any, w: Any, n: Any, z: Any
  ) -> Any:
    del step
    new_n = n + g * g
    sigma = (new_n**power - n**power) / rate
    shrinkage = 2 * l2_shrinkage_regularization_strength * w
    new_z = z + g + shrinkage - sigma * w
    quadratic = (beta + new_n**power) / rate + 2 * l2
    new_w = (l1 * jnp.sign(new_z) - new_z) / quadratic
    new_w = jnp.where(jnp.abs(new_z) > l1, new_w, 0)
    # A warmup may begin at zero, which would give NaN.
    return tuple(
      jnp.where(rate != 0, new, old)
      for new, old in [(new_w, w), (new_n, n), (new_z, z)]
    )

  return _create(
    FtrlState, new_values, learning_rate, initial_accumulator_value, 0.0
  )


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
    >>> import flaxshard as fs, jax.numpy as jnp, optax
    >>> tx = fs.optimizers.adagrad_da(0.1, l1_regularization_strength=1.0)
    >>> params = {"w": jnp.array([1.0, 1.0])}
    >>> grads = {"w": jnp.array([0.5, 2.0])}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> print(optax.apply_updates(params, updates)["w"].round(3))
    [ 0.    -0.049]

  References:
    `tf.compat.v1.train.AdagradDAOptimizer`; Duchi et al., Adaptive Subgradient
    Methods for Online Learning and Stochastic Optimization, 2011.
  """
  _check(
    "adagrad_da",
    locals(),
    initial_gradient_squared_accumulator_value={"above": 0},
  )
  first = initial_gradient_squared_accumulator_value
  l1, l2 = l1_regularization_strength, l2_regularization_strength

  def new_values(
    rate: jax.Array, step: jax.Array, g: Any, w: Any, z: Any, n: Any
  ) -> Any:
    del w
    z, n = z + g, n + g * g
    numerator = jnp.sign(z) * jnp.maximum(jnp.abs(z) - l1 * step, 0)
    return -rate * numerator / (jnp.sqrt(n) + l2 * rate * step), z, n

  return _create(AdagradDAState, new_values, learning_rate, 0.0, first)


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
    >>> import flaxshard as fs, jax.numpy as jnp, optax
    >>> tx = fs.optimizers.proximal_gradient_descent(
    ...     0.5, l1_regularization_strength=1.0)
    >>> params = {"w": jnp.array([0.1, 2.0])}
    >>> grads = {"w": jnp.array([0.5, 2.0])}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> print(optax.apply_updates(params, updates)["w"].round(3))
    [0.  0.5]

  References:
    `tf.compat.v1.train.ProximalGradientDescentOptimizer`; Duchi and Singer,
    Efficient Learning using Forward-Backward Splitting, 2009.
  """
  _check("proximal_gradient_descent", locals())
  shrink = _shrinkage(l1_regularization_strength, l2_regularization_strength)
  return _create(
    ProximalGradientDescentState,
    lambda rate, step, g, w: (shrink(w - rate * g, rate),),
    learning_rate,
  )


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
    >>> import flaxshard as fs, jax.numpy as jnp, optax
    >>> tx = fs.optimizers.proximal_adagrad(
    ...     0.5, 0.75, l1_regularization_strength=1.0)
    >>> params = {"w": jnp.array([0.1, 2.0])}
    >>> grads = {"w": jnp.array([0.5, 0.5])}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> print(optax.apply_updates(params, updates)["w"].round(3))
    [0.   1.25]

  References:
    `tf.compat.v1.train.ProximalAdagradOptimizer`; Duchi and Singer, Efficient
    Learning using Forward-Backward Splitting, 2009.
  """
  _check("proximal_adagrad", locals(), initial_accumulator_value={"above": 0})
  first = initial_accumulator_value
  shrink = _shrinkage(l1_regularization_strength, l2_regularization_strength)

  def new_values(
    rate: jax.Array, step: jax.Array, g: Any, w: Any, n: Any
  ) -> Any:
    del step
    n = n + g * g
    rate = rate * jax.lax.rsqrt(n)
    return shrink(w - rate * g, rate), n

  return _create(ProximalAdagradState, new_values, learning_rate, first)


def _check(
  function: str, values: Mapping[str, Any], **bounds: dict[str, float]
) -> None:
  """Checks the arguments of a function, its only local variables so far.

  Args:
    function: Its name.
    values: The arguments by name.
    **bounds: The bounds of some of them; all others are at least zero.
  """
  for name, value in values.items():
    is_schedule = name == "learning_rate" and callable(value)
    # `optax.inject_hyperparams` gives an array.
    if not (is_schedule or isinstance(value, jax.Array)):
      limits = bounds.get(name, {"minimum": 0})
      checks.number(f"{function}: {name}", value, **limits)


def _shrinkage(l1: float, l2: float) -> Callable[..., jax.Array]:
  """Returns the proximal operator of L1 and L2 penalties."""
  return lambda w, rate: (
    jnp.sign(w) * jnp.maximum(jnp.abs(w) - rate * l1, 0) / (1 + rate * l2)
  )


def _create(
  state_class: Any,
  new_values: Callable[..., tuple[jax.Array, ...]],
  learning_rate: optax.ScalarOrSchedule,
  *first: float,
) -> optax.GradientTransformation:
  """Returns an elementwise optimizer that computes new parameters.

  Args:
    state_class: A named tuple of a count and the slots.
    new_values: Takes the learning rate, the number of the step from one on, a
      gradient, a parameter and its slots; returns the new parameter and slots.
    learning_rate: A number or a schedule.
    *first: The first value of each slot.
  """

  def init(params: PyTree) -> Any:
    slots = (optax.tree.full_like(params, value) for value in first)
    return state_class(jnp.zeros([], jnp.int32), *slots)

  def update(updates: PyTree, state: Any, params: PyTree | None = None) -> Any:
    if params is None:
      raise ValueError(
        "The optimizer computes new parameters from the old ones: write "
        "tx.update(grads, state, params)."
      )
    rate, next_count = learning_rate, optax.safe_increment(state.count)
    if callable(rate):
      rate = rate(state.count)

    def changes(g: jax.Array, w: jax.Array, *old: jax.Array) -> Any:
      if not jnp.issubdtype(w.dtype, jnp.inexact):
        return jnp.zeros_like(w), *old  # integers have no gradient
      # Gradients in a wider dtype would change the dtype of the slots.
      new_w, *new = new_values(
        jnp.asarray(rate, w.dtype),
        next_count.astype(w.dtype),
        g.astype(w.dtype),
        w,
        *old,
      )
      return new_w - w, *new

    results = jax.tree.map(changes, updates, params, *state[1:])
    updates, *slots = jax.tree.transpose(
      jax.tree.structure(updates),
      jax.tree.structure((0,) * len(state)),
      results,
    )
    return updates, state_class(next_count, *slots)

  return optax.GradientTransformation(init, update)
