"""The argument checks: accepted values, and the errors for all others."""

import math
import pathlib

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
    (lambda: checks.boolean("b", np.True_), True),
    (lambda: checks.string("s", "a"), "a"),
    (lambda: checks.path("p", pathlib.PurePosixPath("/a")), "/a"),
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
    (lambda: checks.integer("n", np.float32(2)), TypeError, ("float32(2.0)",)),
    (lambda: checks.integer("n", 1.0), TypeError, ("n", "integer", "1.0")),
    (lambda: checks.integer("n", "1"), TypeError, ("n", "'1'")),
    (
      lambda: checks.integer("n", np.ones((9, 9))),
      TypeError,
      ("float64[9,9]",),
    ),
    (lambda: checks.integer("n", 0, minimum=1), ValueError, ("n", "1", "0")),
    (lambda: checks.integer("n", 2**31), ValueError, ("n", "2147483647")),
    (
      lambda: checks.integer("n", -1, minimum=0, maximum=3),
      ValueError,
      ("n", "at least 0 and at most 3", "-1"),
    ),
    (
      lambda: checks.integer("n", 4, minimum=0, maximum=3),
      ValueError,
      ("n", "at least 0 and at most 3", "4"),
    ),
    (lambda: checks.number("x", True), TypeError, ("x", "number", "True")),
    (lambda: checks.number("x", np.ones(9)), TypeError, ("got float64[9].",)),
    (
      lambda: checks.number("x", 2, minimum=0, below=1),
      ValueError,
      ("x must be a finite number of at least 0 and below 1, got 2.",),
    ),
    (lambda: checks.boolean("b", np.ones(9)), TypeError, ("float64[9]",)),
    (lambda: checks.string("s", np.ones(9)), TypeError, ("float64[9]",)),
    (lambda: checks.one_of("o", np.ones(9), "a"), TypeError, ("float64[9]",)),
    (lambda: checks.path("p", None), TypeError, ("p must be a path", "None")),
    (lambda: checks.path("p", np.ones(9)), TypeError, ("float64[9]",)),
    (lambda: checks.number("x", "1"), TypeError, ("x", "number", "'1'")),
    (lambda: checks.number("x", 1j), TypeError, ("x", "1j")),
    (lambda: checks.number("x", math.nan), ValueError, ("x", "finite", "nan")),
    (lambda: checks.number("x", math.inf), ValueError, ("x", "finite", "inf")),
    (lambda: checks.number("x", 10**400), ValueError, ("x", "finite")),
    (lambda: checks.number("x", 0, above=0), ValueError, ("x", "above 0")),
    (lambda: checks.number("x", 1, below=1), ValueError, ("x", "below 1")),
    (lambda: checks.number("x", -1, minimum=0), ValueError, ("x", "least 0")),
    (lambda: checks.boolean("b", 1), TypeError, ("b", "True or False", "1")),
    (lambda: checks.string("s", 1), TypeError, ("s", "string", "1")),
    (lambda: checks.string("s", ""), TypeError, ("s", "string", "''")),
    (
      lambda: checks.one_of("o", "avg", ("sum", "mean")),
      ValueError,
      ("o", "'sum', 'mean'", "'avg'"),
    ),
    (
      lambda: checks.one_of("o", "dynamc", ("auto", "dynamic")),
      ValueError,
      ("o", "'dynamc'", "Did you mean 'dynamic'?"),
    ),
    (lambda: checks.one_of("o", True, (1, 2)), TypeError, ("o", "True")),
    (
      lambda: checks.one_of("o", np.ones(2), ("sum",)),
      TypeError,
      ("o", "'sum'"),
    ),
  ],
)
def test_invalid_value_raises_and_names_argument_and_value(call, kind, facts):
  with pytest.raises(kind) as e:
    call()
  for fact in facts:
    assert fact in str(e.value)


def test_wrong_type_is_a_value_error_too():
  # One `except ValueError` handles wrong types and values out of range.
  with pytest.raises(ValueError, match="True"):
    checks.integer("n", True)


def test_hint_names_each_match_once():
  hint = checks.did_you_mean("kernle", ["kernel", "bias", "kernel"])
  assert hint == " Did you mean 'kernel'?"
