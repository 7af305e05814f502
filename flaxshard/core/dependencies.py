"""Finds which inputs of a traced program each of its outputs depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jax_core

from flaxshard.core import programs

Names = frozenset[str]
_NONE: Names = frozenset()


def find(program: Any, names: Sequence[str | None]) -> list[Names]:
  """Returns the names of the inputs that each output of a program depends on.

  Args:
    program: The result of `jax.make_jaxpr`.
    names: A name for each input, None for an input that does not matter.

  Example:
    >>> import jax
    >>> program = jax.make_jaxpr(lambda x, y: (x + y, 2 * y))(1.0, 1.0)
    >>> [sorted(names) for names in find(program, ["x", "y"])]
    [['x', 'y'], ['y']]
  """
  given = [_NONE if name is None else frozenset((name,)) for name in names]
  return _of_program(program, given)


def _of_program(program: Any, given: Sequence[Names]) -> list[Names]:
  program = programs.open_program(program)
  known = dict(zip(program.invars, given, strict=True))

  def names_of(atom: Any) -> Names:
    # Constants of the program, unlike its inputs, have no names.
    if isinstance(atom, jax_core.Literal):
      return _NONE
    return known.get(atom, _NONE)

  for eqn in program.eqns:
    new = _of_equation(eqn, [names_of(x) for x in eqn.invars])
    known.update(zip(eqn.outvars, new, strict=True))
  return [names_of(x) for x in program.outvars]


def _of_equation(eqn: Any, given: list[Names]) -> list[Names]:
  """Returns the names for each output of an equation."""
  name = eqn.primitive.name
  if name in programs.CALLS:
    return _of_program(programs.called(eqn), given)
  if name == "optimization_barrier":
    return given
  if name == "cond":
    branches = [_of_program(b, given[1:]) for b in eqn.params["branches"]]
    return [given[0].union(*outs) for outs in zip(*branches, strict=True)]
  # Of a loop too: what one turn writes, the next may read.
  return [_NONE.union(*given)] * len(eqn.outvars)
