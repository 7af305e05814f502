"""The pages in docs/api have every public name."""

import importlib
import pathlib
import pkgutil
import re

import pytest

import flaxshard

_FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "api"
_PAGES = {path.stem: path.read_text() for path in _FOLDER.glob("*.md")}
_ENTRIES = re.findall(
  r"^\.\. (?:auto|py:)(\w+):: flaxshard\.([\w.]+)$",
  "\n".join(_PAGES.values()),
  re.M,
)
# Modules whose names users write, also those without `__all__`.
_MODULES = sorted(
  {info.name for info in pkgutil.iter_modules(flaxshard.__path__)}
  - {"__main__", "examples"}
  | {"config", "optimizers"}
)


def _resolve(path):
  """Returns what a dotted name below flaxshard stands for."""
  value, name = flaxshard, "flaxshard"
  for part in path.split("."):
    name = f"{name}.{part}"
    try:
      value = getattr(value, part)
    except AttributeError:
      value = importlib.import_module(name)
  return value


def _public_names(module):
  if hasattr(module, "__all__"):
    return module.__all__
  return [
    name
    for name, value in vars(module).items()
    if getattr(value, "__module__", None) == module.__name__
    and not name.startswith("_")
  ]


_OBJECTS = [_resolve(path) for _, path in _ENTRIES]


def _is_documented(path):
  """Returns whether a name has an entry, maybe by another name."""
  if path in {name for _, name in _ENTRIES}:
    return True
  value = _resolve(path)
  return any(value is found for found in _OBJECTS)


def test_each_name_has_one_entry():
  names = [name for _, name in _ENTRIES]
  assert sorted(names) == sorted(set(names))
  assert len(names) > 120


def test_public_names_have_entries():
  names = set(flaxshard.__all__) - {"__version__", *_MODULES}
  assert [name for name in sorted(names) if not _is_documented(name)] == []
  # Every module that `fs.<Tab>` offers is one of those above.
  assert set(flaxshard.__all__) - names <= {"__version__", *_MODULES}
  assert dir(flaxshard) == sorted(flaxshard.__all__)


@pytest.mark.parametrize("name", _MODULES)
def test_names_of_a_module_have_entries(name):
  public = _public_names(_resolve(name))
  paths = [f"{name}.{x}" for x in public]
  assert paths
  assert [path for path in paths if not _is_documented(path)] == []
