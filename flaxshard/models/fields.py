"""Checks of the fields that the models have in common."""

from __future__ import annotations

from typing import Any


def check_counts(**counts: Any) -> None:
  """Raises unless every field is a positive integer, or a tuple of those."""
  for name, value in counts.items():
    for count in value if isinstance(value, tuple) else (value,):
      if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name} must be integers, got {value!r}.")
      if count < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}.")


def check_rate(name: str, value: Any) -> None:
  """Raises unless a field is a rate in [0, 1)."""
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    raise TypeError(f"{name} must be a number, got {value!r}.")
  if not 0 <= value < 1:
    raise ValueError(f"{name} must lie in [0, 1), got {value!r}.")
