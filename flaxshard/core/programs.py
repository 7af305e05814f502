"""Parts of traced programs, and comparisons of two programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jax_core
import numpy as np

from flaxshard.core import tracing

# Primitives that run one program, with their own inputs and outputs.
CALLS = tracing.CALLS | tracing.CUSTOM_CALLS

# Primitives that compute each element from the same element of their inputs.
ELEMENTWISE = frozenset(
  "abs add add_any and atan2 cbrt ceil clamp complex conj "
  "convert_element_type copy copy_p cos cosh div eq erf erf_inv erfc exp "
  "exp2 expm1 floor ge gt imag integer_pow is_finite le log log1p logistic "
  "lt max min mul ne neg nextafter not optimization_barrier or pow real "
  "reduce_precision rem round rsqrt select_n sign sin sinh sqrt square "
  "stop_gradient sub tan tanh xor".split()
)


def open_program(
  program: jax_core.ClosedJaxpr | jax_core.Jaxpr,
) -> jax_core.Jaxpr:
  """Returns the program without its constants."""
  # JAX 0.12 has one class for both.
  return program if isinstance(program, jax_core.Jaxpr) else program.jaxpr


def called_key(eqn: Any) -> str:
  """Returns the parameter that holds the program of an equation of `CALLS`."""
  return "call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"


def called(eqn: Any) -> Any:
  """Returns the program that an equation of `CALLS` runs."""
  return eqn.params[called_key(eqn)]


def semantics(params: dict[str, Any]) -> dict[str, str]:
  """Returns the parameters of an equation that affect its values."""
  return {k: str(v) for k, v in params.items() if k != "sharding"}


def literals(eqn: Any) -> list[Any]:
  """Returns the constants in the inputs of an equation.

  Those of one function differ between two shapes where they follow from a
  shape: `x / x.shape[0]`.
  """
  return [x.val for x in eqn.invars if isinstance(x, jax_core.Literal)]


def same_values(some: Sequence[Any], others: Sequence[Any]) -> bool:
  """Returns whether constants are equal; NaN equals NaN."""
  return len(some) == len(others) and all(
    np.array_equal(np.asarray(a), np.asarray(b), equal_nan=_is_inexact(a))
    for a, b in zip(some, others, strict=True)
  )


def _is_inexact(x: Any) -> bool:
  return np.issubdtype(np.asarray(x).dtype, np.inexact)
