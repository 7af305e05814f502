"""Sets fields of a config from the command line: `--config.FIELD=VALUE`.

As `ml_collections.config_flags` does, a string and a tuple that the config has
stay one. It takes in addition what a config may hold: another type of number,
new arguments of a model or an optimizer, and a name for a dict with a name.
`check` reports values that are not allowed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
import contextlib
import re
from typing import Any

import ml_collections

_FLAG = re.compile(r"--?(no)?config\.([^=]+)(?:=(.*))?", re.DOTALL)


def split(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
  """Separates the fields of the config from the other flags.

  Args:
    argv: A command line. A value follows its flag after `=` or as the next
      argument; `--config.FLAG` alone is true, and `--noconfig.FLAG` false.

  Returns:
    The other arguments, and the paths of fields with the texts of their values.

  Example:
    >>> split(["--workdir=w", "--config.seed=1", "--noconfig.mesh.per_replica"])
    (['--workdir=w'], [('seed', '1'), ('mesh.per_replica', 'false')])
  """
  rest, fields = [], []
  arguments = list(argv)
  while arguments:
    argument = arguments.pop(0)
    if not (match := _FLAG.fullmatch(argument)):
      rest.append(argument)
      continue
    negated, path, text = match.groups()
    if text is None:
      text = "false" if negated else "true"
      # A negative number is a value.
      if arguments and not negated and not re.match("--|-[a-z]", arguments[0]):
        text = arguments.pop(0)
    fields.append((path, text))
  return rest, fields


def apply(
  config: ml_collections.ConfigDict, fields: Iterable[tuple[str, str]]
) -> None:
  """Sets fields of a config, in place.

  Args:
    config: A config with every field; see `files.read`.
    fields: Paths and texts, see `split`.

  Raises:
    ValueError: A path leads into a value that has no fields.

  Example:
    >>> from flaxshard.train.config import checking
    >>> config = checking.defaults()
    >>> apply(config, [("seed", "3"), ("optimizer.b1", "0.8")])
    >>> config.seed, config.optimizer.to_dict()
    (3, {'b1': 0.8, 'name': 'adamw'})
  """
  with config.unlocked(), config.ignore_type():
    for path, text in fields:
      *parents, name = path.split(".")
      holder = config
      for parent in parents:
        value = holder.get(parent, {})
        if isinstance(value, str):
          # It stands for a dict with that name.
          value = {"name": value}
        if not isinstance(value, (dict, ml_collections.ConfigDict)):
          raise ValueError(
            f"--config.{path}: {parent} has no fields; it is {value!r}."
          )
        holder[parent] = value
        holder = holder[parent]
      holder[name] = _parse(text, holder.get(name))


def _parse(text: str, current: Any) -> Any:
  """Returns the value of a text.

  Args:
    text: A Python literal, a boolean, or a string without quotes.
    current: The value so far, or None.
  """
  value: Any = text
  literal = text.capitalize() if text.lower() in ("true", "false") else text
  with contextlib.suppress(SyntaxError, TypeError, ValueError):
    value = ast.literal_eval(literal)
  if isinstance(current, str) and not isinstance(value, dict):
    return text
  if isinstance(current, (list, tuple)) and not isinstance(
    value, (list, tuple, dict)
  ):
    return type(current)([value])
  return value
