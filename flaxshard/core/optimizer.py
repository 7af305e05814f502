"""Builds the optimizer and the learning-rate schedule that a config names."""

from __future__ import annotations

from collections.abc import Mapping
import functools
import math
from typing import Any

import jax
import optax

from flaxshard.core import checks
from flaxshard.core import opt_state
from flaxshard.core import parameter_groups
from flaxshard.core import registry
from flaxshard.core import tf_optimizers


def sgd(
  learning_rate: optax.ScalarOrSchedule,
  momentum: float | None = None,
  nesterov: bool = False,
  weight_decay: float = 0.0,
) -> optax.GradientTransformation:
  """Returns `optax.sgd` with weight decay.

  Args:
    learning_rate: A number, or a schedule.
    momentum: Decay rate of the momentum; None is plain SGD.
    nesterov: Whether to use Nesterov momentum.
    weight_decay: Factor of the parameters that is added to their gradients.
      Arrays of one dimension (biases, normalization scales) do not decay.
  """
  update = optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov)
  if not weight_decay:
    # No decay must leave the optimizer state of plain `optax.sgd`.
    return update
  decays = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
  return optax.chain(
    optax.add_decayed_weights(weight_decay, mask=decays), update
  )


OPTIMIZERS: dict[str, Any] = {
  "adadelta": optax.adadelta,
  "adafactor": optax.adafactor,
  "adagrad": optax.adagrad,
  "adagrad_da": tf_optimizers.adagrad_da,
  "adam": optax.adam,
  "adamw": optax.adamw,
  "ftrl": tf_optimizers.ftrl,
  "lamb": optax.lamb,
  "lion": optax.lion,
  "proximal_adagrad": tf_optimizers.proximal_adagrad,
  "proximal_gradient_descent": tf_optimizers.proximal_gradient_descent,
  "rmsprop": optax.rmsprop,
  "sgd": sgd,
}


# Typed: a flag differs from the number 1.
@functools.lru_cache(maxsize=None, typed=True)
def named(name: str, **arguments: Any) -> optax.GradientTransformation:
  """Returns an optax optimizer by name.

  Equal arguments give the same optimizer. The functions of optax are equal only
  to themselves, and `jax.jit` would compile again for others.

  Args:
    name: `"adadelta"`, `"adafactor"`, `"adagrad"`, `"adagrad_da"`, `"adam"`,
      `"adamw"`, `"ftrl"`, `"lamb"`, `"lion"`, `"proximal_adagrad"`,
      `"proximal_gradient_descent"`, `"rmsprop"`, `"sgd"`, or
      `"package.module:function"`.
    **arguments: Its arguments.

  Raises:
    TypeError, ValueError: The name or an argument is unknown or not allowed.

  Example:
    >>> tx = named("sgd", learning_rate=0.7, momentum=0.9)
    >>> tx.init(jax.numpy.ones(2))[0].trace.tolist()
    [0.0, 0.0]
  """
  return _build("optimizer", {"name": name, **arguments})


def _constant(learning_rate: float, num_train_steps: int) -> optax.Schedule:
  del num_train_steps
  return optax.constant_schedule(learning_rate)


def _cosine(
  learning_rate: float, num_train_steps: int, warmup_steps: int = 0
) -> optax.Schedule:
  warmup_steps = checks.integer("warmup_steps", warmup_steps, minimum=0)
  schedule = optax.warmup_cosine_decay_schedule(
    0.0 if warmup_steps else learning_rate,
    learning_rate,
    warmup_steps,
    # optax needs at least one step of decay, also where a run ends in warmup.
    max(num_train_steps, warmup_steps + 1),
  )
  # One program for a row of metrics, with the bits that the update has used.
  return jax.jit(schedule)


SCHEDULES: dict[str, Any] = {"constant": _constant, "cosine": _cosine}


def create(
  config: Mapping[str, Any],
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """Builds `config.optimizer` with `config.schedule`.

  A schedule counts updates. With `accumulate_steps` a run has as many fewer
  updates than steps, and `num_train_steps` and `warmup_steps` of a schedule are
  numbers of updates.

  Args:
    config: A checked config. `optimizer` has the name of an optimizer and its
      arguments, as in `named`, and may have `clip_by_global_norm`, the
      largest norm of the gradients. `schedule` has the name `"constant"`,
      `"cosine"` (argument: `warmup_steps`), or `"package.module:function"` for
      a function of `learning_rate` and `num_train_steps` that returns a
      schedule. `learning_rates` and `freeze` are the arguments of
      `flaxshard.scale_learning_rates` and `flaxshard.freeze`.

  Returns:
    `(tx, schedule)`; the schedule takes the number of applied updates.

  Raises:
    TypeError, ValueError: A name or an argument is unknown or not allowed.
  """
  schedule = registry.call(
    "config.schedule",
    config["schedule"],
    SCHEDULES,
    learning_rate=config["learning_rate"],
    # Without skipped steps.
    num_train_steps=max(
      config["num_train_steps"] // config["accumulate_steps"], 1
    ),
  )
  if not callable(schedule):
    raise checks.ArgumentTypeError(
      "config.schedule must name a function that returns a schedule, a "
      f"function of the number of updates; got {checks.describe(schedule)}."
    )
  arguments = dict(config["optimizer"])
  # Not an argument of the optimizer.
  max_norm = arguments.pop("clip_by_global_norm", None)
  if max_norm is not None:
    checks.number("config.optimizer.clip_by_global_norm", max_norm, above=0)
  if "learning_rate" in arguments:
    raise ValueError(
      "config.optimizer must not have a learning_rate, got "
      f"{arguments['learning_rate']!r}: set config.learning_rate, which "
      "config.schedule turns into a schedule."
    )
  tx = _build("config.optimizer", arguments, learning_rate=schedule)
  opt_state.check_tx(tx, "config.optimizer")
  if max_norm is not None:
    # In front: the gradients are clipped, the weight decay is not.
    tx = optax.chain(optax.clip_by_global_norm(max_norm), tx)
  if config["learning_rates"]:
    tx = parameter_groups.scale_learning_rates(
      tx, config["learning_rates"], argument="config.learning_rates"
    )
  if config["freeze"]:
    tx = parameter_groups.freeze(tx, config["freeze"], argument="config.freeze")
  return tx, schedule


def _build(where: str, config: Mapping[str, Any], **given: Any) -> Any:
  """Builds an optimizer from its name and arguments.

  The numbers of built-in ones must be finite and in their range: optax accepts
  others, and then computes NaNs or increases the loss.
  """
  # A custom optimizer may take arguments that are not numbers.
  is_built_in = config.get("name") in OPTIMIZERS
  for name, value in config.items() if is_built_in else ():
    # optax uses None and booleans as flags, not as numbers.
    is_number = name != "name" and "dtype" not in name
    if is_number and value is not None and not isinstance(value, bool):
      # FTRL's power of the learning rate is negative, and checked by `ftrl`.
      minimum = -math.inf if name == "learning_rate_power" else 0
      checks.number(f"{where}.{name}", value, minimum=minimum)
  return registry.call(where, config, OPTIMIZERS, **given)
