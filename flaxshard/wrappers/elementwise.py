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

from flaxshard.core import programs

PyTree = Any

# The tag of an array: the dimension along which it is split, or one of these.
WHOLE = -1  # computed from nothing that is split
UNIFORM = -2  # the same, and all its elements are equal


class _NotElementwise(Exception):
  """An equation mixes elements, or its result depends on the shape."""


def is_elementwise(
  fn: Callable[..., PyTree],
  args: Sequence[PyTree],
  parts: Sequence[PyTree],
  dims: PyTree,
) -> bool:
  """Returns whether `fn` of parts of its arguments gives that part of `fn`.

  `fn` is traced with the whole arguments and with the parts. The two programs
  are then compared equation by equation. A function that cannot be decided
  counts as not element-wise.

  Args:
    fn: A function that returns a tree like its first argument.
    args: Its arguments, trees of arrays.
    parts: The same trees with a part of each array, or its shape and dtype.
    dims: For each leaf of `args`, the dimension along which `parts` has a part
      of it; `WHOLE` where it has all of it.

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
  except Exception:
    # An optimizer may raise any error for a state of other shapes.
    return False
  if any(isinstance(x, jax.core.Tracer) for x in whole.consts):
    # A value that `fn` captures from an outer trace: it may be per replica.
    return False
  tags = jax.tree.leaves(dims)
  try:
    _check_same_values(whole.consts, part.consts)
    output_tags = _program_tags(whole, part, tags)
  except _NotElementwise:
    return False
  # A uniform array fits any split, but the shape of one that is not split could
  # be that of a part.
  return all(
    tag == want or (tag == UNIFORM and want != WHOLE)
    for tag, want in zip(output_tags, tags[: len(output_tags)], strict=True)
  )


def _program_tags(
  whole: jax_core.ClosedJaxpr | jax_core.Jaxpr,
  part: jax_core.ClosedJaxpr | jax_core.Jaxpr,
  input_tags: Sequence[int],
) -> list[int]:
  """Returns the tags of a program's outputs.

  Args:
    whole: The program of the whole arrays.
    part: The program of the parts.
    input_tags: The tags of the inputs.
  """
  whole, part = programs.open_program(whole), programs.open_program(part)
  tags = dict(zip(whole.invars, input_tags, strict=True))

  def tag_of(atom: Any) -> int:
    # Constants of the program, unlike its inputs, have no tag.
    if isinstance(atom, jax_core.Literal):
      return WHOLE
    return tags.get(atom, WHOLE)

  if len(whole.eqns) != len(part.eqns):
    raise _NotElementwise
  for eqn, other in zip(whole.eqns, part.eqns, strict=True):
    if eqn.primitive is not other.primitive:
      raise _NotElementwise
    # Literals differ where they follow from a shape: x / x.shape[0].
    _check_same_values(programs.literals(eqn), programs.literals(other))
    given = [tag_of(x) for x in eqn.invars]
    new = _equation_tags(eqn, other, given)
    tags.update(zip(eqn.outvars, new, strict=True))
  return [tag_of(x) for x in whole.outvars]


def _equation_tags(eqn: Any, other: Any, given: list[int]) -> list[int]:
  """Returns the tags of an equation's outputs.

  Args:
    eqn: The equation of the whole arrays.
    other: The same equation of the parts.
    given: The tags of its inputs.
  """
  name, params = eqn.primitive.name, eqn.params
  if name in programs.CALLS:
    inner, other_inner = programs.called(eqn), programs.called(other)
    return _program_tags(inner, other_inner, given)
  # The predicate must be the same for all parts.
  if name == "cond" and given[0] == WHOLE:
    branches = [
      _program_tags(a, b, given[1:])
      for a, b in zip(params["branches"], other.params["branches"], strict=True)
    ]
    return [_common_tag(tags) for tags in zip(*branches, strict=True)]
  if name == "optimization_barrier":
    return given
  if set(given) <= {WHOLE}:
    if name == "broadcast_in_dim" and not eqn.invars[0].aval.shape:
      return [UNIFORM if eqn.outvars[0].aval.shape else WHOLE]
    # Both programs compute the same from the same inputs, if shapes and
    # parameters are equal. Only axis_index depends on the replica.
    if name == "axis_index" or str(eqn) != str(other):
      raise _NotElementwise
    return [WHOLE] * len(eqn.outvars)
  if name not in programs.ELEMENTWISE or programs.semantics(
    params
  ) != programs.semantics(other.params):
    raise _NotElementwise
  # Scalars are broadcast to any part.
  arrays = [
    tag for x, tag in zip(eqn.invars, given, strict=True) if x.aval.shape
  ]
  return [_common_tag(arrays)] * len(eqn.outvars)


def _common_tag(tags: Sequence[int]) -> int:
  """Returns the tag of an element-wise result of arrays with these tags."""
  distinct = set(tags) - {UNIFORM}
  # Parts along different dimensions, or a part and a whole array.
  if len(distinct) > 1:
    raise _NotElementwise
  if distinct:
    return distinct.pop()
  return UNIFORM if tags else WHOLE


def _check_same_values(some: Sequence[Any], others: Sequence[Any]) -> None:
  """Raises unless the constants of two programs are equal."""
  if not programs.same_values(some, others):
    raise _NotElementwise
