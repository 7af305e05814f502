"""Follows the values of a program to their sources and readers."""

from __future__ import annotations

from flaxshard.compiled import hlo
from flaxshard.compiled.values import Edge
from flaxshard.compiled.values import MOVES
from flaxshard.compiled.values import Values

# Their results differ from turn to turn, or may.
_IMPURE = ("custom-call", "infeed", "recv", "rng", "rng-bit-generator")


def operands(values: Values, instruction: hlo.Instruction) -> list[int]:
  """Returns the values that an instruction reads."""
  return [
    value
    for operand in instruction.operand_instructions
    for value in values.of(operand)
  ]


def argument(values: Values, value: int) -> int | None:
  """Returns the parameter of the program that a value is, or is a part of.

  Casts, copies, slices and moves between devices are looked through.

  Returns:
    The parameter's number; None if the value is computed, or made of several.
  """
  found = set()
  stack, seen = [value], {value}
  while stack:
    one = stack.pop()
    moved = [s for s, edge in values.backward[one] if edge in MOVES]
    if not moved:
      found.add(one)
    stack.extend(s for s in moved if s not in seen)
    seen.update(moved)
  owners = {values.owner[one] for one in found}
  if len(owners) != 1:
    return None
  [owner] = owners
  is_argument = owner.opcode == "parameter"
  if not is_argument or owner.computation is not values.program.entry:
    return None
  return int(owner.literal)


def readers(
  values: Values, start: list[int], stop: tuple[str, ...]
) -> list[int]:
  """Returns what is computed from values, behind the moves of these.

  Args:
    values: The values of the program.
    start: Some of them.
    stop: Opcodes of moves that count as readers. The program's result is one
      too.
  """
  found = []
  root = values.program.entry.root
  stack, seen = list(start), set(start)
  while stack:
    for target, edge in values.forward[stack.pop()]:
      if target in seen:
        continue
      seen.add(target)
      owner = values.owner[target]
      if edge in MOVES and owner is not root and owner.opcode not in stop:
        stack.append(target)
      else:
        found.append(target)
  return found


def depends_on(values: Values, start: list[int], opcode: str) -> bool:
  """Returns whether an instruction of this opcode goes into values."""
  stack, seen = list(start), set(start)
  while stack:
    one = stack.pop()
    if values.owner[one].opcode == opcode:
      return True
    sources = {source for source, _ in values.backward[one]} - seen
    stack.extend(sources)
    seen |= sources
  return False


def is_invariant(values: Values, value: int, loop: hlo.Instruction) -> bool:
  """Returns whether a value in a loop is the same in each turn."""
  carried = dict(_carried(values, loop))
  stack, seen = [value], {value}
  while stack:
    one = stack.pop()
    if one in carried:
      if not _is_unchanged(values, one, carried[one]):
        return False
      continue
    sources = {source for source, _ in values.backward[one]}
    is_moved = any(edge in MOVES for _, edge in values.backward[one])
    if values.owner[one].opcode in _IMPURE and not is_moved:
      return False
    stack.extend(sources - seen)
    seen |= sources
  return True


def sums_over_turns(
  values: Values, loop: hlo.Instruction
) -> list[tuple[int, list[int]]]:
  """Returns the sums that a loop adds up, and does not read itself.

  An average over the turns, which scales the sum so far, is none.

  Returns:
    For each sum: its value after a turn, and the terms that a turn adds.
  """
  found = []
  for before, after in _carried(values, loop):
    copies = [target for target, _ in values.forward[before]]
    if len(copies) != 1 or len(values.forward[copies[0]]) != 1:
      continue
    terms = _terms(values, after, copies[0], loop)
    if terms.pop(copies[0], None) is False and terms:
      found.append((after, list(terms)))
  return found


def _carried(values: Values, loop: hlo.Instruction) -> list[tuple[int, int]]:
  """Returns what a turn of a loop starts from, and what it hands on."""
  body = values.program.computations[loop.called_as("body")]
  if body.root is None:
    return []
  [parameter] = body.parameters
  return list(zip(values.of(parameter), values.of(body.root), strict=True))


def _is_unchanged(values: Values, before: int, after: int) -> bool:
  for _ in range(len(values.owner)):
    if after == before or values.owner[after].opcode == "parameter":
      break
    is_copy = values.owner[after].opcode in ("bitcast", "copy")
    sources = [
      source
      for source, edge in values.backward[after]
      if edge == Edge.SAME or is_copy
    ]
    if len(sources) != 1:
      break
    [after] = sources
  return after == before


def _terms(
  values: Values, total: int, before: int, loop: hlo.Instruction
) -> dict[int, bool]:
  """Returns the terms of a sum, and whether each is multiplied.

  Args:
    values: The values of the program.
    total: The sum.
    before: The sum so far: a term that is not looked into.
    loop: The loop. What is the same in each turn may multiply a term.
  """
  stack, terms = [(total, False)], {}
  seen = {total}
  while stack:
    one, is_scaled = stack.pop()
    edges = values.backward[one]
    owner = values.owner[one]
    moved = [source for source, edge in edges if edge in MOVES]
    data = [source for source, edge in edges if edge == Edge.ELEMENTWISE]
    following: list[int] = []
    if one == before:
      pass
    elif owner.opcode in ("add", "subtract", "negate", "select"):
      following = data  # a select puts zeros in the first turn
    elif len(moved) == 1:
      following = moved
    elif owner.opcode in ("multiply", "divide"):
      factors = operands(values, owner)
      varying = [x for x in factors if not is_invariant(values, x, loop)]
      if len(varying) == 1 and (
        owner.opcode != "divide" or varying == factors[:1]
      ):
        following, is_scaled = varying, True
    if not following:
      terms[one] = is_scaled
    stack.extend((x, is_scaled) for x in following if x not in seen)
    seen.update(following)
  return terms
