"""The kinds of values that config fields have: what is allowed, and a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable
import functools
from typing import Annotated, Any, NamedTuple

from flaxshard import wrappers as wrappers_lib
from flaxshard.core import checks
from flaxshard.core import parameter_groups
from flaxshard.core import patterns as patterns_lib
from flaxshard.partitioning import rules as rules_lib

# Whether a larger or a smaller value is better, with a mode of "auto".
BEST_MODES = {"eval_accuracy": "max", "eval_loss": "min"}


class Kind(NamedTuple):
  """The values that a field may have.

  Attributes:
    allowed: What is allowed, for `--help=config`.
    check: `check(field, value)` returns the value, or raises a ValueError that
      names the field, the value and what is allowed.
  """

  allowed: str
  check: Callable[[str, Any], Any]


def at_least(minimum: int) -> Kind:
  """Returns the kind of integers of at least `minimum`."""
  check = functools.partial(checks.integer, minimum=minimum)
  return Kind(f"integer, at least {minimum}", check)


def number(allowed: str, **bounds: Any) -> Kind:
  """Returns the kind of numbers within bounds, see `checks.number`."""
  # Below float32's largest number, 3.4e38: schedules compute in float32.
  return Kind(allowed, functools.partial(checks.number, below=1e38, **bounds))


def one_of(*allowed: Any) -> Kind:
  """Returns the kind of a few strings, or of True and False."""
  check = functools.partial(checks.one_of, allowed=allowed)
  return Kind(" or ".join(f'"{a}"' for a in allowed), check)


def pairs(allowed: str) -> Kind:
  """Returns the kind of pairs of a pattern and a value, checked elsewhere."""
  check = functools.partial(patterns_lib.check_pairs, expected=allowed)
  return Kind(allowed, check)


def group(names: Iterable[str]) -> Kind:
  """Returns the kind of a dict with some of these fields."""
  is_dict = where(f"a dict with {', '.join(names)}", _is_dict)
  return Kind("dict of the fields below", is_dict.check)


def readable(allowed: str, read: Callable[..., object]) -> Kind:
  """Returns the kind of values that `read(value, argument=field)` accepts."""

  def check(field: str, value: Any) -> Any:
    read(value, argument=field)
    return value

  return Kind(allowed, check)


def where(allowed: str, is_valid: Callable[[Any], bool]) -> Kind:
  """Returns the kind of values for which a function returns True."""

  def check(field: str, value: Any) -> Any:
    if not is_valid(value):
      raise ValueError(f"{field} must be {allowed}, got {value!r}.")
    return value

  return Kind(allowed, check)


def _check_named(field: str, value: Any) -> Any:
  """A name stands for the dict without arguments, and None for the empty one.

  Whether there must be a name is checked with what the name stands for.
  """
  if isinstance(value, str) and value:
    return {"name": value}
  return where(_NAMED, _is_dict).check(field, {} if value is None else value)


def _check_task(field: str, value: Any) -> Any:
  return value if isinstance(value, str) else _check_named(field, value)


def _is_dict(value: Any) -> bool:
  return isinstance(value, dict)


def _is_int(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _is_sequence(value: Any) -> bool:
  return isinstance(value, (tuple, list))


def _is_replicas(value: Any) -> bool:
  return _is_int(value) and (value == -1 or value > 0)


def _is_metric(value: Any) -> bool:
  # The metrics of training are means since the last row, and a signal adds a
  # row: a resumed run would have others than one without an interruption.
  return isinstance(value, str) and (
    value == "none" or value.startswith("eval_")
  )


def _is_steps_range(value: Any) -> bool:
  if not _is_sequence(value) or not all(map(_is_int, value)):
    return False
  return not value or (len(value) == 2 and 0 < value[0] <= value[1])


def _are_hooks(value: Any) -> bool:
  return _is_sequence(value) and all(
    ":" in str(hook.get("name") if _is_dict(hook) else hook) for hook in value
  )


def _are_axes(value: Any) -> bool:
  if not _is_sequence(value) or not all(
    _is_sequence(axis) and list(map(type, axis)) == [str, int] and axis[1] > 0
    for axis in value
  ):
    return False
  # The strategy adds the axis "replica" itself.
  return len({name for name, _ in value} - {"", "replica"}) == len(value)


def _is_split(value: Any) -> bool:
  return _is_dict(value) and all(
    _is_sequence(pieces) and all(map(_is_int, pieces))
    for pieces in value.values()
  )


_NAMED = 'a name, or {"name": ..., **arguments}'

Boolean = Annotated[bool, Kind("True or False", one_of(True, False).check)]
Text = Annotated[str, where("a string", lambda value: isinstance(value, str))]
Natural = Annotated[int, at_least(0)]
Count = Annotated[int, at_least(1)]
Replicas = Annotated[int, where("-1, or integer of at least 1", _is_replicas)]
Positive = Annotated[float, number("number above 0", above=0)]
NotNegative = Annotated[float, number("number, at least 0", minimum=0)]
Mode = Annotated[str, one_of("auto", "max", "min")]
Metric = Annotated[
  str,
  where(
    '"none", "eval_loss", "eval_accuracy" or another "eval_..."', _is_metric
  ),
]
Named = Annotated[Any, Kind(_NAMED, _check_named)]
Task = Annotated[Any, Kind(_NAMED, _check_task)]
Hooks = Annotated[
  Any,
  where(
    'a sequence of names "package.module:name", or dicts with a "name"',
    _are_hooks,
  ),
]
StepsRange = Annotated[
  Any, where("() or (first step, last step)", _is_steps_range)
]
Axes = Annotated[
  Any,
  where(
    '(name, size) pairs such as (("model", 2),), with different names other '
    'than "replica"',
    _are_axes,
  ),
]
Split = Annotated[
  Any,
  where('{key: (pieces, ...)} such as {"inputs": (1, 2, 4, 1)}', _is_split),
]
Patterns = Annotated[Any, Kind("regular expressions", patterns_lib.check)]
LearningRates = Annotated[
  Any, Kind("(pattern, factor above 0) pairs", parameter_groups.check_factors)
]
Rules = Annotated[Any, readable("rules", rules_lib.from_config)]
Wrappers = Annotated[
  Any,
  readable("names, or (name, {**arguments}) pairs", wrappers_lib.from_config),
]
