"""Finds and reads config files: by name, by path, or as modules."""

from __future__ import annotations

import ast
from collections.abc import Mapping
import importlib
import importlib.util
import pathlib
import sys
import types

import ml_collections

from flaxshard.core import checks
from flaxshard.train.config import checking

_PACKAGE = pathlib.Path(__file__).parents[2]


class ConfigFileError(ValueError):
  """A config file does not exist, or does not give a config."""


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
    ConfigFileError: There is no such config, or the file fails. The error that
      the file raised is the cause, and has the line.

  Example:
    >>> config = read("digits")
    >>> config.model.name, config.mesh.replica
    ('cnn', -1)
  """
  place, *arguments = name.split(":", 1)
  module = _load(place)
  get_config = vars(module).get("get_config")
  if not callable(get_config):
    raise ConfigFileError(
      f"{place} has no function get_config(), which returns the config."
      f"{checks.did_you_mean('get_config', vars(module))}"
    )
  try:
    config = get_config(*arguments)
  except Exception as error:
    raise _failure(place, error) from error
  if not isinstance(config, (Mapping, ml_collections.ConfigDict)):
    raise ConfigFileError(
      f"{place}: get_config() returns {config!r}; it must return the config, "
      "a ConfigDict or a dict."
    )
  try:
    return checking.add_defaults(config)
  except ValueError as error:
    raise ConfigFileError(f"{place}: {error}") from None


def names() -> dict[str, str]:
  """Returns the configs of flaxshard: names, and what they train.

  Example:
    >>> names()["imagenet"]
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
  return {
    path.stem: path
    for path in sorted(folder.glob("*.py"))
    if not path.stem.startswith("_")
  }


def _load(place: str) -> types.ModuleType:
  """Returns the module of a config."""
  path = pathlib.Path(place).expanduser()
  is_path = path.suffix == ".py" or len(path.parts) > 1
  # A name comes first: a folder "digits" may be the workdir of an earlier run.
  if not is_path and place in (paths := _paths()):
    path = paths[place]
  elif is_path or path.exists():
    if not path.is_file():
      raise ConfigFileError(f"{_no_such_file(path)}{_near(path)}")
  elif "." in place:
    return _import(place)
  else:
    raise ConfigFileError(
      f"{place}: there is no config of this name.{_near(path)} --list prints "
      "the names; other configs are files, given by their path."
    )
  # Registered as a module: dataclasses look theirs up.
  module_name = f"config_{path.stem}"
  spec = importlib.util.spec_from_file_location(module_name, path)
  if spec is None or spec.loader is None:
    raise ConfigFileError(f"{place} must be a Python file, *.py.")
  module = importlib.util.module_from_spec(spec)
  sys.modules[module_name] = module
  try:
    spec.loader.exec_module(module)
  except Exception as error:
    raise _failure(place, error) from error
  return module


def _import(name: str) -> types.ModuleType:
  try:
    return importlib.import_module(name)
  except Exception as error:
    raise _failure(f"the module {name}", error) from error


def _no_such_file(path: pathlib.Path) -> str:
  if path.is_dir():
    return f"{path} is a folder, not a config file."
  if not path.parent.is_dir():
    return f"{path}: there is no folder {path.parent.resolve()}."
  return f"{path}: there is no such file in {path.parent.resolve()}."


def _near(path: pathlib.Path) -> str:
  """Returns a hint with the files and names that are similar to a path."""
  folder = path if path.is_dir() else path.parent
  files = [str(p) for p in folder.glob("*.py")] if folder.is_dir() else []
  known = list(_paths())
  # "digits.py" and "config/digits.py" may stand for the name "digits".
  hint = checks.did_you_mean(str(path), [*files, *known])
  return hint or checks.did_you_mean(path.stem, known)


def _failure(place: str, error: Exception) -> ConfigFileError:
  return ConfigFileError(f"{place}: {type(error).__name__}: {error}")
