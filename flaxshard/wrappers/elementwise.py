"""Decides whether a function works element by element, from its jaxpr.

Most optimizers update every element of a parameter from the same element of its
gradient and slots. So a part of each array is enough to compute that part of
the result. Clipping by the global norm, LAMB and factored second moments are
different: there, elements depend on others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import itertools
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

# Primitives whose programs are followed, and one that computes nothing.
_FOLLOWED = jaxprs.CALLS | jaxprs.CUSTOM_CALLS | {"optimization_barrier"}


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
  pairs = list(
    itertools.zip_longest(jaxprs.equations(whole), jaxprs.equations(part))
  )
  if not _same_values(whole.consts, part.consts) or any(
    a is None
    or b is None
    or a.primitive is not b.primitive
    # Literals differ where they follow from a shape: x / x.shape[0].
    or not _same_values(_literals(a), _literals(b))
    for a, b in pairs
  ):
    return False
  split = jax.tree.map(lambda x, y: x.shape != y.shape, tuple(args), parts)
  is_split = jax.tree.leaves(split)
  try:
    outputs = _Split({id(a): b for a, b in pairs}).run(whole, is_split)
  except _NotElementwise:
    return False
  return outputs == is_split[: len(outputs)]


class _Split(jaxprs.Forward[bool]):
  """Whether a value is split: a part of it is computed from the parts.

  Args:
    twins: For each equation of the whole arrays, by its id, that of the parts.
  """

  constant = False

  def __init__(self, twins: dict[int, Any]):
    self._twins = twins

  def join(self, facts: Iterable[bool]) -> bool:
    """Returns whether a value is split that is computed from several ones."""
    return any(facts)

  def rule(self, eqn: Any, given: list[bool]) -> list[bool] | None:
    """Decides about equations that run no programs."""
    name, twin = eqn.primitive.name, self._twins[id(eqn)]
    if name in _FOLLOWED or (name == "cond" and not given[0]):
      # The predicate of a cond must be the same for all parts.
      return None
    if not any(given):
      text = str(eqn)
      # The same in both programs; only an axis_index depends on the replica.
      if text == str(twin) and "axis_index" not in text:
        return [False] * len(eqn.outvars)
      # All elements are equal, so a part of them fits any part.
      if name == "broadcast_in_dim" and not eqn.invars[0].aval.shape:
        return [True]
    elif name in _ELEMENTWISE and (
      _semantics(eqn.params) == _semantics(twin.params)
    ):
      return [True] * len(eqn.outvars)
    raise _NotElementwise

  def unfollowed(self, eqn: Any, given: list[bool]) -> bool:
    """Raises: the equation writes to a mutable array."""
    raise _NotElementwise


def _semantics(params: dict[str, Any]) -> dict[str, str]:
  """Returns the parameters of an equation that affect its values."""
  return {k: str(v) for k, v in params.items() if k != "sharding"}


def _literals(eqn: Any) -> list[Any]:
  """Returns the constants in the inputs of an equation."""
  return [x.val for x in eqn.invars if isinstance(x, jax_core.Literal)]


def _same_values(some: Sequence[Any], others: Sequence[Any]) -> bool:
  return len(some) == len(others) and all(map(np.array_equal, some, others))
