"""The stored pictures are what their script draws, of the code as it is."""

import importlib
import pathlib

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
