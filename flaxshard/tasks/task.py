"""Tasks: the protocol, and a user's task as functions with defaults."""

from __future__ import annotations

from collections.abc import Mapping
import inspect
from typing import Any, Protocol

from clu import metrics as clu_metrics
import flax
import jax

from flaxshard import models
from flaxshard.core import checks
from flaxshard.core import registry
from flaxshard.state import fields as fields_lib
from flaxshard.state import lora
from flaxshard.state.train_state import TrainState
from flaxshard.tasks import apply
from flaxshard.tasks.apply import Apply
from flaxshard.wrappers import stack

Batch = Mapping[str, jax.Array]


@flax.struct.dataclass
class Aux:
  """Metrics and collections that a loss returns beside its value.

  Attributes:
    metrics: Arrays by name: the keyword arguments of the task's
      `metrics.single_from_model_output`. An array `[batch, ...]` is averaged
      without the padding of evaluation batches.
    collections: New values of collections of the state, as `apply_fn` returned
      them. They are not used in evaluation.
  """

  metrics: Mapping[str, Any]
  collections: Mapping[str, Any] = flax.struct.field(default_factory=dict)


class Task(Protocol):
  """Protocol of a training task: an object with these attributes and methods.

  A task does not inherit from this class. It may also have the methods

  - `create_model(self, ...)`: Returns a Linen module, an NNX module, or a
    function of `nnx.Rngs` that makes one. It takes any of `config` (the dict
    `config.model`), `example`, `num_classes`, `policy`, `dtype`, `seed` and
    `rngs`. Without it the model is that of `config.model`.
  - `init_inputs(self, batch)`: Returns the arguments of the model's call for
    its initialization: a tuple, or `(args, kwargs)`. The default is
    `(batch["inputs"],)`.
  - `predict(self, apply_fn, params, batch)`: Returns the outputs of the model
    for an export. The default is `apply_fn(params, *init_inputs(batch))[0]`.
  - `evaluate(self, evaluation)`: Returns numbers by name; see `Evaluation`. The
    default is `evaluation.means()`.
  - `load_data(self)`: Returns `flaxshard.data.Splits`. The default loads
    `config.data`.
  - `example(self)`: Returns shapes of the arrays of an example without the
    batch dimension. A plan uses it in place of the data. It is necessary if
    there is no data, but `train_batches`.
  - `collate(self, examples)`: Makes a batch of a sequence of examples. The
    default stacks the arrays of each key.
  - `train_batches(self, stream)`: Iterates over training batches that are made
    as the run goes, such as rollouts of the newest state; see `Stream`.

  Attributes:
    metrics: The metrics of training and evaluation.
  """

  metrics: type[clu_metrics.Collection]

  def loss(
    self,
    apply_fn: Apply,
    params: Any,
    batch: Batch,
    rngs: Mapping[str, jax.Array],
    train: bool,
  ) -> tuple[jax.Array, Aux]:
    """Computes the loss of a batch.

    Args:
      apply_fn: Applies the model; see `Apply`.
      params: The parameters to differentiate.
      batch: Arrays `[batch, ...]` by name. In evaluation it has "mask", which
        is False for padding.
      rngs: A PRNG key for every stream name that is asked for.
      train: Whether this is a train step, not an evaluation.

    Returns:
      The loss, a floating-point scalar, and an `Aux`.
    """


