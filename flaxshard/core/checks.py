"""Checks of arguments: one function for each kind of value.

Each returns the value in its plain Python type, or raises an error that names
the argument, what is allowed, and the value it got: an ArgumentTypeError (both
a TypeError and a ValueError) for a value of the wrong type, a ValueError for
one out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import difflib
import inspect
import math
import reprlib
from typing import Any
import warnings

import numpy as np

# JAX and Grain count steps, replicas and seeds in int32.
INT32_MAX = 2**31 - 1


class ArgumentTypeError(TypeError, ValueError):
  """An argument of the wrong type.

  It is a ValueError too, so that one `except ValueError` handles every invalid
  argument, whether its type is wrong or its value is out of range.
  """


def integer(
  argument: str,
  value: Any,
  *,
  minimum: float = -math.inf,
  maximum: int = INT32_MAX,
) -> int:
  """Returns `value` as an `int`.

  NumPy integers are accepted, booleans are not: `True` is almost always a
  mistake where a count is expected.

  Args:
    argument: Name of the argument, for the error message.
    value: The value to check.
    minimum: Smallest allowed value.
    maximum: Largest allowed value.

  Raises:
    ArgumentTypeError: `value` is not an integer.
    ValueError: `value` is below `minimum` or above `maximum`.

  Example:
    >>> integer("batch_size", np.int64(8), minimum=1)
    8
  """
  # bool is a subclass of int.
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
    raise ArgumentTypeError(
      f"{argument} must be an integer, got {describe(value)}."
    )
  if not minimum <= value <= maximum:
    allowed = f"least {minimum}" if value < minimum else f"most {maximum}"
    raise ValueError(f"{argument} must be at {allowed}, got {value}.")
  return int(value)


def number(
  argument: str,
  value: Any,
  *,
  minimum: float = -math.inf,
  maximum: float = math.inf,
  above: float = -math.inf,
  below: float = math.inf,
) -> float:
  """Returns `value` as a finite `float`.

  Args:
    argument: Name of the argument, for the error message.
    value: The value to check: a Python or NumPy number, but no boolean.
    minimum: Smallest allowed value.
    maximum: Largest allowed value.
    above: Lower bound, exclusive.
    below: Upper bound, exclusive.

  Raises:
    ArgumentTypeError: `value` is not a real number.
    ValueError: `value` is not finite or out of range.

  Example:
    >>> number("learning_rate", 1, above=0)
    1.0
  """
  bounds = {
    "of at least": minimum,
    "of at most": maximum,
    "above": above,
    "below": below,
  }
  given = [f" {k} {v:g}" for k, v in bounds.items() if math.isfinite(v)]
  allowed = "a finite number" + " and".join(given)
  numbers = (int, float, np.integer, np.floating)
  if isinstance(value, bool) or not isinstance(value, numbers):
    raise ArgumentTypeError(
      f"{argument} must be {allowed}, got {describe(value)}."
    )
  try:
    result = float(value)
  except OverflowError:  # an int that no float can hold
    result = math.inf
  in_range = minimum <= result <= maximum and above < result < below
  if not (math.isfinite(result) and in_range):
    raise ValueError(f"{argument} must be {allowed}, got {value!r}.")
  return result


def one_of(argument: str, value: Any, allowed: Iterable[Any]) -> Any:
  """Returns `value` if it is one of a few allowed values.

  Args:
    argument: Name of the argument, for the error message.
    value: The value to check; it may be of any type.
    allowed: The allowed values, in the order in which the message lists them.

  Raises:
    ArgumentTypeError: No allowed value has the type of `value`.
    ValueError: `value` is none of them; the message lists them, and names the
      nearest one if `value` looks like a misspelling of it.

  Example:
    >>> one_of("reduction", "mean", ("sum", "mean"))
    'mean'
  """
  allowed = list(allowed)
  # By type as well: 1 == True, and an array compares element by element.
  if any(type(value) is type(a) and value == a for a in allowed):
    return value
  got, hint = describe(value), ""
  if isinstance(value, str):
    got = repr(value)  # whole, for long names
    hint = did_you_mean(value, [a for a in allowed if isinstance(a, str)])
  has_type = any(type(value) is type(a) for a in allowed)
  raise (ValueError if has_type else ArgumentTypeError)(
    f"{argument} must be one of {', '.join(map(repr, allowed))}, got {got}."
    f"{hint}"
  )


def fields(
  instance: Any, check: Callable[..., Any], *names: str, **bounds: Any
) -> None:
  """Checks fields of a frozen dataclass, and keeps what the check returns.

  So they are plain Python numbers, which configs hold.

  Args:
    instance: The dataclass.
    check: A function of this module.
    *names: The names of fields.
    **bounds: Further arguments of `check`.

  Raises:
    TypeError, ValueError: See there.
  """
  for name in names:
    argument = f"{type(instance).__name__}: {name}"
    value = check(argument, getattr(instance, name), **bounds)
    object.__setattr__(instance, name, value)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
  """Warns with the place of the caller outside of this package and of JAX."""
  packages = (__name__.partition(".")[0], "jax.")
  frame, level = inspect.currentframe(), 1
  while frame and frame.f_globals.get("__name__", "").startswith(packages):
    frame, level = frame.f_back, level + 1
  # `warnings.warn` counts from this function, which has the level 1.
  warnings.warn(message, category, stacklevel=level)


def describe(value: Any) -> str:
  """Returns a value in a few words, for an error message.

  Args:
    value: Any value. Of an array only dtype and shape are shown, of a scalar
      of NumPy the value.

  Example:
    >>> describe(np.zeros((2, 3), np.float32)), describe({"image": 1})
    ('float32[2,3]', "a dict with the keys 'image'")
  """
  shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
  is_array = dtype is not None and not isinstance(value, np.generic)
  if is_array and isinstance(shape, tuple):
    return f"{dtype}[{','.join(map(str, shape))}]"
  if isinstance(value, Mapping):
    keys = ", ".join(map(repr, list(value)[:8]))
    return f"a {type(value).__name__} with the keys {keys}"
  if inspect.isfunction(value) or inspect.isclass(value):
    kind = "class" if inspect.isclass(value) else "function"
    return f"the {kind} {value.__module__}.{value.__qualname__}"
  text = reprlib.repr(value)
  # The repr of an object such as a model may have many lines.
  is_short = "\n" not in text
  return text if is_short else f"an object of type {type(value).__name__}"


def differences(
  a: Any, b: Any, path: str = ""
) -> Iterator[tuple[str, Any, Any]]:
  """Yields the dotted path and both values where nested dicts differ.

  Args:
    a: A value, or a dict.
    b: Another one. A missing key has the value `"<missing>"`.
    path: Their own path.

  Example:
    >>> list(differences({"a": {"b": 1}, "c": None}, {"a": {"b": 3}}))
    [('a.b', 1, 3), ('c', None, '<missing>')]
  """
  missing = "<missing>"
  if isinstance(a, Mapping) and isinstance(b, Mapping):
    for key in {**a, **b}:
      below = f"{path}.{key}" if path else key
      yield from differences(a.get(key, missing), b.get(key, missing), below)
  elif a != b:
    yield path, a, b


@contextlib.contextmanager
def extra(user: str, name: str) -> Iterator[None]:
  """Says in the ImportError of a block which extra has the package.

  Args:
    user: What needs the package.
    name: The extra of flaxshard.

  Example:
    >>> with extra("fs.nothing", "none"):
    ...   import no_such_package
    Traceback (most recent call last):
    ImportError: fs.nothing needs no_such_package: pip install 'flaxshard[none]'
  """
  try:
    yield
  except ImportError as e:
    raise ImportError(
      f"{user} needs {e.name}: pip install 'flaxshard[{name}]'"
    ) from e


def format_bytes(nbytes: int) -> str:
  """Returns a number of bytes as text, such as `1.5 MiB`."""
  if nbytes < 2**10:
    return f"{nbytes} B"
  # Powers of 1024, up to TiB.
  power = min((nbytes.bit_length() - 1) // 10, 4)
  return f"{nbytes / 2 ** (10 * power):.1f} {'KMGT'[power - 1]}iB"


def listed(texts: Sequence[str], most: int = 10) -> str:
  """Returns the first of some texts, separated by commas.

  Args:
    texts: The texts.
    most: How many are listed; of others only the number is.

  Example:
    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
  """
  rest = len(texts) - most
  return ", ".join(texts[:most]) + (f" and {rest} more" if rest > 0 else "")


def table(rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
  """Returns the rows of a table as lines of text.

  Args:
    rows: The cells of each row.
    numbers: Which columns have numbers: these are aligned to the right.

  Example:
    >>> print(table([("size", "4 B"), ("all", "16 B")], numbers=[1]))
    size   4 B
    all   16 B
  """
  line = "  ".join(
    f"{{:{'>' if i in numbers else '<'}{max(map(len, column))}}}"
    for i, column in enumerate(zip(*rows, strict=True))
  )
  return "\n".join(line.format(*row).rstrip() for row in rows)


def did_you_mean(name: str, known: Iterable[str]) -> str:
  """Returns a hint for a misspelled name, for the end of an error message.

  Args:
    name: The name that was not found.
    known: The names that exist.

  Returns:
    A sentence with a space in front, or "" if no known name is similar.

  Example:
    >>> did_you_mean("dynamc", ["dynamic", "auto"])
    " Did you mean 'dynamic'?"
  """
  # Once each: a name may be that of several parameters.
  names = list(dict.fromkeys(known))
  matches = difflib.get_close_matches(name, names, n=2)
  return f" Did you mean {' or '.join(map(repr, matches))}?" if matches else ""
