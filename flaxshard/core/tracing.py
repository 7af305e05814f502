"""Questions about traces: what is traced, from what, and in which dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.extend import core

PyTree = Any

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
  if is_traced(pred):
    return jax.lax.cond(pred, true_fn, false_fn, *operands)
  return (true_fn if pred else false_fn)(*operands)


def is_traced(x: Any) -> bool:
  """Returns whether an array is traced, so that its value is unknown."""
  return isinstance(x, jax.core.Tracer)


def is_computed(tree: PyTree) -> bool:
  """Returns whether a tree has an array that its trace has computed.

  False for arrays that are not traced, for arguments of the traced function,
  and where it is not known.

  Example:
    >>> def f(x):
    ...   print(is_computed(x), is_computed({"y": 2 * x}))
    >>> _ = jax.make_jaxpr(f)(1.0)
    False True
  """
  return any(_equation_of(x) is not None for x in jax.tree.leaves(tree))


def depends_on(outputs: PyTree, inputs: PyTree) -> bool:
  """Returns whether traced arrays were computed from others in their trace.

  Args:
    outputs: A tree of arrays.
    inputs: A tree of arrays.

  Returns:
    True if an equation of the trace, or several in a row, lead from an input to
    an output. False if not, if nothing is traced, or if it is not known.

  Example:
    >>> def f(x, y):
    ...   print(depends_on(2 * x, x), depends_on(2 * x, y))
    >>> _ = jax.make_jaxpr(f)(1.0, 2.0)
    True False
  """
  wanted = {id(x) for x in jax.tree.leaves(inputs) if is_traced(x)}
  pending = [x for x in jax.tree.leaves(outputs) if is_traced(x)]
  seen: set[int] = set()
  while wanted and pending:
    x = pending.pop()
    if id(x) in wanted:
      return True
    equation = _equation_of(x)
    if equation is not None and id(equation) not in seen:
      seen.add(id(equation))
      pending += getattr(equation, "in_tracers", ())
  return False


def _equation_of(x: Any) -> Any:
  """Returns the equation that a traced array comes from; None if not known."""
  # The tracers of `jax.jit` have it. JAX documents no way to ask for it, so
  # without this attribute it is not known.
  return getattr(x, "parent", None) if is_traced(x) else None


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

  return any(
    (
      eqn.primitive.name not in _MOVES
      and has_dtype(eqn.invars)
      and has_dtype(eqn.outvars)
      and not any(True for _ in _programs_of(eqn.params.values()))
    )
    or any(
      computes_in(inner, dtype) for inner in _programs_of(eqn.params.values())
    )
    for eqn in getattr(program, "jaxpr", program).eqns
  )


def _programs_of(values: Iterable[Any]) -> Iterator[Any]:
  """Yields the programs among the parameters of an equation."""
  for value in values:
    if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
      yield value
    elif isinstance(value, (tuple, list)):
      yield from _programs_of(value)
