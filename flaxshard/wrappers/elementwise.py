"""Decides whether a function works element by element, from its jaxpr.

Most optimizers update every element of a parameter from the same element of its
gradient and slots. So a part of each array is enough to compute that part of
the result. Clipping by the global norm, LAMB and factored second moments are
different: there, elements depend on others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jax_core
import numpy as np

from flaxshard.core import jaxprs

PyTree = Any

# Primitives that compute each element from the same element of their inputs.
_ELEMENTWISE = frozenset(
  "abs add add_any and atan2 cbrt ceil clamp complex conj "
  "convert_element_type copy copy_p cos cosh div eq erf erf_inv erfc exp "
  "exp2 expm1 floor ge gt imag integer_pow is_finite le log log1p logistic "
  "lt max min mul ne neg nextafter not optimization_barrier or pow real "
  "reduce_precision rem round rsqrt select_n sign sin sinh sqrt square "
  "stop_gradient sub tan tanh xor".split()
)


class _NotElementwise(Exception):
  """An equation mixes elements, or its result depends on the shape."""


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
  if not _same_values(whole.consts, part.consts):
    return False
  split = jax.tree.map(lambda x, y: x.shape != y.shape, tuple(args), parts)
  is_split = jax.tree.leaves(split)
  try:
    outputs = _split_outputs(whole, part, is_split)
  except _NotElementwise:
    return False
  return outputs == is_split[: len(outputs)]


def _split_outputs(
  whole: Any, part: Any, is_split: Sequence[bool]
) -> list[bool]:
  """Returns which outputs of a program are split.

  Args:
    whole: The program of the whole arrays.
    part: The program of the parts.
    is_split: For each input, whether the two have different shapes.
  """
  whole, part = jaxprs.open_program(whole), jaxprs.open_program(part)
  known = dict(zip(whole.invars, is_split, strict=True))

  def look_up(atom: Any) -> bool:
    # Constants of the program are not split.
    return not isinstance(atom, jax_core.Literal) and known.get(atom, False)

  if len(whole.eqns) != len(part.eqns):
    raise _NotElementwise
  for eqn, other in zip(whole.eqns, part.eqns, strict=True):
    outputs = _equation_outputs(eqn, other, list(map(look_up, eqn.invars)))
    known.update(zip(eqn.outvars, outputs, strict=True))
  return list(map(look_up, whole.outvars))


def _equation_outputs(eqn: Any, other: Any, given: list[bool]) -> list[bool]:
  """Returns which outputs of an equation are split.

  Args:
    eqn: The equation of the whole arrays.
    other: The same equation of the parts.
    given: Which of its inputs are split.
  """
  name = eqn.primitive.name
  # Literals differ where they follow from a shape: x / x.shape[0].
  if eqn.primitive is not other.primitive or not _same_values(
    _literals(eqn), _literals(other)
  ):
    raise _NotElementwise
  if name in jaxprs.CALLS or name in jaxprs.CUSTOM_CALLS:
    return _split_outputs(jaxprs.called(eqn), jaxprs.called(other), given)
  # The predicate must be the same for all parts.
  if name == "cond" and not given[0]:
    branches = [
      _split_outputs(a, b, given[1:])
      for a, b in zip(
        eqn.params["branches"], other.params["branches"], strict=True
      )
    ]
    return [any(outputs) for outputs in zip(*branches, strict=True)]
  if name == "optimization_barrier":
    return given
  if not any(given):
    text = str(eqn)
    # The same in both programs; only an axis_index depends on the replica.
    if text == str(other) and "axis_index" not in text:
      return [False] * len(eqn.outvars)
    # All elements are equal, so a part of them fits any part.
    if name == "broadcast_in_dim" and not eqn.invars[0].aval.shape:
      return [True]
  elif name in _ELEMENTWISE and (
    _semantics(eqn.params) == _semantics(other.params)
  ):
    return [True] * len(eqn.outvars)
  raise _NotElementwise


def _semantics(params: dict[str, Any]) -> dict[str, str]:
  """Returns the parameters of an equation that affect its values."""
  return {k: str(v) for k, v in params.items() if k != "sharding"}


def _literals(eqn: Any) -> list[Any]:
  """Returns the constants in the inputs of an equation.

  Those of one function differ between two shapes where they follow from a
  shape: `x / x.shape[0]`.
  """
  return [x.val for x in eqn.invars if isinstance(x, jax_core.Literal)]


def _same_values(some: Sequence[Any], others: Sequence[Any]) -> bool:
  return len(some) == len(others) and all(map(np.array_equal, some, others))
