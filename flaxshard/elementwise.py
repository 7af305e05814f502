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


class _MixesError(Exception):
  """An equation combines elements of different places."""


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
  jaxpr = jax.make_jaxpr(fn)(*args)
  tags = jax.tree.leaves(dims)
  wanted = tags[: len(jaxpr.jaxpr.outvars)]
  try:
    found = _outputs(jaxpr, tags)
  except _MixesError:
    return False
  of_parts = jax.make_jaxpr(fn)(*parts)
  # A scale that follows from a shape is a number in the program.
  return _text(jaxpr) == _text(of_parts) and all(
    tag == want or (tag == UNIFORM and want != WHOLE)
    for tag, want in zip(found, wanted, strict=True)
  )


def _outputs(jaxpr: Any, tags: Sequence[int]) -> list[int]:
  jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
  known = dict(zip(jaxpr.invars, tags, strict=True))

  def read(atom: Any) -> int:
    return WHOLE if hasattr(atom, "val") else known.get(atom, WHOLE)

  for eqn in jaxpr.eqns:
    given = [read(x) for x in eqn.invars]
    known.update(zip(eqn.outvars, _equation(eqn, given), strict=True))
  return [read(x) for x in jaxpr.outvars]


def _equation(eqn: Any, given: list[int]) -> list[int]:
  name, params = eqn.primitive.name, eqn.params
  inner = params.get("jaxpr", params.get("call_jaxpr"))
  if name in _CALLS and inner is not None:
    return _outputs(inner, given)
  if name == "cond" and given[0] == WHOLE:
    branches = [_outputs(b, given[1:]) for b in params["branches"]]
    return [_common(tags) for tags in zip(*branches, strict=True)]
  if name == "optimization_barrier":
    return given
  if name == "broadcast_in_dim" and not eqn.invars[0].aval.shape:
    return [UNIFORM if eqn.outvars[0].aval.shape else WHOLE]
  if name in _ELEMENTWISE:
    arrays = [
      tag for x, tag in zip(eqn.invars, given, strict=True) if x.aval.shape
    ]
    return [_common(arrays)] * len(eqn.outvars)
  if max(given, default=WHOLE) > WHOLE:
    raise _MixesError
  return [WHOLE] * len(eqn.outvars)


def _common(tags: Sequence[int]) -> int:
  """Returns the tag of what is computed from arrays, element by element."""
  kinds = set(tags) - {UNIFORM}
  if len(kinds) > 1:  # parts along different dimensions, or a part and a whole
    raise _MixesError
  if kinds:
    return kinds.pop()
  return UNIFORM if tags else WHOLE


def _text(jaxpr: Any) -> list[Any]:
  """Returns what a program does, without the shapes that it does it on."""
  text: list[Any] = []
  jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
  for eqn in jaxpr.eqns:
    literals = [
      np.asarray(x.val).tolist() if hasattr(x, "val") else None
      for x in eqn.invars
    ]
    nested = [
      _text(x)
      for value in eqn.params.values()
      for x in (value if isinstance(value, (tuple, list)) else [value])
      if hasattr(x, "eqns") or hasattr(x, "jaxpr")
    ]
    exact = {k: v for k, v in eqn.params.items() if k in ("y", "new_dtype")}
    text.append((eqn.primitive.name, literals, nested, str(exact)))
  return text
