"""Decides whether a function works element by element, from its jaxpr.

Most optimizers update every element of a parameter from the same element of its
gradient and slots. So a part of each array is enough to compute that part of
the result. Clipping by the global norm, LAMB and factored second moments are
different: there, elements depend on others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import itertools
from typing import Any

import jax
from jax.extend import core as jax_core
import numpy as np

from flaxshard.core import jaxprs

PyTree = Any

# A barrier has several results, each of one of its inputs.
_ELEMENTWISE = jaxprs.ELEMENTWISE | {"optimization_barrier"}
# Primitives that compute what the equations of their programs compute.
_FOLLOWED = jaxprs.CALLS | jaxprs.CUSTOM_CALLS | {"cond"}


def is_elementwise(
  fn: Callable[..., PyTree], args: Sequence[PyTree], parts: Sequence[PyTree]
) -> bool:
  """Returns whether `fn` of parts of its arguments gives that part of `fn`.

  `fn` is traced with the whole arguments and with the parts. The two programs
  are then compared equation by equation. A function that cannot be decided
  counts as not element-wise.

  Args:
    fn: A function that returns a tree like its first argument.
    args: Its arguments, trees of arrays.
    parts: The same trees with a part of each array, or its shape and dtype. An
      array of the same shape in both is not split.

  Example:
    >>> import jax.numpy as jnp
    >>> args, parts = (jnp.ones((4, 3)),), (jnp.ones((2, 3)),)
    >>> is_elementwise(jnp.sqrt, args, parts)
    True
    >>> is_elementwise(lambda x: x / x.sum(), args, parts)
    False
  """
  whole = jax.make_jaxpr(fn)(*args)
  try:
    part = jax.make_jaxpr(fn)(*parts)
  except Exception:
    # An optimizer may raise any error for a state of other shapes.
    return False
  if any(isinstance(x, jax.core.Tracer) for x in whole.consts):
    # A value that `fn` captures from an outer trace: it may be per replica.
    return False
  return _same_values(whole.consts, part.consts) and all(
    a is not None and b is not None and _agree(a, b)
    for a, b in itertools.zip_longest(
      jaxprs.equations(whole), jaxprs.equations(part)
    )
  )


def _agree(eqn: Any, twin: Any) -> bool:
  """Returns whether an equation gives its twin's part of its result.

  Args:
    eqn: An equation of the whole arrays.
    twin: That of the parts. A value of another shape there is split.
  """
  name, params = eqn.primitive.name, _semantics(eqn.params)
  # Literals differ where they follow from a shape: x / x.shape[0].
  if eqn.primitive is not twin.primitive or not _same_values(
    _literals(eqn), _literals(twin)
  ):
    return False
  if name in _FOLLOWED:
    # A program that JAX does not show here is not known.
    return any(True for _ in jax_core.jaxprs_in_params(eqn.params))
  if any(map(_is_split, eqn.invars, twin.invars)):
    return name in _ELEMENTWISE and params == _semantics(twin.params)
  if any(map(_is_split, eqn.outvars, twin.outvars)):
    # All elements are equal, so a part of them fits any part.
    return name == "broadcast_in_dim" and not eqn.invars[0].aval.shape
  # An axis_index depends on the replica.
  return name != "axis_index" and params == _semantics(twin.params)


def _is_split(x: Any, y: Any) -> bool:
  return x.aval.shape != y.aval.shape


def _semantics(params: dict[str, Any]) -> dict[str, str]:
  """Returns the parameters of an equation that affect its values."""
  return {k: str(v) for k, v in params.items() if k != "sharding"}


def _literals(eqn: Any) -> list[Any]:
  """Returns the constants in the inputs of an equation."""
  return [x.val for x in eqn.invars if isinstance(x, jax_core.Literal)]


def _same_values(some: Sequence[Any], others: Sequence[Any]) -> bool:
  return len(some) == len(others) and all(map(np.array_equal, some, others))
