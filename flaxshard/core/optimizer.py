"""The optimizer and the learning-rate schedule that a config names."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import optax

from flaxshard.core import registry


def sgd(
  learning_rate: optax.ScalarOrSchedule,
  momentum: float | None = None,
  nesterov: bool = False,
  weight_decay: float = 0.0,
) -> optax.GradientTransformation:
  """`optax.sgd`, with weight decay on what has more than one dimension."""
  update = optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov)
  if not weight_decay:
    return update
  # Biases and normalization scales are not decayed.
  matrices = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
  return optax.chain(
    optax.add_decayed_weights(weight_decay, mask=matrices), update
  )


_OPTIMIZERS: dict[str, Any] = {
  "adafactor": optax.adafactor,
  "adam": optax.adam,
  "adamw": optax.adamw,
  "lamb": optax.lamb,
  "lion": optax.lion,
  "rmsprop": optax.rmsprop,
  "sgd": sgd,
}


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """An optimizer as a config names it: equal where name and arguments are.

  It can be used where optax's `GradientTransformation` can.

  Args:
    name: One of optax's that configs know, or `"package.module:function"`.
    arguments: Pairs of names and values; plain numbers.

  Raises:
    ValueError, TypeError: An unknown name or argument.

  Example:
    >>> tx = Optimizer("sgd", (("learning_rate", 0.7), ("momentum", 0.9)))
    >>> tx.init(jax.numpy.ones(2))[0].trace.tolist()
    [0.0, 0.0]
  """

  name: str
  arguments: tuple[tuple[str, Any], ...] = ()

  def __post_init__(self) -> None:
    where = f"optimizer {self.name!r}"
    arguments = dict(self.arguments)
    if self.name in _OPTIMIZERS:
      _check_numbers(arguments, where)
    function = registry.lookup("optimizer", self.name, _OPTIMIZERS)
    tx = registry.construct(where, function, arguments)
    object.__setattr__(self, "_tx", tx)

  def init(self, params: Any) -> Any:
    """Returns the first state."""
    return self._tx.init(params)  # type: ignore[attr-defined]

  def update(self, updates: Any, state: Any, params: Any = None) -> Any:
    """Returns the updates to apply, and the next state."""
    return self._tx.update(updates, state, params)  # type: ignore[attr-defined]


def _constant(learning_rate: float, num_train_steps: int) -> optax.Schedule:
  del num_train_steps
  return optax.constant_schedule(learning_rate)


def _cosine(
  learning_rate: float, num_train_steps: int, warmup_steps: int = 0
) -> optax.Schedule:
  if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int):
    raise TypeError(f"warmup_steps must be an integer, got {warmup_steps!r}.")
  if warmup_steps < 0:
    raise ValueError(f"warmup_steps must not be negative, got {warmup_steps}.")
  return optax.warmup_cosine_decay_schedule(
    0.0 if warmup_steps else learning_rate,
    learning_rate,
    warmup_steps,
    max(num_train_steps, warmup_steps + 1),
  )


_SCHEDULES: dict[str, Any] = {"constant": _constant, "cosine": _cosine}


def create(
  config: Mapping[str, Any],
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """Builds `config.optimizer` with `config.schedule`.

  Args:
    config: A checked config. `optimizer` names an optimizer of optax, or
      `"package.module:function"`; its other fields are arguments, but for
      `clip_by_global_norm`. `schedule` is `"constant"`, or `"cosine"` with
      `warmup_steps`, or a function of one's own of `learning_rate` and
      `num_train_steps`.

  Returns:
    `(tx, schedule)`; the schedule takes the number of applied updates.

  Raises:
    ValueError: An unknown name or argument.
  """
  schedule = registry.call(
    "config.schedule",
    config["schedule"],
    _SCHEDULES,
    learning_rate=config["learning_rate"],
    num_train_steps=config["num_train_steps"],
  )
  if not callable(schedule):
    raise TypeError(
      f"config.schedule: {config['schedule']['name']!r} must return a function "
      f"of the step, got {schedule!r}."
    )
  arguments = dict(config["optimizer"])
  if arguments.get("name") in _OPTIMIZERS:
    _check_numbers(arguments)
  max_norm = arguments.pop("clip_by_global_norm", None)
  tx = registry.call(
    "config.optimizer", arguments, _OPTIMIZERS, learning_rate=schedule
  )
  if max_norm is not None:
    tx = optax.chain(optax.clip_by_global_norm(max_norm), tx)
  return tx, schedule


def _check_numbers(
  arguments: Mapping[str, Any], where: str = "config.optimizer"
) -> None:
  """Refuses what optax takes and then computes with: strings, NaN, below 0."""
  for name, value in arguments.items():
    if name == "name" or value is None or isinstance(value, bool):
      continue
    if not isinstance(value, (int, float)):
      raise TypeError(f"{where}.{name} must be a number, got {value!r}.")
    if not 0 <= value < float("inf") or (
      name == "clip_by_global_norm" and not value
    ):
      raise ValueError(
        f"{where}.{name} must be finite and not negative, got {value!r}."
      )
