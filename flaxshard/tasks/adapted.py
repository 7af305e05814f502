"""A checked task, as functions with defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from clu import metrics as clu_metrics
from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flaxshard import models
from flaxshard.core import checks
from flaxshard.core import registry
from flaxshard.core.policy import Policy
from flaxshard.state import fields as fields_lib
from flaxshard.state import lora
from flaxshard.state.train_state import TrainState
from flaxshard.tasks import apply as apply_lib
from flaxshard.tasks import metrics as metrics_lib
from flaxshard.tasks import task as task_lib

_ARRAYS = (jax.Array, np.ndarray, np.generic)


@dataclasses.dataclass(frozen=True, eq=False)
class AdaptedTask:
  """A checked task, with a function for every method.

  Attributes:
    task: The user's object.
    name: Name of the task, for messages.
    metrics: The metrics of training and evaluation.
    loss: `loss(apply_fn, params, batch, rngs, train)` of the task.
    init_inputs: Returns `(args, kwargs)` of the model's call for a batch.
    predict: `predict(apply_fn, params, batch)` returns the outputs.
    create_model: The task's method, or None: the model is that of
      `config.model`.
    evaluate: The task's method, or None: the means of the metrics.
    load_data: The task's method, or None: the data is that of `config.data`.
    example: The task's method, or None.
    collate: The task's method, or None: arrays are stacked.
    train_batches: The task's method, or None: batches are read from the data.
  """

  task: Any
  name: str
  metrics: type[clu_metrics.Collection]
  loss: Callable[..., Any]
  init_inputs: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]
  predict: Callable[..., Any]
  create_model: Callable[..., Any] | None = None
  evaluate: Callable[..., Any] | None = None
  load_data: Callable[..., Any] | None = None
  example: Callable[..., Any] | None = None
  collate: Callable[..., Any] | None = None
  train_batches: Callable[..., Any] | None = None

  def __call__(
    self,
    state: TrainState,
    params: Any,
    batch: Mapping[str, Any],
    rngs: apply_lib.Rngs,
    train: bool,
  ) -> tuple[jax.Array, task_lib.Aux]:
    """Computes the loss of a batch, and checks what the task returns.

    Args:
      state: The train state, whose collections the model uses.
      params: The parameters.
      batch: Arrays by name.
      rngs: The random streams.
      train: Whether this is a train step.

    Raises:
      TypeError, ValueError: The loss is not a floating-point scalar with an
        `Aux`, or the aux has a collection that the state does not have.
    """
    apply_fn = apply_lib.apply_in(state, train=train, rngs=rngs)
    try:
      result = self.loss(apply_fn, params, batch, rngs, train)
    except KeyError as e:
      key = e.args[0] if e.args else None
      if not isinstance(key, str) or key in batch:
        raise
      raise ValueError(
        f"{self.name}.loss: there is no key {key!r}; the batch has "
        f"{', '.join(batch)}.{checks.did_you_mean(key, batch)}"
      ) from e
    loss, aux = self._check_result(state, result)
    if train:
      _warn_of_missing_collections(self.name, state, aux)
    return loss, aux

  def _check_result(
    self, state: TrainState, result: Any
  ) -> tuple[jax.Array, task_lib.Aux]:
    where = f"{self.name}.loss"
    if (
      not isinstance(result, tuple)
      or len(result) != 2
      or not isinstance(result[1], task_lib.Aux)
    ):
      raise TypeError(
        f"{where} must return (loss, flaxshard.tasks.Aux(metrics=...)), got "
        f"{_describe_result(result)}."
      )
    loss, aux = result
    shape, dtype = jnp.shape(loss), jnp.result_type(loss)
    if shape or not jnp.issubdtype(dtype, jnp.floating):
      mean = " Take its mean." if shape else ""
      raise ValueError(
        f"{where} must return a floating-point scalar as the loss, got "
        f"{checks.describe(loss)}.{mean}"
      )
    if not isinstance(aux.metrics, Mapping):
      raise TypeError(
        f"{where}: Aux.metrics must be a dict of arrays, got "
        f"{checks.describe(aux.metrics)}."
      )
    if not isinstance(aux.collections, Mapping):
      raise TypeError(
        f"{where}: Aux.collections must be a dict of collections, got "
        f"{checks.describe(aux.collections)}."
      )
    names = list(fields_lib.collections(state))
    for name in aux.collections:
      if name not in names:
        raise ValueError(
          f"{where}: Aux.collections has {name!r}, and the state has "
          f"{', '.join(names) or 'no collections'}."
          f"{checks.did_you_mean(name, names)}"
        )
    return loss, aux

  def update_metrics(
    self,
    metrics: clu_metrics.Collection,
    values: Mapping[str, Any],
    *,
    mask: Any = None,
  ) -> clu_metrics.Collection:
    """Merges the metrics of a batch into those so far.

    Args:
      metrics: The metrics so far, of the task or of another collection.
      values: `Aux.metrics`: the keyword arguments of
        `single_from_model_output`.
      mask: The mask of an evaluation batch, used if `values` has none.

    Raises:
      ValueError: A metric needs a value that is missing, or no metric of the
        task reads a value.
    """
    # The `evaluate` of a task may read further values by another collection.
    if type(metrics) is self.metrics and (mask is None or not self.evaluate):
      metrics_lib.check_values_are_read(self.name, self.metrics, values)
    if mask is not None:
      values = {"mask": mask, **values}
    return metrics_lib.update(self.name, metrics, values)

  def abstract_inputs(
    self, batch: Mapping[str, Any]
  ) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns `init_inputs` of a batch of shapes, with shapes of the arrays.

    Args:
      batch: Arrays or `jax.ShapeDtypeStruct`s by name.
    """
    leaves: list[Any] = []
    trees: list[Any] = []

    def trace(batch: Any) -> dict[int, Any]:
      flat, tree = jax.tree.flatten(self.init_inputs(batch))
      leaves.extend(flat)
      trees.append(tree)
      return {i: x for i, x in enumerate(flat) if isinstance(x, _ARRAYS)}

    # Other leaves are flags, which stay as they are.
    arrays = jax.eval_shape(trace, dict(batch))
    given = [arrays.get(i, x) for i, x in enumerate(leaves)]
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    inputs = jax.tree.unflatten(trees[0], given)
    return inputs

  def make_model(
    self,
    config: Any,
    *,
    example: Mapping[str, Any],
    num_classes: int | None,
    policy: Policy,
    seed: int,
  ) -> Any:
    """Creates the model.

    Args:
      config: `config.model`, a dict or ConfigDict.
      example: One example of the data, without the batch dimension.
      num_classes: Number of classes of the data, or None.
      policy: The precision.
      seed: The seed of the run.

    Raises:
      TypeError, ValueError: `config.model` is not what the task needs, or
        the model cannot be created.
    """
    if self.create_model is None:
      if not config:
        raise ValueError(
          f"config.model is missing: task {self.name} has no create_model."
        )
      return models.create(
        config,
        num_classes=num_classes,
        policy=policy,
        seed=seed,
        example=example,
      )
    where = f"{self.name}.create_model"
    offered = {
      "config": registry.to_plain(config),
      "example": example,
      "num_classes": num_classes,
      "policy": policy,
      "dtype": policy.compute_dtype,
      "seed": seed,
      "rngs": None,
    }
    given = registry.accepted(self.create_model, offered)
    if config and "config" not in given:
      raise ValueError(
        f"config.model={registry.to_plain(config)!r} has no effect: {where} "
        "makes the model, and takes no argument `config`."
      )
    if "rngs" in given:
      given["rngs"] = nnx.Rngs(seed)
    makers = (self.create_model, type(self.task))
    if not config and not any(
      registry.accepted(maker, {"policy": 0, "dtype": 0}) for maker in makers
    ):
      policy.warn_if_unused(where)
    model = registry.construct(where, self.create_model, {}, given=given)
    if not isinstance(model, (nn.Module, nnx.Module)) and (
      isinstance(model, type) or not callable(model)
    ):
      raise TypeError(
        f"{where} must return a Linen module, an NNX module or a function of "
        f"nnx.Rngs, got {checks.describe(model)}."
      )
    return model


def _warn_of_missing_collections(
  name: str, state: TrainState, aux: task_lib.Aux
) -> None:
  names = set(fields_lib.collections(state))
  if isinstance(state.apply_fn, lora.Apply):
    names.remove(lora.FROZEN)  # meant not to change
  missing = sorted(names - aux.collections.keys())
  if missing:
    checks.warn(
      f"{name}.loss: Aux.collections lacks {', '.join(missing)}, which then "
      "never change. Return what apply_fn returned: Aux(metrics, collections)."
    )


def _describe_result(result: Any) -> str:
  if isinstance(result, tuple):
    return f"({', '.join(checks.describe(x) for x in result)})"
  return checks.describe(result)
