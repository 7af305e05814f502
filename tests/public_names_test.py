"""The names that `__all__` of each package lists exist, once."""

import importlib
import pkgutil

import pytest

import flaxshard

PACKAGES = [
  "flaxshard",
  *(
    f"flaxshard.{module.name}"
    for module in pkgutil.iter_modules(flaxshard.__path__)
    if module.ispkg
  ),
]


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_exist(name):
  package = importlib.import_module(name)
  assert len(set(package.__all__)) == len(package.__all__)
  # Those that are imported when they are first used as well.
  for public in package.__all__:
    assert getattr(package, public) is not None


def test_tab_offers_the_public_names():
  assert dir(flaxshard) == sorted(flaxshard.__all__)