class AdaptedTask:
  """A checked task. A method that the task lacks is None, or has a default.

  Attributes:
    task: The user's object.
    name: Name of the task, for messages.
    metrics: The metrics of training and evaluation.
    loss: `loss(apply_fn, params, batch, rngs, train)` of the task.
    create_model: None: the model is that of `config.model`.
    evaluate: None: the means of the metrics.
    load_data: None: the data is that of `config.data`.
    example: None: that of the data.
    collate: None: arrays are stacked.
    train_batches: None: batches are read from the data.
  """

  def __init__(self, task: Any):
    self.task = task
    self.name = type(task).__name__
    self.metrics: type[clu_metrics.Collection] = task.metrics
    self.loss: Any = task.loss
    self.create_model: Any = getattr(task, "create_model", None)
    self.evaluate: Any = getattr(task, "evaluate", None)
    self.load_data: Any = getattr(task, "load_data", None)
    self.example: Any = getattr(task, "example", None)
    self.collate: Any = getattr(task, "collate", None)
    self.train_batches: Any = getattr(task, "train_batches", None)
    self._init_inputs: Any = getattr(task, "init_inputs", None)
    self._predict: Any = getattr(task, "predict", None)

  def init_inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns `(args, kwargs)` of the model's call for a batch."""
    if self._init_inputs is not None:
      result = self._init_inputs(batch)
    elif "inputs" in batch:
      result = (batch["inputs"],)
    else:
      raise ValueError(
        "init_inputs(batch), which returns the arguments of the model's call, "
        f"is missing, and the batch has no 'inputs' but {', '.join(batch)}."
      )
    match result:
      case (tuple() as args, Mapping() as kwargs):
        return args, dict(kwargs)
      case tuple():
        return result, {}
    raise TypeError(
      f"{self.name}.init_inputs must return a tuple, the positional arguments "
      "of the model's call, or (args, kwargs) with a tuple and a dict; got "
      f"{checks.describe(result)}."
    )

  def predict(self, apply_fn: Any, params: Any, batch: Any) -> Any:
    """Returns the outputs of the model for a batch."""
    if self._predict is not None:
      return self._predict(apply_fn, params, batch)
    args, kwargs = self.init_inputs(batch)
    return apply_fn(params, *args, **kwargs)[0]

  def __call__(
    self,
    state: TrainState,
    params: Any,
    batch: Mapping[str, Any],
    rngs: apply.Rngs,
    train: bool,
  ) -> tuple[jax.Array, Aux]:
    """Computes the loss of a batch, and checks what the task returns.

    Args:
      state: The train state, whose collections the model uses.
      params: The parameters.
      batch: Arrays by name.
      rngs: The random streams.
      train: Whether this is a train step.

    Raises:
      TypeError: The task does not return a loss and an `Aux`.
    """
    apply_fn = apply.apply_in(state, train=train, rngs=rngs)
    result = self.loss(apply_fn, params, batch, rngs, train)
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not isinstance(result[1], Aux):
      raise TypeError(
        f"{self.name}.loss must return (loss, flaxshard.tasks.Aux(metrics=...))"
        f", got {checks.describe(result)}."
      )
    loss, aux = result
    if train:
      names = set(fields_lib.collections(state))
      if isinstance(state.apply_fn, lora.Apply):
        names.remove(stack.FROZEN)  # meant not to change
      if missing := sorted(names - aux.collections.keys()):
        checks.warn(
          f"{self.name}.loss: Aux.collections lacks {', '.join(missing)}, "
          "which then never change. Return what apply_fn returned: "
          "Aux(metrics, collections)."
        )
    return loss, aux

  def make_model(self, config: Any, **known: Any) -> Any:
    """Creates the model.

    Args:
      config: `config.model`, a dict or ConfigDict.
      **known: The other arguments of `flaxshard.models.create`.

    Raises:
      TypeError, ValueError: `config.model` is not what the task needs, or
        the model cannot be created.
    """
    where = f"{self.name}.create_model"
    if self.create_model is None:
      if not config:
        raise ValueError(f"config.model is missing: there is no {where}.")
      return models.create(config, **known)
    config = registry.to_plain(config)
    if config and not registry.accepted(self.create_model, {"config": config}):
      raise ValueError(
        f"config.model={config!r} has no effect: {where} makes the model, and "
        "takes no argument `config`."
      )
    return models.make(where, self.create_model, {}, config=config, **known)


def adapt(task: Any, where: str = "task") -> AdaptedTask:
  """Checks a task and returns it as functions with defaults.

  Args:
    task: An object with the attributes and methods of `flaxshard.tasks.Task`.
    where: The argument or config field that it comes from, for errors.

  Raises:
    TypeError: It is a class, or its metrics have a wrong type.
    ValueError: `loss` or `metrics` is missing.

  Example:
    >>> import flaxshard as fs
    >>> from flaxshard import tasks
    >>> fs.tasks.adapt(tasks.Classification(num_classes=10)).name
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
  public = [n for n in dir(task) if not n.startswith("_")]
  for required in ("loss", "metrics"):
    if required not in public:
      raise ValueError(
        f"{where}: {name} has no {required!r}. A task has `metrics`, a "
        "clu.metrics.Collection class, and `loss(apply_fn, params, batch, "
        f"rngs, train)`.{checks.did_you_mean(required, public)}"
      )
  metrics = task.metrics
  is_class = inspect.isclass(metrics)
  if not (is_class and issubclass(metrics, clu_metrics.Collection)):
    raise TypeError(
      f"{name}.metrics must be a class, a clu.metrics.Collection, got "
      f"{checks.describe(metrics)}."
    )
  # Those of the class itself: clu does not read those of base classes.
  for field in vars(metrics).get("__annotations__", {}).values():
    if isinstance(field, str):
      raise TypeError(
        f"{name}.metrics: the fields of {metrics.__name__} are strings, "
        "because its file has `from __future__ import annotations`; clu needs "
        "types. Remove that import, or use clu.metrics.Collection.create(...)."
      )
    if issubclass(field, clu_metrics.CollectingMetric):
      raise TypeError(
        f"{name}.metrics: {metrics.__name__} has a CollectingMetric, which "
        "cannot be merged under jax.jit. Collect values in the task's "
        "`evaluate`."
      )
  return AdaptedTask(task)
