"""Traced programs: their equations, and the programs inside of these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core

# Primitives that run one program, with their own inputs and outputs. JAX 0.12
# calls `closed_call` `eval_jaxpr`.
CALLS = frozenset(
  "jit pjit closed_call eval_jaxpr remat remat2 checkpoint".split()
)
# These do so, too, and may have derivatives of their own.
CUSTOM_CALLS = frozenset(
  "core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr".split()
)
# Primitives of layers: products of matrices, and convolutions.
_PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))


def open_program(program: Any) -> core.Jaxpr:
  """Returns the program of a `Jaxpr` or a `ClosedJaxpr` without constants."""
  # JAX 0.12 has one class for both.
  return program if isinstance(program, core.Jaxpr) else program.jaxpr


def equations(program: Any) -> Iterator[Any]:
  """Yields the equations of a program, and of the programs inside of them."""
  for eqn in open_program(program).eqns:
    yield eqn
    for inner in core.jaxprs_in_params(eqn.params):
      yield from equations(inner)


def called(eqn: Any) -> Any:
  """Returns the program that an equation of `CALLS` or a `scan` runs."""
  return eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"]


def split_scan(
  params: Any, inputs: list[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
  """Splits the inputs of a `scan` into constants, carry and scanned arrays."""
  if "num_consts" in params:
    first, last = params["num_consts"], params["num_carry"]
    last += first
    return inputs[:first], inputs[first:last], inputs[last:]
  # JAX 0.12 keeps the three lists in one structure.
  consts, carry, xs = map(list, params["ft_in"].update(inputs).unpack())
  return consts, carry, xs


def computes_in(program: Any, dtype: Any) -> bool:
  """Returns whether a program multiplies matrices, or convolves, in a dtype.

  Args:
    program: A `jax.extend.core.Jaxpr` or `ClosedJaxpr`.
    dtype: The dtype.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> half = lambda x: (x.astype("float16") @ x.astype("float16")).sum()
    >>> computes_in(jax.make_jaxpr(half)(jnp.ones((2, 2))), "float16")
    True
    >>> computes_in(jax.make_jaxpr(half)(jnp.ones((2, 2))), "bfloat16")
    False
  """
  return any(
    x.aval.dtype == dtype
    for eqn in equations(program)
    if eqn.primitive.name in _PRODUCTS
    for x in eqn.invars
  )
