"""Compares facts that must be the same for all workers of a run."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import numpy as np

from flaxshard.core import trees
from flaxshard.state.host_commits import CenterState
from flaxshard.wrappers.agn import AGN

PyTree = Any

_MISSING = "(missing)"
_VALUE_LENGTH = 300


def describe(
  agn: AGN, center: CenterState, num_workers: int, facts: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns what workers compare, as values for JSON.

  Args:
    agn: The wrapper.
    center: The worker's center.
    num_workers: The number of workers of the run.
    facts: Further facts, of the user.
  """
  arguments = {
    field.name: getattr(agn, field.name)
    for field in dataclasses.fields(agn)
    # A function: its state, below, says what can be said of it.
    if field.name != "outer_tx"
  }
  structure = {
    trees.path_string(path): f"{trees.dtype_of(x)}{list(np.shape(x))}"
    for path, x in jax.tree_util.tree_leaves_with_path(center)
  }
  return {
    "num_workers": num_workers,
    "AGN": arguments,
    "state": structure,
    **({"facts": dict(facts)} if facts else {}),
  }


def first_difference(a: Any, b: Any) -> tuple[str, str, str] | None:
  """Returns the path of the first difference of two facts, and both values.

  Args:
    a: Facts of nested dicts.
    b: The facts of another worker.

  Example:
    >>> first_difference({"AGN": {"delay": 0}}, {"AGN": {"delay": 2}})
    ('AGN.delay', '0', '2')
  """
  return None if a == b else _compare("", a, b)


def _compare(where: str, a: Any, b: Any) -> tuple[str, str, str]:
  if isinstance(a, Mapping) and isinstance(b, Mapping):
    for key in {**a, **b}:
      x, y = a.get(key, _MISSING), b.get(key, _MISSING)
      if x != y:
        return _compare(f"{where}.{key}" if where else str(key), x, y)
  return where, _short(a), _short(b)


def _short(value: Any) -> str:
  text = value if value is _MISSING else repr(value)
  return text if len(text) <= _VALUE_LENGTH else f"{text[:_VALUE_LENGTH]}..."
