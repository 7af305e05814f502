"""Follows values through a compiled program, into fusions and loops."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools

from flaxshard.compiled import executions
from flaxshard.compiled import hlo

# Instructions whose result is their first operand, in another place, layout or
# precision, or a part of it.
_MOVES = frozenset(
  "bitcast bitcast-convert convert copy copy-done copy-start dynamic-slice "
  "optimization-barrier reshape slice transpose".split()
)
_TRANSFERS = frozenset(
  f"{kind}{end}"
  for kind in ("all-gather", "all-to-all", "collective-permute")
  for end in ("", "-start", "-done")
)
# Calls that run their computation once, with the operands as its parameters.
_CALLS = frozenset(
  ("fusion", "call", "async-start", "call-start", "fusion-start")
)
# What hands the result of an asynchronous call on.
_CALL_ENDS = frozenset(
  f"{kind}-{end}"
  for kind in ("async", "call", "fusion")
  for end in ("update", "done")
)


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
  """The result of an instruction, at one place of the program.

  Attributes:
    instruction: The instruction.
    callers: The instructions through which its computation is reached,
      outermost first.
  """

  instruction: hlo.Instruction
  callers: tuple[hlo.Instruction, ...] = ()

  @property
  def key(self) -> tuple[str, ...]:
    """What identifies the value in its program."""
    return (*(i.name for i in self.callers), self.instruction.name)

  @property
  def operands(self) -> list[Value]:
    """The values of the operands."""
    return [
      Value(i, self.callers) for i in self.instruction.operand_instructions
    ]


def resolve(program: hlo.Program, value: Value) -> Value:
  """Returns the value itself, where the given one only hands it on.

  Parameters of fusions and calls become the caller's operands, fusions their
  roots, and elements of tuples the elements. What a loop does not change is
  what it was before the loop. A result of a loop, and what a loop changes, stay
  as they are.
  """
  for _ in range(10_000):  # a bound, should a text be malformed
    following = _resolve_once(program, value)
    if following is None:
      return value
    value = following
  return value


def origin(
  program: hlo.Program, value: Value, through_transfers: bool = True
) -> Value:
  """Returns where a value comes from, before casts, copies and slices.

  Args:
    program: The program.
    value: The value.
    through_transfers: Whether to follow gathers and permutations between
      devices.
  """
  for _ in range(10_000):
    value = resolve(program, value)
    opcode = value.instruction.opcode
    is_move = opcode in _MOVES or (through_transfers and opcode in _TRANSFERS)
    # A custom call with one operand marks or moves it.
    is_mark = opcode == "custom-call" and len(value.instruction.operands) == 1
    if not (is_move or is_mark) or not value.operands:
      return value
    value = value.operands[0]
  return value


def is_move(instruction: hlo.Instruction) -> bool:
  """Returns whether an instruction only casts, copies or cuts its operand."""
  return instruction.opcode in _MOVES


def argument(program: hlo.Program, value: Value) -> int | None:
  """Returns the number of the program's parameter that a value comes from."""
  start = origin(program, value)
  if start.callers or start.instruction.opcode != "parameter":
    return None
  return int(start.instruction.literal)


def users(program: hlo.Program, value: Value) -> Iterator[Value]:
  """Yields the values that are computed from a value, inside of fusions too.

  Parameters of fusions and calls are followed; a result that leaves its fusion
  is used where the fusion is used.
  """
  instruction, callers = value.instruction, value.callers
  for user in instruction.computation.instructions.values():
    if instruction.name not in user.operands:
      continue
    # The update of an asynchronous call may give it its operands.
    is_update = user.opcode.endswith("-update")
    call = user.operand_instructions[0] if is_update else user
    if user.opcode in _CALL_ENDS and user.operands[0] == instruction.name:
      yield from users(program, Value(user, callers))
    elif call.opcode in _CALLS and call.called:
      called = program.computations[call.called[0]]
      for number, operand in enumerate(call.call_operands):
        if operand is instruction:
          inner = Value(called.parameters[number], (*callers, call))
          yield from users(program, inner)
    else:
      yield Value(user, callers)
  if instruction.is_root and callers and callers[-1].opcode in _CALLS:
    yield from users(program, Value(callers[-1], callers[:-1]))


def depends_on(program: hlo.Program, value: Value, opcode: str) -> bool:
  """Returns whether an instruction of this opcode goes into a value."""
  stack, seen = [resolve(program, value)], set()
  while stack:
    one = stack.pop()
    if one.key in seen:
      continue
    seen.add(one.key)
    if one.instruction.opcode == opcode:
      return True
    stack.extend(resolve(program, x) for x in one.operands)
  return False


