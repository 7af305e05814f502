"""Differentiates a function and returns the program of the backward pass."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Pullback:
  """The value of a function, and the program that computes its gradients.

  Attributes:
    value: The scalar that the function returned.
    aux: Its auxiliary output.
    program: A `jax.extend.core.ClosedJaxpr`. From the cotangent of the value it
      computes the gradients of the parameters.
    cotangent: The input of the program, a scalar 1.
    positions: For each output of the program, which leaf of the parameters it
      is the gradient of.
    constants: For each leaf of the parameters, a gradient that the program does
      not compute, such as one of `float0`; else None.
    treedef: The structure of the parameters.
  """

  value: jax.Array
  aux: Any
  program: Any
  cotangent: jax.Array
  positions: tuple[int, ...]
  constants: tuple[Any, ...]
  treedef: Any

  def gradients(self, outputs: list[Any]) -> PyTree:
    """Returns a tree of gradients like the parameters.

    Args:
      outputs: The outputs of the program.
    """
    leaves = list(self.constants)
    for i, x in zip(self.positions, outputs, strict=True):
      leaves[i] = x
    return self.treedef.unflatten(leaves)


def trace(
  fn: Callable[[PyTree], tuple[jax.Array, Any]], params: PyTree
) -> Pullback:
  """Calls a function once, and traces the computation of its gradients.

  Args:
    fn: Returns a real scalar and auxiliary output.
    params: The argument of `fn`. Integer leaves have gradients of `float0`.

  Raises:
    TypeError: The scalar is complex.

  Example:
    >>> pullback = trace(lambda w: (w**2, None), jnp.float32(3))
    >>> run = jax.extend.core.jaxpr_as_fun(pullback.program)
    >>> float(pullback.gradients(run(pullback.cotangent)))
    6.0
  """
  # Outside of the trace below, so that `fn` may store what it computes.
  value, pullback, aux = jax.vjp(fn, params, has_aux=True)
  if not jnp.issubdtype(value.dtype, jnp.floating):
    raise TypeError(f"loss_fn must return a real scalar, got {value.dtype}.")
  constants: list[Any] = []

  def traced(cotangent: jax.Array) -> dict[int, Any]:
    grads = dict(enumerate(jax.tree.leaves(pullback(cotangent))))
    # A gradient of `float0` is a constant, which is no output of a program. No
    # tracer may leave this function but as an output.
    computed = {
      i: g for i, g in grads.items() if isinstance(g, jax.core.Tracer)
    }
    constants.extend(None if i in computed else g for i, g in grads.items())
    return computed

  one = jnp.ones_like(value)
  program, shapes = jax.make_jaxpr(traced, return_shape=True)(one)
  return Pullback(
    value,
    aux,
    program,
    one,
    tuple(shapes),
    tuple(constants),
    jax.tree.structure(params),
  )
