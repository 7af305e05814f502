"""Names in configs: what exists, and how one's own code is named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import difflib
import importlib
from typing import Any


def near(name: str, known: Iterable[str]) -> str:
  """Returns `" Did you mean 'x'?"` for the nearest known name, or `""`."""
  matches = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
  return f" Did you mean {' or '.join(map(repr, matches))}?" if matches else ""


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
    return builtin[name]
  module_name, colon, attribute = name.partition(":")
  if not colon:
    raise ValueError(
      f"{argument}: unknown name {name!r}; {allowed}.{near(name, builtin)}"
    )
  try:
    module = importlib.import_module(module_name)
  except ImportError as e:
    raise ValueError(
      f"{argument}: {name!r} names a module that cannot be imported: {e}"
    ) from e
  try:
    return getattr(module, attribute)
  except AttributeError as e:
    raise ValueError(
      f"{argument}: module {module_name!r} has no attribute {attribute!r}."
      f"{near(attribute, vars(module))}"
    ) from e
