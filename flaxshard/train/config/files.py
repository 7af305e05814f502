"""Reads config files, and sets fields as the command line says."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
import contextlib
import importlib
import pathlib
import re
import runpy
from typing import Any

import ml_collections

from flaxshard.core import checks
from flaxshard.core import registry
from flaxshard.train.config import checking

_PACKAGE = pathlib.Path(__file__).parents[2]

# The beginning of a note on what the code of a config raises.
NOTE = "in the config "

_FLAG = re.compile(r"--?(no)?config\.([^=]+)(?:=(.*))?", re.DOTALL)


def read(name: str) -> ml_collections.ConfigDict:
  """Reads a config, and adds the defaults of the fields that it lacks.

  The code of the file runs, with the permissions of the program.

  Args:
    name: One of `names()`, which is never taken for a path, the path of a
      Python file with a function `get_config()`, or the name of a module with
      that function, `"package.module"`. What follows a colon is an argument of
      the function: `"my_config.py:large"` calls `get_config("large")`.

  Returns:
    The config that `get_config()` returns, unlocked, with every field. It is
    not checked.

  Raises:
    ValueError: There is no such config, or the file does not give one.
    Exception: The code of the file raised it.

  Example:
    >>> import flaxshard as fs
    >>> config = fs.config.read("digits")
    >>> config.model.name, config.mesh.replica
    ('cnn', -1)
  """
  place, *arguments = name.split(":", 1)
  module = _load(place)
  if not callable(get_config := module.get("get_config")):
    raise ValueError(
      f"config {place} has no function get_config(), which returns the config."
      f"{checks.did_you_mean('get_config', module)}"
    )
  registry.check_call(f"config {name}: get_config", get_config, *arguments)
  with _running(place):
    config = get_config(*arguments)
  if not registry.is_dict(config):
    raise ValueError(
      f"config {place}: get_config() returns {config!r}; it must return the "
      "config, a ConfigDict or a dict."
    )
  return checking.defaults(config)


def names() -> dict[str, str]:
  """Returns the configs of flaxshard: names, and what they train.

  Example:
    >>> import flaxshard as fs
    >>> fs.config.names()["imagenet"]
    'Trains ResNet-50 on ImageNet in float16, with a dynamic loss scale.'
  """
  # Parsed, not imported: a file may import packages that are not installed.
  return {
    name: (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
    for name, path in _paths().items()
  }


def _paths() -> dict[str, pathlib.Path]:
  """Returns the files of the configs of flaxshard, by name."""
  # The wheel has them in the package; in a checkout they stand beside it.
  packaged = _PACKAGE / "configs"
  folder = packaged if packaged.is_dir() else _PACKAGE.parent / "configs"
  return {path.stem: path for path in sorted(folder.glob("*.py"))}


@contextlib.contextmanager
def _running(place: str) -> Iterator[None]:
  """Names the config in what its code raises, whoever raises it there."""
  try:
    yield
  except Exception as e:
    if isinstance(e, ModuleNotFoundError) and f"{place}.".startswith(
      f"{e.name}."
    ):
      raise ValueError(f"config {place}: {e}") from e
    e.add_note(f"{NOTE}{place}")
    raise


def _load(place: str) -> dict[str, Any]:
  """Runs the file or module of a config, and returns its attributes."""
  path = pathlib.Path(place).expanduser()
  is_path = path.suffix == ".py" or len(path.parts) > 1
  # A name comes first: a folder "digits" may be the workdir of an earlier run.
  if not is_path:
    path = _paths().get(place, path)
  if path.is_file():
    with _running(place):
      return runpy.run_path(str(path), run_name=f"config_{path.stem}")
  if path.is_dir():
    raise ValueError(f"config {path} is a folder, not a file.")
  if not is_path and "." in place:
    with _running(place):
      return vars(importlib.import_module(place))
  # A file nearby, or a name: "digits.py" may stand for "digits".
  hint = checks.did_you_mean(
    str(path), [*map(str, path.parent.glob("*.py")), *_paths()]
  ) or checks.did_you_mean(path.stem, _paths())
  raise ValueError(
    f"config {place}: there is no config of this name, and no such file in "
    f"{path.parent.resolve()}.{hint} --list prints the names; other configs "
    "are files, given by their path."
  )


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
  """Separates the fields of the config from the other flags.

  Args:
    argv: A command line. A value follows its flag after `=` or as the next
      argument; `--config.FLAG` alone is true, and `--noconfig.FLAG` false.

  Returns:
    The other arguments, and the paths of fields with the texts of their values.

  Example:
    >>> split_flags(["--workdir=w", "--config.seed=1", "--noconfig.lora.train"])
    (['--workdir=w'], [('seed', '1'), ('lora.train', 'false')])
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


def set_fields(
  config: ml_collections.ConfigDict, fields: Iterable[tuple[str, str]]
) -> None:
  """Sets fields of a config from texts, in place.

  As `ml_collections.config_flags` does, a string and a tuple that the config
  has stay one. It takes in addition what a config may hold: another type of
  number, new arguments of a model or an optimizer, and a name for a dict with a
  name. `check` reports values that are not allowed.

  Args:
    config: A config with every field; see `read`.
    fields: Paths and texts, see `split_flags`.

  Raises:
    ValueError: A path leads into a value that has no fields.

  Example:
    >>> config = checking.defaults()
    >>> set_fields(config, [("seed", "3"), ("optimizer.b1", "0.8")])
    >>> config.seed, config.optimizer.to_dict()
    (3, {'b1': 0.8, 'name': 'adamw'})
  """
  with config.unlocked(), config.ignore_type():
    for path, text in fields:
      *parents, name = path.split(".")
      holder = config
      for parent in parents:
        value = registry.with_name(holder.get(parent, {}))
        if not registry.is_dict(value):
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
    return type(current)([value] if text else ())
  return value
