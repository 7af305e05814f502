"""Turns a task into functions with defaults, and checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import inspect
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
from flaxshard.state import lora
from flaxshard.state.train_state import TrainState
from flaxshard.tasks import apply as apply_lib
from flaxshard.tasks import task as task_lib

# The methods of a task, and the positional arguments that each is given.
_ARGUMENTS = {
  "loss": ("apply_fn", "params", "batch", "rngs", "train"),
  "init_inputs": ("batch",),
  "predict": ("apply_fn", "params", "batch"),
  "evaluate": ("evaluation",),
  "load_data": (),
  "example": (),
  "collate": ("examples",),
  "train_batches": ("stream",),
}
# `create_model` is given the arguments that it names.
_METHODS = (*_ARGUMENTS, "create_model")
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
    names = apply_lib.collection_names(state)
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
    cls = type(metrics)
    # The `evaluate` of a task may read further values by another collection.
    if cls is self.metrics and (mask is None or self.evaluate is None):
      self._check_values_are_read(cls, values)
    if mask is not None:
      values = {"mask": mask, **values}
    try:
      single = cls.single_from_model_output(**values)
    except (KeyError, TypeError) as e:
      raise ValueError(
        f"{self.name}.metrics: {cls.__name__} cannot be made of Aux.metrics "
        f"{', '.join(map(repr, values))} ({type(e).__name__}: {e})."
        f"{checks.did_you_mean(str(e.args[0]) if e.args else '', values)}"
      ) from e
    return _merge(self.name, metrics, single)

  def _check_values_are_read(self, cls: Any, values: Mapping[str, Any]) -> None:
    try:
      program = jax.make_jaxpr(lambda v: cls.single_from_model_output(**v))(
        dict(values)
      )
    except Exception:
      return  # `update_metrics` reports it
    used = {id(v) for eqn in program.eqns for v in eqn.invars}
    used |= {id(v) for v in program.jaxpr.outvars}
    leaves = jax.tree_util.tree_leaves_with_path(dict(values))
    for (path, _), variable in zip(leaves, program.jaxpr.invars, strict=True):
      name = path[0].key
      if id(variable) not in used and name != "mask":
        fields = vars(cls).get("__annotations__", {})
        raise ValueError(
          f"{self.name}.loss: no field of {cls.__name__} reads the Aux.metrics "
          f"{name!r}; its fields are {', '.join(fields)}."
          f"{checks.did_you_mean(name, fields)}"
        )

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
    }
    given = registry.accepted(self.create_model, offered)
    if config and "config" not in given:
      raise ValueError(
        f"config.model={registry.to_plain(config)!r} has no effect: {where} "
        "makes the model, and takes no argument `config`."
      )
    if registry.accepted(self.create_model, {"rngs": None}):
      given["rngs"] = nnx.Rngs(seed)
    makers = (self.create_model, type(self.task))
    if not config and not any(
      registry.accepted(maker, {"policy": 0, "dtype": 0}) for maker in makers
    ):
      policy.warn_if_unused(where)
    model = registry.construct(where, self.create_model, {}, given=given)
    if not isinstance(model, (nn.Module, nnx.Module)) and not _makes_nnx(model):
      raise TypeError(
        f"{where} must return a Linen module, an NNX module or a function of "
        f"nnx.Rngs, got {checks.describe(model)}."
      )
    return model


def _makes_nnx(model: Any) -> bool:
  """Returns whether a value may be a function of `nnx.Rngs`."""
  if isinstance(model, type):
    return issubclass(model, nnx.Module)
  return callable(model)


def adapt(task: Any, where: str = "task") -> AdaptedTask:
  """Checks a task and returns it as functions with defaults.

  Args:
    task: An object with the attributes and methods of `flaxshard.tasks.Task`.
    where: The argument or config field that it comes from, for errors.

  Raises:
    TypeError: It is a class, or an attribute has a wrong type.
    ValueError: `loss` or `metrics` is missing, or a method has a name like that
      of an optional one.

  Example:
    >>> from flaxshard import tasks
    >>> adapt(tasks.Classification(num_classes=10)).name
    'Classification'
  """
  if isinstance(task, AdaptedTask):
    return task
  if inspect.isclass(task):
    raise TypeError(
      f"{where} must be an object, got the class {task.__qualname__}: call it, "
      f"as in task={task.__name__}()."
    )
  name = type(task).__name__
  public = [n for n in dir(type(task)) if not n.startswith("_")]
  public += [n for n in getattr(task, "__dict__", {}) if not n.startswith("_")]
  for required in ("loss", "metrics"):
    if not hasattr(task, required):
      near = checks.did_you_mean(required, public)
      raise ValueError(
        f"{where}: {name} has no {required!r}. A task has `metrics`, a "
        f"clu.metrics.Collection class, and `loss(apply_fn, params, batch, "
        f"rngs, train)`.{near}"
      )
  for method in public:
    if method not in ("metrics", *_METHODS) and callable(
      getattr(task, method, None)
    ):
      _check_spelling(f"{where}: {name}", method, public)
  functions: dict[str, Any] = {n: getattr(task, n, None) for n in _METHODS}
  for n, function in functions.items():
    if function is None:
      continue
    if not callable(function):
      raise TypeError(
        f"{where}: {name}.{n} must be a method, got "
        f"{checks.describe(function)}."
      )
    if n in _ARGUMENTS:
      _check_signature(f"{name}.{n}", function, _ARGUMENTS[n])
  _check_metrics(name, task.metrics)
  init_inputs = functions.pop("init_inputs") or _default_inputs
  adapted_inputs = _adapt_inputs(name, init_inputs)
  predict = functions.pop("predict")

  def default_predict(apply_fn: Any, params: Any, batch: Any) -> Any:
    args, kwargs = adapted_inputs(batch)
    return apply_fn(params, *args, **kwargs)[0]

  return AdaptedTask(
    task=task,
    name=name,
    metrics=task.metrics,
    init_inputs=adapted_inputs,
    predict=predict or default_predict,
    **functions,
  )


def _default_inputs(batch: Mapping[str, Any]) -> Any:
  if "inputs" not in batch:
    raise ValueError(
      "init_inputs(batch), which returns the arguments of the model's call, is "
      f"missing, and the batch has no 'inputs' but {', '.join(batch)}."
    )
  return (batch["inputs"],)


def _adapt_inputs(
  name: str, init_inputs: Callable[[Any], Any]
) -> Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]:
  """Returns `init_inputs` that always returns `(args, kwargs)`."""

  def adapted(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
      result = init_inputs(batch)
    except KeyError as e:
      raise ValueError(
        f"{name}.init_inputs: there is no key {e}; the batch has "
        f"{', '.join(batch)}."
      ) from e
    except ValueError as e:
      raise ValueError(f"{name}: {e}") from e
    if type(result) is not tuple:
      raise TypeError(
        f"{name}.init_inputs must return a tuple, the positional arguments of "
        "the model's call, or (args, kwargs) with a tuple and a dict; got "
        f"{checks.describe(result)}."
      )
    if (
      len(result) == 2
      and type(result[0]) is tuple
      and isinstance(result[1], Mapping)
    ):
      return result[0], dict(result[1])
    return result, {}

  return adapted


def _warn_of_missing_collections(
  name: str, state: TrainState, aux: task_lib.Aux
) -> None:
  names = set(apply_lib.collection_names(state))
  if isinstance(state.apply_fn, lora.Apply):
    names.remove(lora.FROZEN)  # meant not to change
  missing = sorted(names - aux.collections.keys())
  if missing:
    checks.warn(
      f"{name}.loss: Aux.collections lacks {', '.join(missing)}, which then "
      "never change. Return what apply_fn returned: Aux(metrics, collections)."
    )


def _check_signature(
  where: str, function: Callable[..., Any], names: Sequence[str]
) -> None:
  try:
    inspect.signature(function).bind(*names)
  except TypeError as e:
    raise TypeError(
      f"{where} must take the arguments ({', '.join(names)}): {e}."
    ) from e
  except ValueError:
    pass  # it has no signature


def _check_metrics(name: str, metrics: Any) -> None:
  """Raises unless metrics are a Collection that can be merged under jit."""
  is_class = inspect.isclass(metrics)
  if not (is_class and issubclass(metrics, clu_metrics.Collection)):
    raise TypeError(
      f"{name}.metrics must be a class, a clu.metrics.Collection, got "
      f"{checks.describe(metrics)}."
    )
  fields = vars(metrics).get("__annotations__", {})
  if any(isinstance(field, str) for field in fields.values()):
    raise TypeError(
      f"{name}.metrics: the fields of {metrics.__name__} are strings, because "
      "its file has `from __future__ import annotations`; clu needs types. "
      "Remove that import, or use clu.metrics.Collection.create(...)."
    )
  jax.eval_shape(lambda: _merge(name, metrics.empty(), metrics.empty()))


def _merge(
  name: str, metrics: clu_metrics.Collection, other: clu_metrics.Collection
) -> clu_metrics.Collection:
  """Returns merged metrics of the same shapes, or raises a TypeError."""
  reason = "its arrays have other shapes after a merge"
  try:
    merged = metrics.merge(other)
    if _avals(merged) == _avals(metrics):
      return merged
  except Exception as e:  # whatever a metric raises for a tracer
    reason = f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
  raise TypeError(
    f"{name}.metrics: {type(metrics).__name__} cannot be merged under jax.jit "
    f"({reason}). Metrics that collect values, such as CollectingMetric, "
    "belong in the task's `evaluate`."
  )


def _avals(tree: Any) -> Any:
  leaves, structure = jax.tree.flatten(tree)
  return structure, [(jnp.shape(x), jnp.result_type(x)) for x in leaves]


def _check_spelling(where: str, method: str, public: Sequence[str]) -> None:
  """Raises if a method is named nearly like an optional one."""
  missing = [n for n in _METHODS if n not in public]
  near = checks.did_you_mean(method, missing, cutoff=0.85)
  if near:
    raise ValueError(
      f"{where} has a method {method!r}, which is not called.{near} Begin the "
      "name of a method of your own with an underscore."
    )


def _describe_result(result: Any) -> str:
  if isinstance(result, tuple):
    return f"({', '.join(checks.describe(x) for x in result)})"
  return checks.describe(result)
