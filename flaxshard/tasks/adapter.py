"""Turns a task into functions with defaults, and checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import inspect
from typing import Any

from flaxshard.core import checks
from flaxshard.tasks import metrics as metrics_lib
from flaxshard.tasks.adapted import AdaptedTask

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
  metrics_lib.check_class(name, task.metrics)
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


def _check_spelling(where: str, method: str, public: Sequence[str]) -> None:
  """Raises if a method is named nearly like an optional one."""
  missing = [n for n in _METHODS if n not in public]
  near = checks.did_you_mean(method, missing, cutoff=0.85)
  if near:
    raise ValueError(
      f"{where} has a method {method!r}, which is not called.{near} Begin the "
      "name of a method of your own with an underscore."
    )
