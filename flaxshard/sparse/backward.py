"""Evaluates a backward pass with the gradients of tables as rows.

First `analyze` finds the variables of a program that can be `Rows`. Then
`evaluate` runs the program: equations that make a wanted output follow the
rules of `row_rules`, and all others are evaluated as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
from typing import Any

from jax.extend import core as jax_core

from flaxshard.core import jaxprs
from flaxshard.sparse import row_rules
from flaxshard.sparse.row_rules import DENSE
from flaxshard.sparse.row_rules import ROWS
from flaxshard.sparse.row_rules import Rows
from flaxshard.sparse.row_rules import ZEROS

# The equations whose programs are looked into. Others, such as those of loops,
# conditionals and `jax.checkpoint`, have whole gradients.
_CALLS = frozenset("jit pjit closed_call eval_jaxpr".split())


@dataclasses.dataclass(frozen=True)
class Facts:
  """Which variables of a program can be `Rows`.

  Attributes:
    program: The `jax.extend.core.Jaxpr`.
    known: For each variable `DENSE`, `ROWS` or `ZEROS`.
    reasons: For dense variables, the equation that needs or makes all rows.
      None: the variable is an input or a constant of the program.
  """

  program: Any
  known: dict[Any, str]
  reasons: dict[Any, Any]

  def of(self, atom: Any) -> str:
    """Returns what is known of a variable or literal."""
    if isinstance(atom, jax_core.Literal):
      return DENSE
    return self.known.get(atom, DENSE)

  def outputs(self) -> list[str]:
    """Returns what is known of each output."""
    return [self.of(x) for x in self.program.outvars]

  def reason(self, atom: Any) -> Any:
    """Returns the equation that makes a variable dense, or None."""
    if isinstance(atom, jax_core.Literal):
      return None
    return self.reasons.get(atom)


def analyze(program: Any, inputs: Sequence[str]) -> Facts:
  """Finds the variables of a program that can be `Rows`.

  Args:
    program: A `jax.extend.core.Jaxpr` or `ClosedJaxpr`.
    inputs: What is known of its inputs.
  """
  program = jaxprs.open_program(program)
  facts = Facts(program, dict(zip(program.invars, inputs, strict=True)), {})
  for eqn in program.eqns:
    given = [facts.of(x) for x in eqn.invars]
    if eqn.primitive.name in _CALLS:
      inner = analyze(jaxprs.called(eqn), given)
      found = inner.outputs()
      reasons = [inner.reason(x) for x in inner.program.outvars]
    else:
      found = [row_rules.result(eqn, given)] * len(eqn.outvars)
      reasons = [None] * len(eqn.outvars)
    for var, known, reason in zip(eqn.outvars, found, reasons, strict=True):
      facts.known[var] = known
      if known == DENSE:
        # The equation that needs all rows says more than those behind it.
        facts.reasons[var] = reason or _inner_reason(facts, eqn) or eqn
  return facts


def _inner_reason(facts: Facts, eqn: Any) -> Any:
  """Returns the equation that made an input of an equation dense, or None."""
  if eqn.primitive.name not in row_rules.RULES.keys() | {"rev", "transpose"}:
    return None
  size = eqn.outvars[0].aval.size
  reasons = [facts.reason(x) for x in eqn.invars if x.aval.size == size]
  # A scalar that is broadcast says less than what it is multiplied with.
  return next(
    (x for x in reasons if x and x.primitive.name != "broadcast_in_dim"), None
  )


def _demand(facts: Facts, wanted: Iterable[int]) -> set[Any]:
  """Returns the variables that must be `Rows` for the wanted outputs.

  Args:
    facts: The result of `analyze`.
    wanted: Positions of outputs that can be `Rows`.
  """
  demanded = {facts.program.outvars[i] for i in wanted}
  for eqn in reversed(facts.program.eqns):
    outputs = [i for i, x in enumerate(eqn.outvars) if x in demanded]
    if outputs:
      given = [facts.of(x) for x in eqn.invars]
      demanded.update(eqn.invars[i] for i in _operands(eqn, given, outputs))
  return demanded


def _operands(eqn: Any, given: list[str], outputs: list[int]) -> set[int]:
  """Returns which inputs an equation takes as `Rows` for some outputs."""
  if eqn.primitive.name in _CALLS:
    facts = analyze(jaxprs.called(eqn), given)
    demanded = _demand(facts, outputs)
    return {i for i, x in enumerate(facts.program.invars) if x in demanded}
  return set(row_rules.RULES[eqn.primitive.name].operands(eqn, given) or ())


def evaluate(
  program: Any,
  consts: Sequence[Any],
  inputs: Sequence[Any],
  wanted: Sequence[int],
) -> list[Any]:
  """Evaluates a program, with `Rows` for some of its outputs.

  Args:
    program: A `jax.extend.core.Jaxpr`.
    consts: Its constants.
    inputs: Its inputs, arrays or `Rows`.
    wanted: Positions of the outputs to return as `Rows`. `analyze` must have
      found that they can be.

  Returns:
    The outputs: arrays, and `Rows` at the positions in `wanted`.
  """
  facts = analyze(program, [_known(x) for x in inputs])
  demanded = _demand(facts, wanted)
  values: dict[Any, Any] = dict(
    zip(program.constvars, consts, strict=True)
  ) | dict(zip(program.invars, inputs, strict=True))

  def read(atom: Any, as_rows: bool) -> Any:
    if isinstance(atom, jax_core.Literal):
      return atom.val
    value = values[atom]
    if isinstance(value, Rows) and not as_rows:
      # Some other operation reads the whole array.
      value = value.to_dense()
    return value

  for is_plain, eqns in _groups(program, demanded):
    if is_plain:
      piece = _piece(program, eqns)
      run = jax_core.jaxpr_as_fun(jax_core.ClosedJaxpr(piece, ()))
      outputs = run(*(read(x, False) for x in piece.invars))
      values.update(zip(piece.outvars, outputs, strict=True))
      continue
    (eqn,) = eqns
    given = [facts.of(x) for x in eqn.invars]
    positions = [i for i, x in enumerate(eqn.outvars) if x in demanded]
    operands = _operands(eqn, given, positions)
    args = [read(x, i in operands) for i, x in enumerate(eqn.invars)]
    if eqn.primitive.name in _CALLS:
      inner = jaxprs.called(eqn)
      inner_consts = getattr(inner, "consts", ())
      inner = jaxprs.open_program(inner)
      outputs = evaluate(inner, inner_consts, args, positions)
    else:
      outputs = [row_rules.RULES[eqn.primitive.name].apply(eqn, *args)]
    values.update(zip(eqn.outvars, outputs, strict=True))
  return [read(x, i in wanted) for i, x in enumerate(program.outvars)]


def _known(value: Any) -> str:
  if not isinstance(value, Rows):
    return DENSE
  return ROWS if value.parts else ZEROS


def _groups(
  program: Any, demanded: set[Any]
) -> Iterator[tuple[bool, list[Any]]]:
  """Yields equations that make `Rows`, and runs of those that do not."""
  group: list[Any] = []
  for eqn in program.eqns:
    if any(x in demanded for x in eqn.outvars):
      if group:
        yield True, group
      group = []
      yield False, [eqn]
    else:
      group.append(eqn)
  if group:
    yield True, group


def _piece(program: Any, eqns: list[Any]) -> Any:
  """Returns a program of some of the equations of a program."""
  made = {x for eqn in eqns for x in eqn.outvars}
  read = _variables(x for eqn in eqns for x in eqn.invars)
  inside = {id(eqn) for eqn in eqns}
  later = _variables(
    x for eqn in program.eqns if id(eqn) not in inside for x in eqn.invars
  ) | _variables(program.outvars)
  return jax_core.Jaxpr(
    (),
    [x for x in read if x not in made],
    [x for x in later if x in made],
    eqns,
    program.effects,
    program.debug_info,
  )


def _variables(atoms: Iterable[Any]) -> dict[Any, None]:
  """Returns the variables among atoms, once each and in order."""
  return {x: None for x in atoms if not isinstance(x, jax_core.Literal)}
