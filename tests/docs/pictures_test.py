"""The stored pictures are what their script draws, of the code as it is."""

import functools
import importlib
import pathlib
import re

import pytest

_PICTURES = pathlib.Path(__file__).parents[2] / "docs" / "pictures"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch):
  """Imports a script of docs/pictures by name."""
  monkeypatch.syspath_prepend(str(_PICTURES))
  return importlib.import_module


def test_stored_pictures_are_drawn_by_the_script(scripts) -> None:
  drawn = scripts("make_pictures").draw()
  stored = {path.name: path.read_text() for path in _PICTURES.glob("*.svg")}
  assert sorted(stored) == sorted(drawn)
  old = [name for name in drawn if stored[name] != drawn[name]]
  assert not old, f"run python docs/pictures/make_pictures.py: {old}"


def test_every_package_has_a_floor_above_all_that_it_imports(scripts) -> None:
  house = scripts("house")
  floor = {name: i for i, names in enumerate(house.FLOORS) for name in names}
  imports = house.imports()
  # A new package, or module beside the packages, needs a place in FLOORS.
  assert sorted(imports) == sorted(floor)
  upward = [
    f"{name} imports {target}"
    for name, targets in imports.items()
    for target in targets
    if floor[name] >= floor[target]
  ]
  assert upward == []


def test_arrows_leave_no_import_out(scripts) -> None:
  house = scripts("house")
  imports = house.imports()
  arrows = house.direct(imports)

  @functools.cache
  def reach(name: str) -> set[str]:
    return arrows[name].union(*map(reach, arrows[name]))

  assert all(targets <= reach(name) for name, targets in imports.items())
  assert arrows["state"] == {"wrappers"}
  assert arrows["core"] == set()


def test_imports_are_read_off_the_code(scripts, tmp_path, monkeypatch) -> None:
  house = scripts("house")
  (tmp_path / "low").mkdir()
  (tmp_path / "__init__.py").write_text("from flaxshard.low import name\n")
  (tmp_path / "low" / "__init__.py").write_text(
    "from typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n"
    "  from flaxshard.high import name\n"
    "def function():\n"
    "  from flaxshard import high\n"
  )
  (tmp_path / "high.py").write_text("from flaxshard import low\nimport jax\n")
  monkeypatch.setattr(house, "_PACKAGE", tmp_path)
  assert house.imports() == {
    "__init__": {"low"},
    "high": {"low"},
    "low": set(),
  }


def test_text_of_pictures_is_large_enough_for_a_phone(scripts) -> None:
  for text in scripts("make_pictures").draw().values():
    width = int(re.search(r'width="(\d+)"', text)[1])
    sizes = [float(x) for x in re.findall(r'font-size="([\d.]+)"', text)]
    assert min(sizes) * 350 / width >= 10  # pixels
