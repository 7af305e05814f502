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


def positive() -> Kind:
  """Returns the kind of numbers above 0."""
  # Below float32's largest number, 3.4e38: schedules compute in float32.
  check = functools.partial(checks.number, above=0, below=1e38)
  return Kind(float, "number above 0", check)


def not_negative() -> Kind:
  """Returns the kind of numbers of at least 0."""
  check = functools.partial(checks.number, minimum=0, below=1e38)
  return Kind(float, "number, at least 0", check)


def boolean() -> Kind:
  """Returns the kind of booleans."""
  return Kind(bool, "True or False", checks.boolean)


def one_of(*allowed: str) -> Kind:
  """Returns the kind of a few strings."""
  check = functools.partial(checks.one_of, allowed=allowed)
  return Kind(str, " or ".join(f'"{a}"' for a in allowed), check)


def named() -> Kind:
  """Returns the kind of names, and of dicts with a name and arguments.

  A name stands for the dict without arguments.
  """
  allowed = 'name, or {"name": ..., **arguments}'
  return Kind(dict, allowed, _check_named)


def optional_named() -> Kind:
  """Returns the kind of `named`, or of `{}`."""

  def check(field: str, value: Any) -> Any:
    # None: not set in `defaults`.
    return {} if value in ({}, None) else _check_named(field, value)

  return Kind(dict, 'name, or {"name": ..., **arguments}', check)


def model() -> Kind:
  """Returns the kind of `config.model`: a task's own model needs no name."""

  def check(field: str, value: Any) -> Any:
    if value is None:  # not set in `defaults`
      return {}
    if isinstance(value, dict) and "name" not in value:
      return value
    return _check_named(field, value)

  return Kind(dict, 'name, or {"name": ..., **arguments}', check)


def task() -> Kind:
  """Returns the kind of `config.task`."""

  def check(field: str, value: Any) -> Any:
    if isinstance(value, str) and value:
      return value
    return _check_named(field, value)

  return Kind(dict, 'name, or {"name": ..., **arguments}', check)


def string() -> Kind:
  """Returns the kind of strings that are not empty."""
  return Kind(str, "string", checks.string)


def wrappers() -> Kind:
  """Returns the kind of `config.wrappers`."""
  return Kind(tuple, "names, or (name, {**arguments}) pairs", _check_wrappers)


def steps_range() -> Kind:
  """Returns the kind of `()` and `(first step, last step)`."""
  return Kind(tuple, "() or (first step, last step)", _check_steps_range)


def replicas() -> Kind:
  """Returns the kind of `config.mesh.replica`."""
  return Kind(int, "-1, or integer of at least 1", _check_replicas)


def axes() -> Kind:
  """Returns the kind of `config.mesh.axes`."""
  return Kind(tuple, "(name, size) pairs", _check_axes)


def partitioning_rules() -> Kind:
  """Returns the kind of `config.mesh.rules`."""
  return Kind(tuple, "rules", _check_rules)


def split() -> Kind:
  """Returns the kind of `config.mesh.split`."""
  return Kind(dict, "{key: (pieces, ...)}", _check_split)


def text() -> Kind:
  """Returns the kind of strings, the empty one included."""
  return Kind(str, "string", _check_text)


def sequence(allowed: str) -> Kind:
  """Returns the kind of sequences, whose elements are checked elsewhere."""
  return Kind(tuple, allowed, _check_sequence)


def fields(*names: str) -> Kind:
  """Returns the kind of a dict with some of these fields."""
  check = functools.partial(_check_dict, names=names)
  return Kind(dict, "dict of the fields below", check)


def evaluation_metric() -> Kind:
  """Returns the kind of names of metrics of an evaluation, and "none"."""
  return Kind(str, '"none" or "eval_..."', _check_evaluation_metric)


def patterns() -> Kind:
  """Returns the kind of regular expressions for paths of parameters."""
  return Kind(tuple, "regular expressions", patterns_lib.check)


def learning_rates() -> Kind:
  """Returns the kind of `config.learning_rates`."""
  check = parameter_groups.check_factors
  return Kind(tuple, "(pattern, factor above 0) pairs", check)


def hooks() -> Kind:
  """Returns the kind of `config.hooks`."""
  return Kind(tuple, 'names or {"name": ..., **arguments}', _check_hooks)


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
