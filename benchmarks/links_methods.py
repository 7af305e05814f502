"""The methods that `links.py` compares: data parallelism, kinds of AGN."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax.flatten_util
import optax

import flaxshard as fs
from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import base


@dataclasses.dataclass(frozen=True)
class PackedMean(base.Base):
  """Averages gradients over the replicas in one array.

  gloo reduces one array after another, and each waits for several round trips.
  `fs.CrossShard("mean")` leaves the gradients as they are.
  """

  reduces_gradients = True

  def apply(
    self, state: Any, target: base.Target, grads: Any, next: base.Next
  ) -> tuple[base.Target, Any]:
    """Calls `next` with the averaged gradients."""
    packed, unpack = jax.flatten_util.ravel_pytree(grads)
    reduced = replica_context.reduce_gradients("mean", {"packed": packed})
    with replica_context.gradients_already_reduced():
      return next(target, unpack(reduced["packed"])), state


@dataclasses.dataclass(frozen=True)
class Method:
  """A way to train on several processes.

  Attributes:
    wrapper: Returns the wrapper.
    period: Local steps between commits; 1 for data parallelism.
    rates: The peak learning rate by task, where it is not that of the config.
    is_constant: Whether the rate is constant, and not that of the config.
    is_host: Whether commits go from host to host, by `fs.Worker`.
    is_alone: Whether nothing is committed, to measure the computation alone.
    same_losses_as: The method that has the same losses after each step.
    same_seconds_as: The method that sends the same, and takes as long.
  """

  wrapper: Callable[[], Any]
  period: int = 1
  rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
  is_constant: bool = False
  is_host: bool = False
  is_alone: bool = False
  same_losses_as: str = ""
  same_seconds_as: str = ""


def _mean(period: int, **options: Any) -> Method:
  return Method(
    lambda: fs.AGN(period, "mean", **options),
    period,
    rates={"digits": 1e-2, "lm_text": 1e-2},
    is_constant=True,
    is_host=options.get("transport") == "host",
  )


def _delta(
  period: int, rate: float = 1.0, momentum: float = 0.0, **options: Any
) -> Method:
  """Commits the change of the parameters.

  By default the center becomes the mean of the local parameters: local SGD.
  DiLoCo has a rate of 0.7 and Nesterov momentum of 0.9.
  """

  def create() -> fs.AGN:
    outer = optax.sgd(rate, momentum=momentum or None, nesterov=bool(momentum))
    return fs.AGN(period, "mean", outer_tx=outer, commit_delta=True, **options)

  return Method(create, period, is_host=options.get("transport") == "host")


# Only local steps.
ALONE = "no commits"

_STREAMING: dict[str, Any] = dict(fragments=4, delay=5)
_HOST: dict[str, Any] = dict(transport="host", deadline=120.0, heartbeat=30.0)
_INT8: dict[str, Any] = dict(commit_dtype="int8")


METHODS: dict[str, Method] = {
  "data parallel": Method(lambda: fs.CrossShard("mean")),
  "data parallel, packed": Method(PackedMean, same_losses_as="data parallel"),
  "mean, 10": _mean(10),
  "mean, 40": _mean(40),
  "host: local SGD, 10": _delta(10, **_HOST),
  "host: local SGD, 10, int8": _delta(10, **_HOST, **_INT8),
  "host: local SGD, 40": _delta(40, **_HOST),
  "host: DiLoCo, 40": dataclasses.replace(
    _delta(40, 0.7, 0.9, **_HOST), same_seconds_as="host: local SGD, 40"
  ),
  "host: local SGD, 40, delay": _delta(40, delay=20, **_HOST),
  "host: streaming, 40, int8": _delta(40, **_STREAMING, **_INT8, **_HOST),
  # No run is so long.
  ALONE: dataclasses.replace(_delta(10**4, **_HOST), period=10, is_alone=True),
}

# Color and line of the methods in the picture.
STYLES: dict[str, tuple[str, str]] = {
  "data parallel": ("0.6", "-"),
  "data parallel, packed": ("0.6", "--"),
  "mean, 10": ("#e6843c", "-"),
  "mean, 40": ("#8c2d04", "-"),
  "host: local SGD, 10": ("#7fb8d8", "-"),
  "host: local SGD, 10, int8": ("#7fb8d8", "--"),
  "host: local SGD, 40": ("#2f6f9f", "-"),
  "host: DiLoCo, 40": ("#6a9a3a", "-"),
  "host: local SGD, 40, delay": ("#2f6f9f", "--"),
  "host: streaming, 40, int8": ("#0b2a5b", "-"),
}


def optimizer(
  config: Any, task: str, method: Method, steps: int
) -> optax.GradientTransformation:
  """Returns the optimizer of local steps: that of the config of the task.

  Args:
    config: The config.
    task: Its name.
    method: The method.
    steps: Number of steps of a whole run, for the schedule.
  """
  rate = method.rates.get(task, config.learning_rate)
  schedule = rate
  if not method.is_constant:
    # The warmup takes as large a part of a run as in the config.
    warmup = config.schedule.warmup_steps * steps // config.num_train_steps
    schedule = optax.warmup_cosine_decay_schedule(0, rate, warmup, steps)
  update = optax.adamw(schedule, weight_decay=config.optimizer.weight_decay)
  clip = config.optimizer.get("clip_by_global_norm")
  if clip is None:
    return update
  return optax.chain(optax.clip_by_global_norm(clip), update)
