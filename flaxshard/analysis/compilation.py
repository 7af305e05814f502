"""Compiles a step for its devices, and reads why it does not fit."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import re
import time
from typing import Any

import jax

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Two messages of libtpu 0.0.42. The first one stops before the temporaries are
# assigned, with a lower bound; the second one has the assigned bytes.
_NEEDED = (
  re.compile(
    r"total memory required for HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds "
    r"available HBM \(([\d.]+)([KMGT]?)\)"
  ),
  re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
)


@dataclasses.dataclass(frozen=True)
class Compilation:
  """The result of compiling a step.

  Attributes:
    compiled: The compiled program; None if the compiler refused it.
    traced: The traced step.
    error: The compiler's message if the program needs too much memory.
    needed: Bytes that a device needs at least, as the message says; None if it
      says nothing.
    available: Bytes that a device has for programs, as the message says.
    seconds: Seconds for tracing and compiling.
  """

  compiled: Any
  seconds: float
  traced: jax.stages.Traced
  error: str | None = None
  needed: int | None = None
  available: int | None = None


def compile_step(trace: Callable[[], jax.stages.Traced]) -> Compilation:
  """Traces, lowers and compiles a step.

  Args:
    trace: Returns the traced step.

  Returns:
    The compiled program, or why it does not fit the devices.
  """
  start = time.perf_counter()
  traced = trace()
  try:
    compiled = traced.lower().compile()
  except jax.errors.JaxRuntimeError as e:
    message = str(e)
    if "RESOURCE_EXHAUSTED" not in message:
      raise
    needed, available = _parse_needed(message)
    seconds = time.perf_counter() - start
    return Compilation(None, seconds, traced, message, needed, available)
  return Compilation(compiled, time.perf_counter() - start, traced)


def _parse_needed(message: str) -> tuple[int | None, int | None]:
  """Returns the needed and the available bytes that a message names."""
  for pattern in _NEEDED:
    match = pattern.search(message)
    if match:
      used, used_unit, limit, limit_unit = match.groups()
      return (
        int(float(used) * _UNITS[used_unit]),
        int(float(limit) * _UNITS[limit_unit]),
      )
  return None, None