def is_invariant(program: hlo.Program, value: Value, loop: int) -> bool:
  """Returns whether a value is the same in each turn of a loop.

  Args:
    program: The program.
    value: A value in the loop.
    loop: The loop's position in the value's `callers`.
  """
  stack, seen = [resolve(program, value)], set()
  while stack:
    one = stack.pop()
    if one.key in seen:
      continue
    seen.add(one.key)
    # Computed before the loop.
    if len(one.callers) <= loop:
      continue
    opcode = one.instruction.opcode
    if opcode in ("parameter", "rng", "rng-bit-generator", "custom-call"):
      return False
    if opcode == "get-tuple-element":
      # Of a parameter that the loop changes; or of an instruction in the loop.
      if one.operands[0].instruction.opcode == "parameter":
        return False
    stack.extend(resolve(program, x) for x in one.operands)
  return True


@functools.lru_cache(maxsize=64)
def carried(
  program: hlo.Program, loop: hlo.Instruction
) -> list[tuple[hlo.Instruction, list[hlo.Instruction]]]:
  """Returns what a loop hands on from turn to turn.

  Args:
    program: The program.
    loop: A `while` whose body returns a tuple.

  Returns:
    For each element: the instruction that makes its next value, and those that
    read its current value.
  """
  body = program.computations[loop.called_as("body")]
  root = body.root
  if root is None or root.opcode != "tuple":
    return []
  [parameter] = body.parameters
  readers: dict[int, list[hlo.Instruction]] = {}
  for instruction in body.instructions.values():
    if instruction.opcode == "get-tuple-element" and instruction.operands == (
      parameter.name,
    ):
      readers.setdefault(_index(instruction), []).append(instruction)
  return [
    (body.instructions[name], readers.get(i, []))
    for i, name in enumerate(root.operands)
  ]


def _resolve_once(program: hlo.Program, value: Value) -> Value | None:
  instruction, callers = value.instruction, value.callers
  opcode = instruction.opcode
  if opcode == "parameter" and callers:
    return _operand_of_caller(value, int(instruction.literal))
  if opcode in _CALLS and instruction.called:
    root = program.computations[instruction.called[0]].root
    return None if root is None else Value(root, (*callers, instruction))
  if opcode in _CALL_ENDS:
    return value.operands[0]
  if opcode == "get-tuple-element" and value.operands:
    return _element(program, value.operands[0], _index(instruction))
  return None


def _operand_of_caller(value: Value, number: int) -> Value | None:
  *outer, caller = value.callers
  if caller.opcode in _CALLS:
    return Value(caller.call_operands[number], tuple(outer))
  if caller.opcode == "conditional":
    branch = caller.called.index(value.instruction.computation.name)
    return Value(caller.operand_instructions[1 + branch], tuple(outer))
  return None


def _element(program: hlo.Program, tuple_: Value, index: int) -> Value | None:
  tuple_ = resolve(program, tuple_)
  instruction, callers = tuple_.instruction, tuple_.callers
  if instruction.opcode == "tuple":
    return tuple_.operands[index]
  if instruction.opcode == "parameter" and callers:
    loop = callers[-1]
    if loop.opcode == "while" and _is_unchanged(program, loop, index):
      return _initial(program, Value(loop, callers[:-1]), index)
  if instruction.opcode == "while" and _is_unchanged(
    program, instruction, index
  ):
    return _initial(program, tuple_, index)
  return None


def _initial(program: hlo.Program, loop: Value, index: int) -> Value | None:
  """Returns an element of what a loop starts from."""
  return _element(program, loop.operands[0], index)


def _is_unchanged(
  program: hlo.Program, loop: hlo.Instruction, index: int
) -> bool:
  elements = carried(program, loop)
  if index >= len(elements):
    return False
  result, readers = elements[index]
  while result.opcode in ("copy", "bitcast") and result.operand_instructions:
    result = result.operand_instructions[0]
  return result in readers


def _index(instruction: hlo.Instruction) -> int:
  return int(instruction.attribute(r"index=(\d+)") or 0)


def enclosing_loop(site: executions.CallSite) -> int | None:
  """Returns the position of the innermost loop in a site's callers."""
  for position in reversed(range(len(site.callers))):
    if site.callers[position].opcode == "while":
      return position
  return None
