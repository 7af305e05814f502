"""Whether an update treats every element of its arrays by itself.

An optimizer that does, as most do, can be given a part of each parameter and
the same part of its slots, and gives that part of the result. Clipping by the
global norm, LAMB or a factored second moment cannot. Which it is can be read
off the traced update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

PyTree = Any

# What holds for an array: the dimension that is split; or one of these.
WHOLE = -1  # it follows from nothing that is split
UNIFORM = -2  # likewise, and all its elements are equal

_ELEMENTWISE = frozenset(
  "abs add add_any and atan2 cbrt ceil clamp complex conj "
  "convert_element_type copy copy_p cos cosh div eq erf erf_inv erfc exp "
  "exp2 expm1 floor ge gt imag integer_pow is_finite le log log1p logistic "
  "lt max min mul ne neg nextafter not optimization_barrier or pow real "
  "reduce_precision rem round rsqrt select_n sign sin sinh sqrt square "
  "stop_gradient sub tan tanh xor".split()
)
_CALLS = frozenset(
  "jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call "
  "custom_vjp_call custom_vjp_call_jaxpr".split()
)


class _NotElementwise(Exception):
  """An equation combines elements of different places, or knows the shape."""


def is_elementwise(
  fn: Callable[..., PyTree],
  args: Sequence[PyTree],
  parts: Sequence[PyTree],
  dims: PyTree,
) -> bool:
  """Returns whether `fn` of parts is the part of what `fn` of the whole is.

  Args:
    fn: Returns a tree like its first argument.
    args: Its arguments, trees of arrays.
    parts: The same trees for parts of them, or shapes and dtypes.
    dims: For each leaf of `args`, the dimension along which `parts` has a part;
      `WHOLE` where it has it all.

  Example:
    >>> import jax.numpy as jnp
    >>> args, parts = (jnp.ones((4, 3)),), (jnp.ones((2, 3)),)
    >>> is_elementwise(jnp.sqrt, args, parts, (0,))
    True
    >>> is_elementwise(lambda x: x / x.sum(), args, parts, (0,))
    False
  """
  whole = jax.make_jaxpr(fn)(*args)
  try:
    part = jax.make_jaxpr(fn)(*parts)
  except Exception:  # of the optimizer's: its state is of certain shapes
    return False
  if any(isinstance(x, jax.core.Tracer) for x in whole.consts):
    return False  # what it takes from around it may differ between replicas
  tags = jax.tree.leaves(dims)
  try:
    _same_values(whole.consts, part.consts)
    found = _outputs(whole, part, tags)
  except _NotElementwise:
    return False
  return all(
    tag == want or (tag == UNIFORM and want != WHOLE)
    for tag, want in zip(found, tags[: len(found)], strict=True)
  )


def _outputs(whole: Any, part: Any, tags: Sequence[int]) -> list[int]:
  """Returns the tags of the outputs of a program, and of the one of parts."""
  whole, part = (getattr(x, "jaxpr", x) for x in (whole, part))
  known = dict(zip(whole.invars, tags, strict=True))

  def read(atom: Any) -> int:
    return WHOLE if hasattr(atom, "val") else known.get(atom, WHOLE)

  if len(whole.eqns) != len(part.eqns):
    raise _NotElementwise
  for eqn, other in zip(whole.eqns, part.eqns, strict=True):
    if eqn.primitive is not other.primitive:
      raise _NotElementwise
    literals = [
      [x.val for x in e.invars if hasattr(x, "val")] for e in (eqn, other)
    ]
    _same_values(*literals)
    given = [read(x) for x in eqn.invars]
    known.update(zip(eqn.outvars, _equation(eqn, other, given), strict=True))
  return [read(x) for x in whole.outvars]


def _equation(eqn: Any, other: Any, given: list[int]) -> list[int]:
  name, params = eqn.primitive.name, eqn.params
  if name in _CALLS:
    (key,) = [k for k in ("jaxpr", "call_jaxpr") if k in params]
    return _outputs(params[key], other.params[key], given)
  if name == "cond" and given[0] == WHOLE:
    branches = [
      _outputs(a, b, given[1:])
      for a, b in zip(params["branches"], other.params["branches"], strict=True)
    ]
    return [_common(tags) for tags in zip(*branches, strict=True)]
  if name == "optimization_barrier":
    return given
  if set(given) <= {WHOLE}:
    if name == "broadcast_in_dim" and not eqn.invars[0].aval.shape:
      return [UNIFORM if eqn.outvars[0].aval.shape else WHOLE]
    # It is the same in both programs, whatever it does; but for collectives.
    if name == "axis_index" or str(eqn) != str(other):
      raise _NotElementwise
    return [WHOLE] * len(eqn.outvars)
  if name not in _ELEMENTWISE or _plain(params) != _plain(other.params):
    raise _NotElementwise
  arrays = [
    tag for x, tag in zip(eqn.invars, given, strict=True) if x.aval.shape
  ]
  return [_common(arrays)] * len(eqn.outvars)


def _plain(params: dict[str, Any]) -> dict[str, str]:
  """Returns the parameters of an equation that say what is computed."""
  return {k: str(v) for k, v in params.items() if k != "sharding"}


def _common(tags: Sequence[int]) -> int:
  """Returns the tag of what is computed from arrays, element by element."""
  kinds = set(tags) - {UNIFORM}
  if len(kinds) > 1:  # parts along different dimensions, or a part and a whole
    raise _NotElementwise
  if kinds:
    return kinds.pop()
  return UNIFORM if tags else WHOLE


def _same_values(some: Sequence[Any], others: Sequence[Any]) -> None:
  """Raises unless constants are the same: one may follow from a shape."""
  if len(some) != len(others) or not all(
    np.array_equal(np.asarray(a), np.asarray(b), equal_nan=_is_float(a))
    for a, b in zip(some, others, strict=True)
  ):
    raise _NotElementwise


def _is_float(x: Any) -> bool:
  return np.issubdtype(np.asarray(x).dtype, np.inexact)
