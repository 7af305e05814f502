"""Checks the metrics of a task, and merges them."""

from __future__ import annotations

from collections.abc import Mapping
import inspect
from typing import Any

from clu import metrics as clu_metrics
import jax
import jax.numpy as jnp

from flaxshard.core import checks


def check_class(name: str, metrics: Any) -> None:
  """Raises unless metrics are a Collection that can be merged under jit.

  Args:
    name: Name of the task, for errors.
    metrics: The attribute `metrics` of the task.

  Raises:
    TypeError: They are not.
  """
  is_class = inspect.isclass(metrics)
  if not (is_class and issubclass(metrics, clu_metrics.Collection)):
    raise TypeError(
      f"{name}.metrics must be a class, a clu.metrics.Collection, got "
      f"{checks.describe(metrics)}."
    )
  if any(isinstance(field, str) for field in fields(metrics).values()):
    raise TypeError(
      f"{name}.metrics: the fields of {metrics.__name__} are strings, because "
      "its file has `from __future__ import annotations`; clu needs types. "
      "Remove that import, or use clu.metrics.Collection.create(...)."
    )
  jax.eval_shape(lambda: _merge(name, metrics.empty(), metrics.empty()))


def fields(cls: type[clu_metrics.Collection]) -> dict[str, Any]:
  """Returns the types of the metrics of a collection, by name."""
  # Those of the class itself: clu does not read those of base classes.
  return vars(cls).get("__annotations__", {})


def check_values_are_read(
  name: str, cls: type[clu_metrics.Collection], values: Mapping[str, Any]
) -> None:
  """Raises if no metric reads one of the values of a loss.

  Args:
    name: Name of the task, for errors.
    cls: The class of the metrics.
    values: `Aux.metrics` of the loss.

  Raises:
    ValueError: A value is not read.
  """
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
    key = path[0].key
    if id(variable) not in used and key != "mask":
      names = fields(cls)
      raise ValueError(
        f"{name}.loss: no field of {cls.__name__} reads the Aux.metrics "
        f"{key!r}; its fields are {', '.join(names)}."
        f"{checks.did_you_mean(key, names)}"
      )


def update(
  name: str, metrics: clu_metrics.Collection, values: Mapping[str, Any]
) -> clu_metrics.Collection:
  """Merges the metrics of a batch into those so far.

  Args:
    name: Name of the task, for errors.
    metrics: The metrics so far.
    values: The keyword arguments of `single_from_model_output`.

  Raises:
    ValueError: A metric needs a value that is missing.
    TypeError: The metrics cannot be merged under `jax.jit`.
  """
  cls = type(metrics)
  try:
    single = cls.single_from_model_output(**values)
  except (KeyError, TypeError) as e:
    raise ValueError(
      f"{name}.metrics: {cls.__name__} cannot be made of Aux.metrics "
      f"{', '.join(map(repr, values))} ({type(e).__name__}: {e})."
      f"{checks.did_you_mean(str(e.args[0]) if e.args else '', values)}"
    ) from e
  return _merge(name, metrics, single)


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
