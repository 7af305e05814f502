"""The kinds of values that config fields have, and how each is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

from flaxshard import wrappers as wrappers_lib
from flaxshard.core import checks
from flaxshard.core import parameter_groups
from flaxshard.core import patterns as patterns_lib
from flaxshard.partitioning import rules


@dataclasses.dataclass(frozen=True)
class Kind:
  """The values that a field may have.

  Attributes:
    type: Python type of the values. If there are several, the type of which
      text from the command line is read: `str` takes the text as it is, `bool`
      takes true and false, others take a Python literal.
    allowed: What is allowed, for `--help=config`.
    check: `check(field, value)` returns the value, or raises a ValueError that
      names the field, the value and what is allowed.
  """

  type: type
  allowed: str
  check: Callable[[str, Any], Any]


def integer(minimum: int) -> Kind:
  """Returns the kind of integers of at least `minimum`."""
  check = functools.partial(checks.integer, minimum=minimum)
  return Kind(int, f"integer, at least {minimum}", check)


def one_of(*allowed: str) -> Kind:
  """Returns the kind of a few strings."""
  check = functools.partial(checks.one_of, allowed=allowed)
  return Kind(str, " or ".join(f'"{a}"' for a in allowed), check)


def sequence(allowed: str) -> Kind:
  """Returns the kind of sequences, whose elements are checked elsewhere."""
  return Kind(tuple, allowed, _check_sequence)


def fields(*names: str) -> Kind:
  """Returns the kind of a dict with some of these fields."""
  check = functools.partial(_check_dict, names=names)
  return Kind(dict, "dict of the fields below", check)


def _is_int(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _check_dict(field: str, value: Any, names: Sequence[str]) -> Any:
  if not isinstance(value, dict):
    raise ValueError(
      f"{field} must be a dict with {', '.join(names)}, got {value!r}."
    )
  return value


def _check_text(field: str, value: Any) -> str:
  if not isinstance(value, str):
    raise ValueError(f"{field} must be a string, got {value!r}.")
  return value


def _check_sequence(field: str, value: Any) -> Any:
  if not isinstance(value, (tuple, list)):
    raise ValueError(f"{field} must be a sequence, got {value!r}.")
  return value


def _check_named(field: str, value: Any) -> Any:
  if isinstance(value, str):
    return {"name": value}
  if not isinstance(value, dict) or not isinstance(value.get("name"), str):
    raise ValueError(
      f"{field} must be a name, or a dict with a 'name' and the arguments of "
      f"what it names, got {value!r}."
    )
  return value


def _check_wrappers(field: str, value: Any) -> Any:
  try:
    wrappers_lib.from_config(value)
  except (TypeError, ValueError) as e:
    is_type_error = isinstance(e, TypeError)
    kind = checks.ArgumentTypeError if is_type_error else ValueError
    raise kind(f"{field}: {e}") from e
  return value


def _check_steps_range(field: str, value: Any) -> Any:
  is_range = isinstance(value, (tuple, list)) and (
    len(value) == 0
    or (len(value) == 2 and all(map(_is_int, value)) and value[0] > 0)
  )
  if not is_range or list(value) != sorted(value):
    raise ValueError(
      f"{field} must be () or (first step, last step), got {value!r}."
    )
  return value


def _check_replicas(field: str, value: Any) -> int:
  if not _is_int(value) or not (value == -1 or value > 0):
    raise ValueError(
      f"{field} must be a number of replicas, or -1 for as many as fit, got "
      f"{value!r}."
    )
  return value


def _is_axis(value: Any) -> bool:
  return (
    isinstance(value, (tuple, list))
    and len(value) == 2
    and isinstance(value[0], str)
    # The strategy adds the axis "replica" itself.
    and value[0] not in ("", "replica")
    and _is_int(value[1])
    and value[1] > 0
  )


def _check_axes(field: str, value: Any) -> Any:
  if (
    not isinstance(value, (tuple, list))
    or not all(map(_is_axis, value))
    or len({name for name, _ in value}) < len(value)
  ):
    raise ValueError(
      f"{field} must be (name, size) pairs such as (('model', 2),), with "
      f"different names other than 'replica', got {value!r}."
    )
  return value


def _check_split(field: str, value: Any) -> Any:
  if not isinstance(value, dict) or not all(
    isinstance(pieces, (tuple, list)) and all(map(_is_int, pieces))
    for pieces in value.values()
  ):
    raise ValueError(
      f"{field} must be a dict from keys of the batch to numbers of pieces, "
      f"such as {{'inputs': (1, 2, 4, 1)}}, got {value!r}."
    )
  return value


def _check_evaluation_metric(field: str, value: Any) -> str:
  # The metrics of training are means since the last row, and a signal adds a
  # row: a resumed run would have others than one without an interruption.
  if not isinstance(value, str) or not (
    value == "none" or value.startswith("eval_")
  ):
    raise ValueError(
      f"{field} must be 'none' or a metric of the evaluation, such as "
      f"'eval_loss', got {value!r}."
    )
  return value


def _is_hook(value: Any) -> bool:
  name = value.get("name") if isinstance(value, dict) else value
  return isinstance(name, str) and ":" in name


def _check_hooks(field: str, value: Any) -> Any:
  if not isinstance(value, (tuple, list)) or not all(map(_is_hook, value)):
    raise ValueError(
      f"{field} must be a sequence of names 'package.module:name' and dicts "
      "with a 'name' and arguments, such as ('my_package.hooks:log',), got "
      f"{value!r}."
    )
  return value


def _check_rules(field: str, value: Any) -> Any:
  try:
    rules.from_config(value, argument=field)
  except TypeError as e:
    # Every invalid field is a ValueError.
    raise ValueError(str(e)) from e
  return value


def _check_optional_named(field: str, value: Any) -> Any:
  # None: not set in `defaults`.
  return {} if value in ({}, None) else _check_named(field, value)


def _check_model(field: str, value: Any) -> Any:
  if value is None:  # not set in `defaults`
    return {}
  if isinstance(value, dict) and "name" not in value:
    return value  # a task's own model needs no name
  return _check_named(field, value)


def _check_task(field: str, value: Any) -> Any:
  if isinstance(value, str) and value:
    return value
  return _check_named(field, value)


# Below float32's largest number, 3.4e38: schedules compute in float32.
POSITIVE = Kind(
  float, "number above 0", functools.partial(checks.number, above=0, below=1e38)
)
NOT_NEGATIVE = Kind(
  float,
  "number, at least 0",
  functools.partial(checks.number, minimum=0, below=1e38),
)
BOOLEAN = Kind(bool, "True or False", checks.boolean)
STRING = Kind(str, "string", checks.string)
TEXT = Kind(str, "string", _check_text)  # the empty one included
# A name stands for the dict without arguments.
_NAMED = 'name, or {"name": ..., **arguments}'
NAMED = Kind(dict, _NAMED, _check_named)
OPTIONAL_NAMED = Kind(dict, _NAMED, _check_optional_named)
MODEL = Kind(dict, _NAMED, _check_model)
TASK = Kind(dict, _NAMED, _check_task)
WRAPPERS = Kind(tuple, "names, or (name, {**arguments}) pairs", _check_wrappers)
STEPS_RANGE = Kind(tuple, "() or (first step, last step)", _check_steps_range)
REPLICAS = Kind(int, "-1, or integer of at least 1", _check_replicas)
AXES = Kind(tuple, "(name, size) pairs", _check_axes)
RULES = Kind(tuple, "rules", _check_rules)
SPLIT = Kind(dict, "{key: (pieces, ...)}", _check_split)
EVALUATION_METRIC = Kind(str, '"none" or "eval_..."', _check_evaluation_metric)
PATTERNS = Kind(tuple, "regular expressions", patterns_lib.check)
LEARNING_RATES = Kind(
  tuple, "(pattern, factor above 0) pairs", parameter_groups.check_factors
)
HOOKS = Kind(tuple, 'names or {"name": ..., **arguments}', _check_hooks)
