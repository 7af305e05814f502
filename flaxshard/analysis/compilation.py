"""Compiles a step for its devices, and reads why it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import time
from typing import Any

import jax

from flaxshard import compiled as compiled_lib
from flaxshard.compiled import hlo
from flaxshard.core import checks


@dataclasses.dataclass(frozen=True)
class Compilation:
  """The result of compiling a step.

  Attributes:
    compiled: The compiled program; None if the compiler refused it or is not
      installed.
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

  @functools.cached_property
  def program(self) -> hlo.Program | None:
    """The parsed text of `compiled`, which may be 20 MB long."""
    return None if self.compiled is None else hlo.parse(self.compiled)


def jit_step(
  step: Callable[..., Any], donate_argnums: int | Sequence[int] | None
) -> Any:
  """Returns a jitted step.

  Args:
    step: A function, or the result of `jax.jit`, `nnx.jit` or `Strategy.jit`.
    donate_argnums: Positions of the arguments whose memory a function may
      overwrite. None: the first.

  Raises:
    TypeError: `step` is not a function.
    ValueError: `donate_argnums` is out of range, or given for a step that is
      jitted already.
  """
  if not callable(step):
    raise TypeError(f"step must be a function, got {step!r}.")
  if callable(getattr(step, "trace", None)):
    if donate_argnums is not None:
      raise ValueError(
        f"donate_argnums={donate_argnums!r} must be None for a step that is "
        "jitted already: give it to jax.jit or Strategy.jit."
      )
    return step
  if donate_argnums is None:
    donate_argnums = 0
  if isinstance(donate_argnums, int):
    donate_argnums = (donate_argnums,)
  donated = [
    checks.integer("donate_argnums", i, minimum=0) for i in donate_argnums
  ]
  return jax.jit(step, donate_argnums=donated)


def compile_step(
  trace: Callable[[], jax.stages.Traced], device: Any = None
) -> Compilation:
  """Traces a step, and compiles it if the compiler of its device is installed.

  Args:
    trace: Returns the traced step.
    device: A device of the step. None: its compiler is installed.

  Returns:
    The compiled program, or why it does not fit the devices.
  """
  start = time.perf_counter()
  traced = trace()
  # That of nnx.jit holds JAX's.
  traced = getattr(traced, "traced", traced)
  # The description of a TPU, where libtpu is not installed.
  if device is not None and not isinstance(device, jax.Device):
    return Compilation(None, time.perf_counter() - start, traced)
  try:
    compiled = traced.lower().compile()
  except jax.errors.JaxRuntimeError as e:
    message = str(e)
    if "RESOURCE_EXHAUSTED" not in message:
      raise
    seconds = time.perf_counter() - start
    shortage = compiled_lib.parse_memory_error(message)
    if shortage is None:
      return Compilation(None, seconds, traced, message)
    return Compilation(
      None, seconds, traced, message, shortage.needed, shortage.available
    )
  return Compilation(compiled, time.perf_counter() - start, traced)
