"""Types of config fields: pydantic's, and checks of values that others read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import pydantic

from flaxshard import wrappers as wrappers_lib
from flaxshard.core import checks
from flaxshard.core import parameter_groups
from flaxshard.core import patterns
from flaxshard.core import registry
from flaxshard.partitioning import rules as rules_lib


def readable(read: Callable[[Any, Any], Any]) -> Any:
  """Returns the check that `read(field, value)` does not raise."""

  def check(value: Any, info: pydantic.ValidationInfo) -> Any:
    read(info.field_name, value)
    return value

  return pydantic.AfterValidator(check)


def where(allowed: str, is_valid: Callable[[Any], bool]) -> Any:
  """Returns the check that `is_valid(value)` is true."""

  def read(field: str, value: Any) -> None:
    if not is_valid(value):
      raise ValueError(f"{field} must be {allowed}, got {value!r}.")

  return readable(read)


def _is_range(steps: tuple[int, ...]) -> bool:
  return not steps or (len(steps) == 2 and steps[0] <= steps[1])


def _have_own_names(axes: tuple[tuple[str, int], ...]) -> bool:
  # The strategy adds the axis "replica" itself.
  return len({name for name, _ in axes} - {"replica"}) == len(axes)


# Integers are int32 on the devices, and schedules compute in float32, whose
# largest number is 3.4e38.
Natural = Annotated[int, pydantic.Field(ge=0, le=checks.INT32_MAX)]
Count = Annotated[int, pydantic.Field(ge=1, le=checks.INT32_MAX)]
Positive = Annotated[float, pydantic.Field(gt=0, lt=1e38)]
NotNegative = Annotated[float, pydantic.Field(ge=0, lt=1e38)]
Mode = Literal["auto", "max", "min"]
Replicas = Annotated[
  int, where("-1, or at least 1", lambda count: count == -1 or count > 0)
]
# Whether there must be a name is checked with what it stands for.
Named = Annotated[
  dict[str, Any],
  pydantic.BeforeValidator(
    lambda value: {} if value is None else registry.with_name(value)
  ),
]
StepsRange = Annotated[
  tuple[Count, ...], where("() or (first step, last step)", _is_range)
]
Axes = Annotated[
  tuple[tuple[str, Count], ...],
  where('pairs with different names other than "replica"', _have_own_names),
]
Patterns = Annotated[tuple[str, ...], readable(patterns.check)]
Pairs = Annotated[tuple[tuple[str, Any], ...], readable(patterns.check_pairs)]
LearningRates = Annotated[
  tuple[tuple[str, float], ...], readable(parameter_groups.check_factors)
]
Rules = Annotated[
  Any,
  readable(lambda field, value: rules_lib.from_config(value, argument=field)),
]
Wrappers = Annotated[
  tuple[Any, ...],
  readable(lambda field, value: wrappers_lib.from_config(value, field)),
]
