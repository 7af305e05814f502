"""Names in configs: what exists, and how one's own code is named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import importlib
import inspect
import types
from typing import Any

from flaxshard.core import checks


def lookup(argument: str, name: Any, builtin: Mapping[str, Any]) -> Any:
  """Resolves a built-in name, or `"package.module:attribute"`.

  Args:
    argument: The argument or config field that held the name, for errors.
    name: The name to resolve.
    builtin: The names that come with flaxshard.

  Returns:
    The built-in object, or the attribute of the imported module.

  Raises:
    TypeError: The name is not a string.
    ValueError: Nothing goes by that name.

  Example:
    >>> lookup("config.data.name", "math:sqrt", {})(9.0)
    3.0
  """
  allowed = (
    f"allowed: {', '.join(sorted(builtin))}, or 'package.module:attribute'"
  )
  if not isinstance(name, str):
    raise TypeError(f"{argument} must be a string, got {name!r}; {allowed}.")
  if name in builtin:
    # A built-in may be a name too: what it needs is imported when asked for.
    if not isinstance(builtin[name], str):
      return builtin[name]
    name = builtin[name]
  module_name, colon, attribute = name.partition(":")
  if not colon:
    raise ValueError(
      f"{argument}: unknown name {name!r}; {allowed}."
      f"{checks.did_you_mean(name, builtin)}"
    )
  try:
    module = importlib.import_module(module_name)
  except (ImportError, ValueError) as e:
    raise ValueError(
      f"{argument}: {name!r} names a module that cannot be imported: {e}"
    ) from e
  try:
    return getattr(module, attribute)
  except AttributeError as e:
    raise ValueError(
      f"{argument}: module {module_name!r} has no attribute {attribute!r}."
      f"{checks.did_you_mean(attribute, vars(module))}"
    ) from e


def call(
  field: str,
  config: Any,
  builtin: Mapping[str, Any],
  *,
  hidden: Iterable[str] = (),
  **given: Any,
) -> Any:
  """Calls what a config names, with its other fields as arguments.

  Args:
    field: The config's field, for errors.
    config: A dict or ConfigDict: a `"name"`, as in `lookup`, and arguments.
      Lists among them become tuples.
    builtin: The names that come with flaxshard.
    hidden: Parameters that no config may set.
    **given: Arguments that do not come from the config.

  Returns:
    What the call returns.

  Raises:
    TypeError: `config` is no dict, its name names nothing that takes arguments,
      or an argument is missing.
    ValueError: An unknown name or argument; the message lists what exists.

  Example:
    >>> functions = {"power": lambda base, exponent=2: base**exponent}
    >>> call("config.f", {"name": "power", "exponent": 3}, functions, base=2)
    8
  """
  allowed = f"{', '.join(builtin)}, or 'package.module:attribute'"
  if not is_dict(config):
    raise TypeError(
      f"{field} must be a dict with a 'name' ({allowed}), got {config!r}."
    )
  arguments = dict(config)
  if "name" not in arguments:
    raise ValueError(
      f"{field} must have a 'name' ({allowed}), got {arguments!r}."
    )
  name = arguments.pop("name")
  function = lookup(f"{field}.name", name, builtin)
  where = f"{field} ({name!r})"
  return construct(where, function, arguments, hidden=hidden, given=given)


def construct(
  where: str,
  function: Any,
  arguments: Mapping[str, Any],
  *,
  hidden: Iterable[str] = (),
  given: Mapping[str, Any] = types.MappingProxyType({}),
) -> Any:
  """Calls `function(**arguments, **given)`, its arguments checked by name."""
  if not callable(function):
    raise TypeError(f"{where} must name something callable, got {function!r}.")
  signature = inspect.signature(function)
  parameters = signature.parameters.values()
  takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
  known = [
    p.name
    for p in parameters
    if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    and p.name not in (*given, *hidden)
  ]
  for key in arguments:
    if key not in known and not takes_any:
      raise ValueError(
        f"{where}: unknown argument {key!r}; "
        f"{getattr(function, '__name__', 'it')} takes "
        f"{', '.join(known) or 'none'}.{checks.did_you_mean(key, known)}"
      )
  kwargs = {key: plain(value) for key, value in arguments.items()}
  kwargs |= given
  try:
    signature.bind(**kwargs)
  except TypeError as e:
    raise TypeError(f"{where}: {e}.") from e
  try:
    return function(**kwargs)
  except (TypeError, ValueError, ArithmeticError) as e:
    if str(e).startswith(("config.", where)):
      raise
    kind = TypeError if isinstance(e, TypeError) else ValueError
    raise kind(f"{where}: {e}") from e


def plain(value: Any) -> Any:
  """Returns a config's value as dicts and tuples, which can be hashed."""
  if is_dict(value):
    return {k: plain(v) for k, v in dict(value).items()}
  if isinstance(value, (list, tuple)):
    return tuple(plain(v) for v in value)
  return value


def is_dict(value: Any) -> bool:
  """Whether a value is a dict, or a ConfigDict."""
  return isinstance(value, Mapping) or hasattr(value, "to_dict")
