"""`fs.<Tab>` offers the public names, and nothing else."""

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
def test_dir_of_a_package_is_its_public_names(name):
  package = importlib.import_module(name)
  assert dir(package) == sorted(package.__all__)
  assert len(set(package.__all__)) == len(package.__all__)
  # Those that are imported when they are first used as well.
  for public in package.__all__:
    assert getattr(package, public) is not None


@pytest.mark.parametrize("name", ["flaxshard", "flaxshard.data"])
def test_an_unknown_name_is_an_attribute_error(name):
  with pytest.raises(AttributeError, match=f"'{name}' has no attribute 'nmae'"):
    getattr(importlib.import_module(name), "nmae")  # noqa: B009
