"""What the hyper-parameters of several wrappers may be."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_count(argument: str, value: Any) -> None:
  """Raises unless a hyper-parameter is an integer that counts from 1.

  Raises:
    TypeError: It is no integer.
    ValueError: It is below 1, or too large for JAX to count to.
  """
  if isinstance(value, (bool, np.bool_)) or not isinstance(
    value, (int, np.integer)
  ):
    raise TypeError(f"{argument} must be an integer, got {value!r}.")
  if not 1 <= value < 2**31:
    raise ValueError(f"{argument} must be at least 1, got {value!r}.")
