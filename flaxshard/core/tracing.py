"""Facts about traces, and conditionals that need none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

PyTree = Any

# JAX name scope of AGN's conditional: compiled programs name it.
COMMIT_SCOPE = "agn_commit"
# That of the conditional of Accumulate.
UPDATE_SCOPE = "accumulated_update"
# That of the collectives of row-sparse gradients.
ROWS_SCOPE = "gradient_rows"

# Primitives that run one program, with their own inputs and outputs. JAX 0.12
# calls `closed_call` `eval_jaxpr`.
CALLS = frozenset(
  "jit pjit closed_call eval_jaxpr remat remat2 checkpoint".split()
)
# These do so, too, and may have derivatives of their own.
CUSTOM_CALLS = frozenset(
  "core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr".split()
)

# Primitives that move or cast numbers, without computing any.
_MOVES = frozenset(
  "broadcast_in_dim concatenate convert_element_type copy copy_p "
  "device_put dynamic_slice dynamic_update_slice gather iota "
  "optimization_barrier pad reshape rev select_n sharding_constraint slice "
  "split squeeze stop_gradient transpose".split()
)


def cond(
  pred: jax.Array,
  true_fn: Callable[..., Any],
  false_fn: Callable[..., Any],
  *operands: Any,
) -> Any:
  """Returns `jax.lax.cond(...)`, outside of a trace by a Python branch.

  Outside of a trace `jax.lax.cond` compiles its branches, and keeps what it
  compiled. A new closure is compiled at every call, so an eager train step
  would compile, and take more memory, at every step.

  Args:
    pred: A bool scalar.
    true_fn: Called with the operands if `pred` is true.
    false_fn: Called with them if it is false.
    *operands: Trees of arrays.

  Example:
    >>> int(cond(jax.numpy.array(True), lambda x: x + 1, lambda x: x, 2))
    3
  """
  if isinstance(pred, jax.core.Tracer):
    return jax.lax.cond(pred, true_fn, false_fn, *operands)
  return (true_fn if pred else false_fn)(*operands)


def is_compiling() -> bool:
  """Returns whether operations are traced into a program, as by `jax.jit`.

  They are not under `jax.vmap` or `jax.grad` alone, which run operations on
  other than their own tracers at once.

  Example:
    >>> is_compiling(), bool(jax.jit(is_compiling)())
    (False, True)
    >>> jax.vmap(lambda x: x * is_compiling())(jnp.ones(1))
    Array([0.], dtype=float32)
  """
  return isinstance(jnp.zeros(()), jax.core.Tracer)


def computes_in(program: Any, dtype: Any) -> bool:
  """Returns whether a program computes in a dtype.

  Args:
    program: A `jax.extend.core.Jaxpr` or `ClosedJaxpr`.
    dtype: The dtype. Casts to it and moves of such arrays do not count.

  Example:
    >>> half = lambda x: (x.astype("float16") * 2).astype("float32")
    >>> computes_in(jax.make_jaxpr(half)(1.0), "float16")
    True
    >>> computes_in(jax.make_jaxpr(half)(1.0), "bfloat16")
    False
  """

  def has_dtype(atoms: Iterable[Any]) -> bool:
    return any(getattr(x.aval, "dtype", None) == dtype for x in atoms)

  for eqn in getattr(program, "jaxpr", program).eqns:
    inner = list(core.jaxprs_in_params(eqn.params))
    if any(computes_in(p, dtype) for p in inner):
      return True
    # What an equation with programs computes, they compute.
    is_computation = not inner and eqn.primitive.name not in _MOVES
    if is_computation and has_dtype(eqn.invars) and has_dtype(eqn.outvars):
      return True
  return False


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
