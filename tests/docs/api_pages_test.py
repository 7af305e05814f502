"""The pages in docs/api have every public name."""

import importlib
import pathlib
import pkgutil
import re

import flaxshard

_FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "api"
_NAMES = re.findall(
  r"^\.\. (?:auto|py:)\w+:: flaxshard\.([\w.]+)$",
  "\n".join(path.read_text() for path in _FOLDER.glob("*.md")),
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


_OBJECTS = [_resolve(path) for path in _NAMES]


def _undocumented(paths):
  """Returns the names without an entry, maybe by another name."""
  return [
    path
    for path in paths
    if path not in _NAMES
    and not any(_resolve(path) is found for found in _OBJECTS)
  ]


def test_each_name_has_one_entry():
  assert len(_NAMES) == len(set(_NAMES)) > 120


def test_public_names_have_entries():
  names = set(flaxshard.__all__) - {"__version__", *_MODULES}
  assert not _undocumented(sorted(names))
  assert dir(flaxshard) == sorted(flaxshard.__all__)
  for module in _MODULES:
    public = [f"{module}.{name}" for name in _public_names(_resolve(module))]
    assert public and not _undocumented(public)
