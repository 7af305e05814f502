"""Finds the inputs of a traced program that it does not read."""

from __future__ import annotations

from typing import Any

from jax.extend import core

from flaxshard.core import programs


def reads_inputs(jaxpr: Any) -> list[bool]:
  """Returns, for each input of a jaxpr, whether the program may read it.

  Args:
    jaxpr: A `Jaxpr`, or a `ClosedJaxpr`.

  Example:
    >>> import jax
    >>> reads_inputs(jax.make_jaxpr(lambda x, y: x + 1)(1, 2))
    [True, False]
  """
  jaxpr = programs.open_program(jaxpr)
  # By id: literals have no hash.
  read = {id(atom) for atom in jaxpr.outvars}
  for eqn in jaxpr.eqns:
    is_read = [True] * len(eqn.invars)
    inner = eqn.params.get("jaxpr")
    # `jit`, `shard_map` and `scan` hand their inputs to one jaxpr, in order.
    if isinstance(inner, (core.Jaxpr, core.ClosedJaxpr)):
      inner_reads = reads_inputs(inner)
      if len(inner_reads) == len(is_read):
        is_read = inner_reads
    read |= {id(atom) for atom, x in zip(eqn.invars, is_read, strict=True) if x}
  return [id(x) in read for x in jaxpr.invars]
