"""Sets fields of a config from the command line: `--config.FIELD=VALUE`.

`ml_collections.config_flags` sets only keys that a config has, to values of the
type that they have. Here arguments such as `--config.optimizer.b1=0.8` are new
keys, and a field may have several types: `--config.optimizer=lion`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
import difflib
import re
from typing import Any, NamedTuple

import ml_collections

from flaxshard.core import checks
from flaxshard.core import registry
from flaxshard.train.config import definition
from flaxshard.train.config.definition import Field

_FLAG = re.compile(r"--?config\.([^=]+)(?:=(.*))?", re.DOTALL)
_NEGATED_FLAG = re.compile(r"--?noconfig\.([^=]+)")


class Override(NamedTuple):
  """A field on the command line.

  Attributes:
    flag: The flag without its value, for errors.
    path: The field, such as `"mesh.replica"`.
    text: The value as it was written.
  """

  flag: str
  path: str
  text: str


def split(argv: Sequence[str]) -> tuple[list[str], list[Override]]:
  """Separates the fields of the config from the other flags.

  Args:
    argv: A command line. A value follows its flag after `=` or as the next
      argument; `--config.FLAG` alone is true, and `--noconfig.FLAG` false.

  Returns:
    The other arguments, and the fields.

  Example:
    >>> split(["--workdir=w", "--config.seed=1", "--noconfig.mesh.per_replica"])
    (['--workdir=w'], [Override(flag='--config.seed', path='seed', text='1'), \
Override(flag='--noconfig.mesh.per_replica', path='mesh.per_replica', \
text='false')])
  """
  rest, overrides = [], []
  arguments = iter(range(len(argv)))
  for i in arguments:
    if match := _NEGATED_FLAG.fullmatch(argv[i]):
      overrides.append(Override(argv[i], match[1], "false"))
      continue
    match = _FLAG.fullmatch(argv[i])
    if match is None:
      rest.append(argv[i])
      continue
    path, text = match.groups()
    if text is None:
      text = "true"
      following = argv[i + 1] if i + 1 < len(argv) else "--"
      # A negative number is a value.
      if not re.match(r"--|-[a-zA-Z]", following):
        text = following
        next(arguments)
    overrides.append(Override(argv[i].split("=", 1)[0], path, text))
  return rest, overrides


def apply(
  config: ml_collections.ConfigDict, overrides: Iterable[Override]
) -> None:
  """Sets fields of a config, in place.

  Args:
    config: A config with every field; see `files.read`.
    overrides: The fields. Values of the fields that are defined are checked
      with the config. Keys of dicts such as `config.model` are free: what the
      dict names checks them.

  Raises:
    ValueError: There is no such field, or the text is no value of its type.
      The message names the flag.

  Example:
    >>> from flaxshard.train.config import checking
    >>> config = checking.defaults()
    >>> apply(config, [Override("--config.seed", "seed", "3")])
    >>> config.seed
    3
    >>> apply(config, split(["--config.optimizer.b1=0.8"])[1])
    >>> config.optimizer.to_dict()
    {'b1': 0.8, 'name': 'adamw'}
  """
  with config.unlocked(), config.ignore_type():
    for override in overrides:
      parts = override.path.split(".")
      _set(config, definition.FIELDS, "config", parts, override)


def _set(
  holder: Any,
  fields: Sequence[Field] | None,
  where: str,
  parts: Sequence[str],
  override: Override,
) -> None:
  """Sets a field in a part of a config.

  Args:
    holder: The part: a ConfigDict.
    fields: The fields that it may have; None: any.
    where: Its path, for errors.
    parts: The rest of the path of the field.
    override: The field and its value.
  """
  name = parts[0]
  place = f"{where}.{name}"
  field = None if fields is None else _find_field(override, fields, where, name)
  current = holder.get(name)
  if len(parts) == 1:
    if field is None:
      holder[name] = _parse_like(override, current)
    else:
      value = _parse(field.kind.type, override.text)
      holder[name] = field.kind.check(place, value)
    return
  if (
    current is not None and not registry.is_dict(current)
    if field is None
    else field.kind.type is not dict
  ):
    raise ValueError(
      f"{override.flag}: {place} has no fields; it is {current!r}."
    )
  if not registry.is_dict(current):
    # A string may stand for a dict with that name.
    holder[name] = {"name": current} if isinstance(current, str) else {}
  inner = field.fields if field is not None and field.fields else None
  _set(holder[name], inner, place, parts[1:], override)


def _find_field(
  override: Override, fields: Sequence[Field], where: str, name: str
) -> Field:
  for field in fields:
    if field.name == name:
      return field
  paths = [field.name for field in fields]
  hint = checks.did_you_mean(name, paths)
  if not hint and where == "config":
    inner = {
      f.name: f"{field.name}.{f.name}" for field in fields for f in field.fields
    }
    # The nearest field inside of another one, such as mesh.replica.
    for near in difflib.get_close_matches(name, inner, n=1):
      hint = f" Did you mean {inner[near]!r}?"
  raise ValueError(
    f"{override.flag}: {where}.{name} is not a field.{hint} --help=config "
    "lists the fields."
  )


def _parse(kind: type, text: str) -> Any:
  """Returns the value of a text, or the text if it is no value of its kind."""
  if kind is str:
    return text
  if text.lower() in ("true", "false"):
    text = text.capitalize()
  try:
    value = ast.literal_eval(text)
  except (SyntaxError, TypeError, ValueError):
    return text
  if kind is bool and value in (0, 1):
    return bool(value)
  return value


def _parse_like(override: Override, current: Any) -> Any:
  """Returns the value of a key that is not defined.

  Args:
    override: The key and the text of its value.
    current: The value so far: a string and a sequence keep their type.
  """
  if isinstance(current, str):
    return override.text
  kind = bool if isinstance(current, bool) else object
  value = _parse(kind, override.text)
  if isinstance(current, (list, tuple)) and isinstance(value, (int, float)):
    # As config_flags does: 16 is the same as (16,).
    return type(current)([value])
  return value
