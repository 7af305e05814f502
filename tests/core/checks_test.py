"""The argument checks: accepted values, and the errors for all others."""

import math

import numpy as np
import pytest

from flaxshard.core import checks


@pytest.mark.parametrize(
  ("call", "returned"),
  [
    (lambda: checks.integer("n", 3), 3),
    (lambda: checks.integer("n", np.int64(3), minimum=3), 3),
    (lambda: checks.integer("n", -(2**40)), -(2**40)),
    (lambda: checks.integer("n", 2**31 - 1), 2**31 - 1),
    (lambda: checks.number("x", 1), 1.0),
    (lambda: checks.number("x", np.float32(0.5), above=0), 0.5),
    (lambda: checks.number("x", 0, minimum=0, below=1), 0.0),
    (lambda: checks.one_of("o", None, ("sum", None)), None),
    (lambda: checks.one_of("o", "sum", ("sum", None)), "sum"),
  ],
)
def test_valid_value_is_returned_in_plain_python_type(call, returned):
  value = call()
  assert value == returned
  assert type(value) is type(returned)


@pytest.mark.parametrize(
  ("call", "kind", "facts"),
  [
    (lambda: checks.integer("n", True), TypeError, ("n", "integer", "True")),
    (lambda: checks.integer("n", 1.0), TypeError, ("n", "integer", "1.0")),
    (lambda: checks.integer("n", 0, minimum=1), ValueError, ("n", "1", "0")),
    (lambda: checks.integer("n", 2**31), ValueError, ("n", "2147483647")),
    (lambda: checks.number("x", True), TypeError, ("x", "number", "True")),
    (lambda: checks.number("x", 2, below=1), ValueError, ("below 1", "2.")),
    (lambda: checks.number("x", math.nan), ValueError, ("x", "finite", "nan")),
    (lambda: checks.number("x", 10**400), ValueError, ("x", "finite")),
    (lambda: checks.one_of("b", 1, (True, False)), TypeError, ("b", "1")),
    (lambda: checks.one_of("o", "men", ("mean",)), ValueError, ("'mean'?",)),
    (lambda: checks.one_of("o", np.ones(2), ("sum",)), TypeError, ("'sum'",)),
  ],
)
def test_mistakes(call, kind, facts):
  # One `except ValueError` handles wrong types and values out of range.
  with pytest.raises(ValueError) as e:
    call()
  assert isinstance(e.value, kind)
  for fact in facts:
    assert fact in str(e.value)
