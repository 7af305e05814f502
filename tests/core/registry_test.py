"""Names in configs."""

import math

import pytest

from flaxshard.core import checks
from flaxshard.core import registry

BUILTIN = {"digits": 1, "digits_npz": 2, "imagenet": 3}


def test_builtin_names():
  assert registry.lookup("config.data.name", "imagenet", BUILTIN) == 3


def test_ones_own_code_by_module_and_attribute():
  assert registry.lookup("x", "math:sqrt", BUILTIN) is math.sqrt
  # A dotted module works; a builtin name wins over an import.
  import os.path

  assert registry.lookup("x", "os.path:join", BUILTIN) is os.path.join


def test_unknown_names_list_what_exists_and_what_is_near():
  with pytest.raises(ValueError) as e:
    registry.lookup("config.data.name", "imagnet", BUILTIN)
  message = str(e.value)
  assert message.startswith("config.data.name: unknown name 'imagnet'")
  assert "digits, digits_npz, imagenet, or 'package.module:attr" in message
  assert message.endswith("Did you mean 'imagenet'?")


def test_nothing_near_gives_no_hint():
  with pytest.raises(ValueError) as e:
    registry.lookup("x", "zzz", BUILTIN)
  assert "Did you mean" not in str(e.value)


def test_near_names_several():
  assert checks.did_you_mean("digit", BUILTIN) == (
    " Did you mean 'digits' or 'digits_npz'?"
  )
  assert checks.did_you_mean("digit", []) == ""


@pytest.mark.parametrize("name", [None, 3, ("a",), len])
def test_names_are_strings(name):
  with pytest.raises(TypeError, match=r"config\.model must be a string"):
    registry.lookup("config.model", name, BUILTIN)


def test_a_module_that_cannot_be_imported():
  with pytest.raises(ValueError, match=r"cannot be imported.*no_such_module"):
    registry.lookup("x", "no_such_module:thing", BUILTIN)


def test_an_attribute_that_is_not_there_names_the_near_one():
  with pytest.raises(
    ValueError, match=r"'math' has no attribute 'sqr'\. Did you mean 'sqrt'"
  ):
    registry.lookup("x", "math:sqr", BUILTIN)


@pytest.mark.parametrize("name", [":", "math:", ":sqrt"])
def test_half_a_name_is_an_error_of_ours(name):
  with pytest.raises(ValueError, match="x: "):
    registry.lookup("x", name, BUILTIN)
