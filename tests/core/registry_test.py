"""Names in configs."""

import math

import ml_collections
import pytest

from flaxshard.core import registry

BUILTIN = {"digits": 1, "digits_npz": 2, "sqrt": "math:sqrt"}


def test_lookup_finds_builtin_names_and_module_attributes():
  assert registry.lookup("x", "digits", BUILTIN) == 1
  assert registry.lookup("x", "sqrt", BUILTIN) is math.sqrt
  assert registry.lookup("x", "math:sqrt", BUILTIN) is math.sqrt
  assert registry.lookup("x", "ml_collections.config_dict:ConfigDict", {}) is (
    ml_collections.ConfigDict
  )


@pytest.mark.parametrize(
  ("name", "facts"),
  [
    ("digit", ["'digit'", "digits, digits_npz, sqrt", "Did you mean 'digits'"]),
    ("no_such_module:thing", ["'no_such_module'"]),
    ("math:sqr", ["'math'", "'sqr'", "Did you mean 'sqrt'"]),
    ("math:", ["'math'"]),
  ],
)
def test_unknown_name_raises(name, facts):
  with pytest.raises(ValueError) as e:
    registry.lookup("config.data.name", name, BUILTIN)
  for fact in ["config.data.name", *facts]:
    assert fact in str(e.value)


def power(base, exponent=2):
  if exponent == 0:
    raise ValueError("exponent must not be 0.")
  return base, exponent


FUNCTIONS = {"power": power}


def call(config):
  return registry.call("config.f", config, FUNCTIONS, base=5)


def test_call_passes_arguments_as_plain_values():
  assert call({"name": "power"}) == (5, 2)
  config = ml_collections.ConfigDict({"name": "power", "exponent": [1, [2]]})
  assert call(config) == (5, (1, (2,)))
  assert config.to_dict() == {"name": "power", "exponent": [1, [2]]}


@pytest.mark.parametrize(
  ("config", "error", "facts"),
  [
    ("power", TypeError, ["config.f", "'power'"]),
    ({"exponent": 3}, ValueError, ["config.f", "'name'"]),
    ({"name": "power", "base": 1}, ValueError, ["'base'"]),
    ({"name": "power", "exponet": 1}, ValueError, ["'exponent'"]),
    ({"name": "math:pi"}, TypeError, ["config.f ('math:pi')", "3.14"]),
    # The function does not name the config field; the registry does, once.
    ({"name": "power", "exponent": 0}, ValueError, ["config.f ('power'): exp"]),
  ],
)
def test_mistakes(config, error, facts):
  with pytest.raises(error) as e:
    call(config)
  assert all(fact in str(e.value) for fact in facts)
  assert str(e.value).count("config.f") == 1
