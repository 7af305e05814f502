"""Traced programs: their equations, and the programs inside of these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core
import jax.numpy as jnp

# The equation that computes each variable, for each program.
Sources = dict[Any, dict[Any, Any]]

# Primitives that run one program, with their own inputs and outputs. JAX 0.12
# calls `closed_call` `eval_jaxpr`.
CALLS = frozenset(
  "jit pjit closed_call eval_jaxpr remat remat2 checkpoint".split()
)
# These do so, too, and may have derivatives of their own.
CUSTOM_CALLS = frozenset(
  "core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr".split()
)
# Primitives that compute each element from the same element of their inputs.
ELEMENTWISE = frozenset(
  "abs add add_any and atan2 cbrt ceil clamp complex conj "
  "convert_element_type copy copy_p cos cosh div eq erf erf_inv erfc exp "
  "exp2 expm1 floor ge gt imag integer_pow is_finite le log log1p logistic "
  "lt max min mul name ne neg nextafter not or pow real reduce_precision rem "
  "round rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan tanh "
  "xor".split()
)
# Primitives that move numbers and leave each as it is.
_UNCHANGED = frozenset(
  "copy copy_p name reshape sharding_constraint squeeze transpose".split()
)
# These move or cast numbers, without computing any.
_MOVES = _UNCHANGED | frozenset(
  "broadcast_in_dim concatenate convert_element_type device_put "
  "dynamic_slice dynamic_update_slice gather iota optimization_barrier pad "
  "rev select_n slice split stop_gradient".split()
)


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
  """Returns whether a program computes in a dtype.

  Args:
    program: A `jax.extend.core.Jaxpr` or `ClosedJaxpr`.
    dtype: The dtype. Casts to it and moves of such arrays do not count.

  Example:
    >>> import jax
    >>> half = lambda x: (x.astype("float16") * 2).astype("float32")
    >>> computes_in(jax.make_jaxpr(half)(1.0), "float16")
    True
    >>> computes_in(jax.make_jaxpr(half)(1.0), "bfloat16")
    False
  """
  for eqn in equations(program):
    inner = next(core.jaxprs_in_params(eqn.params), None)
    # What an equation with programs computes, they compute.
    if inner is None and eqn.primitive.name not in _MOVES:
      read, written = (
        {getattr(x.aval, "dtype", None) for x in atoms}
        for atoms in (eqn.invars, eqn.outvars)
      )
      if jnp.dtype(dtype) in read & written:
        return True
  return False


def dtype_before_cast(
  program: Any, var: Any, sources: Sources, *, loops: bool = False
) -> Any:
  """Returns the 16-bit dtype that a variable was cast from, else None.

  Args:
    program: The `jax.extend.core.Jaxpr` that computes the variable.
    var: The variable, or a literal.
    sources: The equation of each variable, by program; missing ones are added.
    loops: Whether to look at what the steps of a `scan` return. XLA collects it
      in float32, and casts it to 16 bits after the loop.
  """
  # Literals have no hash.
  while not isinstance(var, core.Literal):
    if program not in sources:
      sources[program] = {x: eqn for eqn in program.eqns for x in eqn.outvars}
    eqn = sources[program].get(var)
    if eqn is None:
      return None
    name = eqn.primitive.name
    if name == "convert_element_type":
      dtype = eqn.invars[0].aval.dtype
      is_exact = dtype in (jnp.float16, jnp.bfloat16) and var.aval.dtype in (
        jnp.float32,
        jnp.float64,
      )
      return dtype if is_exact else None
    if name in _UNCHANGED:
      var = eqn.invars[0]
    elif name in CALLS or (loops and name == "scan"):
      index = list(eqn.outvars).index(var)
      if name == "scan":
        _, carry, _ = split_scan(eqn.params, eqn.invars)
        if index < len(carry):  # the first steps may compute it otherwise
          return None
      program = open_program(called(eqn))
      var = program.outvars[index]
    else:
      return None
  return None
