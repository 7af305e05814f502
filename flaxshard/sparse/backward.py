"""Evaluates a backward pass with the gradients of tables as rows.

First `analyze` finds the variables of a program that can be `Rows`. Then
`evaluate` runs the program: equations that make a wanted output follow the
rules of `row_rules`, and all others are evaluated as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
from typing import Any

import jax
from jax.extend import core as jax_core

from flaxshard.core import programs
from flaxshard.core import tracing
from flaxshard.sparse import row_rules
from flaxshard.sparse.row_rules import DENSE
from flaxshard.sparse.row_rules import ROWS
from flaxshard.sparse.row_rules import Rows
from flaxshard.sparse.row_rules import ZEROS

_REMATS = frozenset("remat remat2 checkpoint".split())


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
  program = programs.open_program(program)
  facts = Facts(program, dict(zip(program.invars, inputs, strict=True)), {})
  for eqn in program.eqns:
    given = [facts.of(x) for x in eqn.invars]
    found, reasons = _analyze_equation(eqn, given)
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


def _analyze_equation(
  eqn: Any, given: list[str]
) -> tuple[list[str], list[Any]]:
  """Returns what is known of the outputs of an equation, and why if dense."""
  name, count = eqn.primitive.name, len(eqn.outvars)
  dense: tuple[list[str], list[Any]] = [DENSE] * count, [None] * count
  if name in tracing.CALLS:
    inner = analyze(programs.called(eqn), given)
    return inner.outputs(), [inner.reason(x) for x in inner.program.outvars]
  if name == "cond":
    branches = [analyze(b, given[1:]) for b in eqn.params["branches"]]
    known, reasons = [], []
    for i in range(count):
      outputs = [b.outputs()[i] for b in branches]
      known.append(_merge(outputs))
      at = outputs.index(DENSE) if DENSE in outputs else 0
      reasons.append(branches[at].reason(branches[at].program.outvars[i]))
    return known, reasons
  if name == "scan":
    return _analyze_scan(eqn, given)
  rule = row_rules.RULES.get(name)
  operands = None if rule is None else rule.operands(eqn, given)
  if operands is None:
    return dense
  # These two add rows to zeros. `pad` may take an array.
  is_zeros = name not in ("scatter-add", "dynamic_update_slice") and all(
    given[i] == ZEROS for i in operands
  )
  if name == "pad":
    is_zeros = given[0] == ZEROS
  return [ZEROS if is_zeros else ROWS] * count, [None] * count


def _merge(found: Sequence[str]) -> str:
  if DENSE in found:
    return DENSE
  return ROWS if ROWS in found else ZEROS


def _analyze_scan(eqn: Any, given: list[str]) -> tuple[list[str], list[Any]]:
  """Finds the carried arrays to which a loop adds rows, and nothing else."""
  body = programs.open_program(eqn.params["jaxpr"])
  consts, carry, xs = tracing.split_scan(eqn.params, given)
  start = len(consts)
  count = len(eqn.outvars)
  known, reasons = [DENSE] * count, [None] * count
  sums = [
    x if x != DENSE and _adds_to(body, start + i, i) else DENSE
    for i, x in enumerate(carry)
  ]
  # In the body such a sum starts from zeros at each turn.
  started = [DENSE if x == DENSE else ZEROS for x in sums]
  inner = analyze(body, [DENSE] * len(consts) + started + [DENSE] * len(xs))
  for i, (x, out) in enumerate(zip(sums, inner.outputs(), strict=False)):
    if x != DENSE:
      known[i] = _merge([x, out])
      reasons[i] = inner.reason(body.outvars[i])
  return known, reasons


def _adds_to(program: Any, position: int, output: int) -> bool:
  """Returns whether a program only adds to an input, for one of its outputs.

  Args:
    program: A `jax.extend.core.Jaxpr`.
    position: The position of the input.
    output: The position of the output.
  """
  var = program.invars[position]
  while True:
    readers = [
      (eqn, i)
      for eqn in program.eqns
      for i, x in enumerate(eqn.invars)
      if x is var
    ]
    ends = [i for i, x in enumerate(program.outvars) if x is var]
    if len(readers) + len(ends) != 1:
      return False
    if ends:
      return ends == [output]
    ((eqn, i),) = readers
    name = eqn.primitive.name
    if name in ("add", "add_any", "copy", "copy_p"):
      var = eqn.outvars[0]
    elif name in tracing.CALLS:
      inner = programs.open_program(programs.called(eqn))
      outputs = [o for o in range(len(eqn.outvars)) if _adds_to(inner, i, o)]
      if not outputs:
        return False
      var = eqn.outvars[outputs[0]]
    elif name == "scan":
      consts, carry, _ = tracing.split_scan(
        eqn.params, list(range(len(eqn.invars)))
      )
      inner = programs.open_program(eqn.params["jaxpr"])
      if i not in carry or not _adds_to(inner, i, i - len(consts)):
        return False
      var = eqn.outvars[i - len(consts)]
    else:
      return False


def demand(facts: Facts, wanted: Iterable[int]) -> set[Any]:
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
  name = eqn.primitive.name
  if name == "scan":
    consts, _, _ = tracing.split_scan(eqn.params, given)
    return {len(consts) + i for i in outputs}
  if name == "cond":
    return {
      1 + i
      for branch in eqn.params["branches"]
      for i in _demanded_inputs(branch, given[1:], outputs)
    }
  if name in tracing.CALLS:
    return _demanded_inputs(programs.called(eqn), given, outputs)
  return set(row_rules.RULES[name].operands(eqn, given) or ())


def _demanded_inputs(
  program: Any, given: list[str], outputs: list[int]
) -> set[int]:
  facts = analyze(program, given)
  demanded = demand(facts, outputs)
  return {i for i, x in enumerate(facts.program.invars) if x in demanded}


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
  known = [_known(x) for x in inputs]
  facts = analyze(program, known)
  demanded = demand(facts, wanted)
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
    outputs = _evaluate_equation(eqn, args, positions)
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


def _evaluate_equation(
  eqn: Any, args: list[Any], positions: list[int]
) -> list[Any]:
  """Returns the outputs of an equation, `Rows` at the positions."""
  name = eqn.primitive.name
  if name == "scan":
    return _scan(eqn, args, positions)
  if name == "cond":
    return _cond(eqn, args, positions)
  if name in tracing.CALLS:
    run = _function(programs.called(eqn), positions)
    return _remat(eqn, run, args) if name in _REMATS else run(*args)
  output = row_rules.RULES[name].apply(eqn, *args)
  return [output] if isinstance(output, Rows) else output


def _function(program: Any, wanted: list[int]) -> Callable[..., list[Any]]:
  """Returns a function that evaluates a program."""
  consts = getattr(program, "consts", ())
  program = programs.open_program(program)
  return lambda *args: evaluate(program, consts, args, wanted)


def _remat(eqn: Any, run: Callable[..., Any], args: list[Any]) -> list[Any]:
  """Evaluates an equation of `jax.checkpoint` as such an equation."""
  leaves, treedef = jax.tree.flatten(args)

  def flat(*leaves: Any) -> Any:
    return run(*jax.tree.unflatten(treedef, leaves))

  closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
  program = closed.jaxpr
  # The equation has no place for constants: they become inputs.
  program = jax_core.Jaxpr(
    (),
    [*program.constvars, *program.invars],
    program.outvars,
    program.eqns,
    program.effects,
    program.debug_info,
  )
  outputs = eqn.primitive.bind(
    *closed.consts, *leaves, **{**eqn.params, "jaxpr": program}
  )
  return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def _cond(eqn: Any, args: list[Any], positions: list[int]) -> list[Any]:
  """Pads the rows of each branch to the number of rows of the largest one."""
  index, *operands = args
  branches = [_function(b, positions) for b in eqn.params["branches"]]
  results = [jax.eval_shape(branch, *operands) for branch in branches]
  counts = {i: max(r[i].num_rows() for r in results) for i in positions}

  def padded(branch: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def run(*operands: Any) -> list[Any]:
      outputs = branch(*operands)
      for i, count in counts.items():
        x = outputs[i]
        if not count:
          outputs[i] = dataclasses.replace(x, parts=())
          continue
        part = row_rules.padding_part(count - x.num_rows(), x.shape, x.dtype)
        rows = dataclasses.replace(x, parts=(*x.parts, part))
        outputs[i] = dataclasses.replace(x, parts=(rows.joined(),))
      return outputs

    return run

  return jax.lax.switch(index, [padded(b) for b in branches], *operands)


def _scan(eqn: Any, args: list[Any], positions: list[int]) -> list[Any]:
  """Collects the rows that a loop adds to an array at each turn."""
  params = eqn.params
  consts, carry, xs = tracing.split_scan(params, args)
  run = _function(params["jaxpr"], positions)
  others = [i for i in range(len(carry)) if i not in positions]
  shapes = [tuple(x.aval.shape) for x in eqn.outvars]
  dtypes = [x.aval.dtype for x in eqn.outvars]

  def turn(plain: list[Any], xs: list[Any]) -> Any:
    given = [Rows((), s, d) for s, d in zip(shapes, dtypes, strict=True)]
    given = given[: len(carry)]
    for i, x in zip(others, plain, strict=True):
      given[i] = x
    outputs = run(*consts, *given, *xs)
    added = [outputs[i].joined() for i in positions]
    return [outputs[i] for i in others], (outputs[len(carry) :], added)

  plain, (ys, added) = jax.lax.scan(
    turn,
    [carry[i] for i in others],
    xs,
    length=params["length"],
    reverse=params["reverse"],
    unroll=params["unroll"],
  )
  outputs = [None] * len(carry) + ys
  for i, x in zip(others, plain, strict=True):
    outputs[i] = x
  for i, part in zip(positions, added, strict=True):
    parts = carry[i].parts
    if part[0].size:
      # The rows of all turns.
      parts += (tuple(x.reshape(-1, *x.shape[2:]) for x in part),)
    outputs[i] = dataclasses.replace(carry[i], parts=parts)
  return outputs
