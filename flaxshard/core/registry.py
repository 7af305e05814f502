"""Looks up and calls what a config names: a built-in, or code of the user."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
import contextlib
import importlib
import inspect
import types
from typing import Any

import ml_collections
import numpy as np

from flaxshard.core import checks


def lookup(argument: str, name: Any, builtin: Mapping[str, Any]) -> Any:
  """Returns the built-in object, or the attribute of a module, with a name.

  Args:
    argument: The argument or config field that holds the name, for errors.
    name: A built-in name, or `"package.module:attribute"`.
    builtin: The built-in objects by name. A string among them is a name of the
      form `"package.module:attribute"`, imported only when it is asked for.

  Returns:
    The built-in object, or the attribute of the imported module.

  Raises:
    TypeError: The name is not a string.
    ValueError: The name is unknown, or its module or attribute does not exist.

  Example:
    >>> lookup("config.data.name", "math:sqrt", {})(9.0)
    3.0
  """
  known = [*sorted(builtin), "'package.module:attribute'"]
  allowed = f"allowed: {', '.join(known)}"
  if not isinstance(name, str):
    raise checks.ArgumentTypeError(
      f"{argument} must be a string, got {name!r}; {allowed}."
    )
  if name in builtin:
    if not isinstance(builtin[name], str):
      return builtin[name]
    # Imported only now: built-ins may need packages that are not installed.
    name = builtin[name]
  module_name, colon, attribute = name.partition(":")
  if not colon:
    raise ValueError(
      f"{argument}: unknown name {name!r}; {allowed}."
      f"{checks.did_you_mean(name, builtin)}"
    )
  # The code of the user's package runs here, with the user's permissions: a
  # config is trusted like a program.
  try:
    module = importlib.import_module(module_name)
  except (ImportError, ValueError) as e:  # ValueError: the name is empty
    raise ValueError(
      f"{argument}: module {module_name!r} cannot be imported: {e}"
    ) from e
  try:
    return getattr(module, attribute)
  except AttributeError as e:
    raise ValueError(
      f"{argument}: module {module_name!r} has no attribute {attribute!r}."
      f"{checks.did_you_mean(attribute, vars(module))}"
    ) from e


def find(
  field: str, config: Any, builtin: Mapping[str, Any]
) -> tuple[str, Any, dict[str, Any]]:
  """Returns the function that a config names, and its arguments.

  Args:
    field: Path of the config, such as `"config.model"`, for errors.
    config: A dict or ConfigDict: a `"name"`, as in `lookup`, and arguments.
    builtin: The built-in functions by name.

  Returns:
    The field and the name, for errors; the function; and the arguments.

  Raises:
    TypeError: `config` is not a dict with a name.
    ValueError: The name is unknown.
  """
  if not is_dict(config) or "name" not in config:
    raise checks.ArgumentTypeError(
      f"{field} must be a dict with a 'name' ({', '.join(builtin)}, or "
      f"'package.module:attribute'), got {config!r}."
    )
  arguments = dict(config)
  name = arguments.pop("name")
  function = lookup(f"{field}.name", name, builtin)
  return f"{field} ({name!r})", function, arguments


def call(
  field: str, config: Any, builtin: Mapping[str, Any], **given: Any
) -> Any:
  """Calls the function that a config names, with the config's other fields.

  Args:
    field: See `find`.
    config: See `find`. Lists among the arguments become tuples.
    builtin: The built-in functions by name.
    **given: Arguments that do not come from the config.

  Returns:
    The result of the call.

  Raises:
    TypeError: As `find`; or the name is not that of a callable, an argument is
      missing, or the function raises a TypeError.
    ValueError: A name or an argument is unknown (the message lists the known
      ones), or the function raises a ValueError.

  Example:
    >>> functions = {"power": lambda base, exponent=2: base**exponent}
    >>> call("config.f", {"name": "power", "exponent": 3}, functions, base=2)
    8
  """
  return construct(*find(field, config, builtin), given=given)


def construct(
  where: str,
  function: Any,
  arguments: Mapping[str, Any],
  *,
  given: Mapping[str, Any] = types.MappingProxyType({}),
) -> Any:
  """Calls `function(**arguments, **given)` and puts `where` before errors.

  Args:
    where: The field and the name in it, such as `"config.model ('cnn')"`.
    function: The function or class.
    arguments: Arguments from a config, checked against the signature.
    given: Arguments that do not come from the config.

  Raises:
    TypeError, ValueError: As in `call`.
  """
  if not callable(function):
    raise checks.ArgumentTypeError(
      f"{where} must name something callable, got {function!r}."
    )
  known, takes_any = _names(function, given)
  # Before the call, so that misspelled arguments get a hint.
  for key in arguments:
    if key not in known and not takes_any:
      raise ValueError(
        f"{where}: unknown argument {key!r}; the arguments are "
        f"{', '.join(known) or 'none'}.{checks.did_you_mean(key, known)}"
      )
  kwargs = {key: to_plain(value) for key, value in arguments.items()}
  with errors_name(where):
    return function(**{**kwargs, **given})


def check_call(where: str, function: Any, *args: Any, **kwargs: Any) -> None:
  """Raises an error that names `where` if a function takes other arguments."""
  with errors_name(where):
    inspect.signature(function).bind(*args, **kwargs)


@contextlib.contextmanager
def errors_name(where: str, *others: type[Exception]) -> Iterator[None]:
  """Puts a field before the message of an error that names its arguments alone.

  Args:
    where: The field, such as `"config.wrappers"`.
    *others: Further types of errors, which become a ValueError.

  Raises:
    TypeError, ValueError: That of the block, with the longer message.

  Example:
    >>> with errors_name("config.f"):
    ...   int("x")
    Traceback (most recent call last):
    ValueError: config.f: invalid literal for int() with base 10: 'x'
  """
  # ArithmeticError: an argument of 0 that a function divides by, say.
  kinds: tuple[type[Exception], ...]
  kinds = (TypeError, ValueError, ArithmeticError, *others)
  try:
    yield
  except kinds as e:
    is_type_error = isinstance(e, TypeError)
    kind = checks.ArgumentTypeError if is_type_error else ValueError
    # The text of a KeyError is the key alone.
    text = repr(e) if isinstance(e, KeyError) else e
    raise kind(f"{where}: {text}") from e


def accepted(
  function: Any, offered: Mapping[str, Any], given: Container[str] = ()
) -> dict[str, Any]:
  """Returns the offered arguments that a function takes by name.

  Args:
    function: The function or class.
    offered: Values by name. A `**kwargs` of the function takes none of them.
    given: The names of arguments that it has already.

  Example:
    >>> accepted(lambda width, rngs: None, {"rngs": 0, "policy": 1})
    {'rngs': 0}
  """
  try:
    known, _ = _names(function, given)
  except (TypeError, ValueError):
    return {}  # `construct` reports what cannot be called
  return {name: value for name, value in offered.items() if name in known}


def _names(function: Any, given: Container[str]) -> tuple[list[str], bool]:
  """Returns which arguments a function takes by name, and whether any.

  Args:
    function: The function or class.
    given: The names of arguments that it has already.
  """
  parameters = [*inspect.signature(function).parameters.values()]
  if inspect.isclass(function) and type(function).__call__ is not type.__call__:
    # NNX modules have a metaclass whose call takes any arguments.
    constructor = inspect.signature(function.__init__)
    _, *parameters = constructor.parameters.values()
  names = [
    p.name
    for p in parameters
    if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    and p.name not in given
  ]
  return names, any(p.kind is p.VAR_KEYWORD for p in parameters)


def to_plain(value: Any) -> Any:
  """Returns a config value as dicts, tuples and Python's own numbers."""
  if is_dict(value):
    return {k: to_plain(v) for k, v in dict(value).items()}
  # An optimizer is a tuple, too, with names.
  if type(value) in (list, tuple):
    # Tuples: `jax.jit` hashes models and wrappers, and lists have no hash.
    return tuple(to_plain(v) for v in value)
  return value.item() if isinstance(value, np.generic) else value


def with_name(value: Any) -> Any:
  """Returns the dict that a name stands for, or a value of another type.

  Example:
    >>> with_name("cosine")
    {'name': 'cosine'}
  """
  return {"name": value} if isinstance(value, str) else value


def is_dict(value: Any) -> bool:
  """Returns whether a value is a dict or a ConfigDict."""
  return isinstance(value, (Mapping, ml_collections.ConfigDict))
