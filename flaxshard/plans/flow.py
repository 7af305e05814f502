"""Reads the trip counts of loops, and which values were cast."""

from __future__ import annotations

from collections.abc import Sequence
import json
import re

from flaxshard.plans import hlo

# Their result is the operand, in another shape, layout, type or place.
_MOVES = frozenset(
  "bitcast convert copy dynamic-slice opt-barrier optimization-barrier pad "
  "reduce-precision reshape reverse slice transpose".split()
)
_CALLS = frozenset("async call custom-call fusion".split())


def is_call(instruction: hlo.Instruction) -> bool:
  """Returns whether an instruction runs what it calls once."""
  # XLA writes an asynchronous fusion as `fusion-start`.
  return instruction.opcode.removesuffix("-start") in _CALLS


def is_widened(
  program: hlo.Program, value: hlo.Instruction, caller: hlo.Instruction | None
) -> bool:
  """Returns whether a value is float32 that was cast from bfloat16.

  Args:
    program: The program.
    value: The instruction that makes it. After the cast it may be moved.
    caller: The instruction that calls the value's computation.
  """
  if [array.dtype for array in value.arrays] != ["f32"]:
    return False
  callers = [caller] if caller and is_call(caller) else []
  elements: list[int] = []  # the elements of tuples that are followed
  for _ in range(1000):  # a bound, should a text be odd
    if [array.dtype for array in value.arrays] == ["bf16"]:
      return True
    operands = value.operand_instructions
    following: hlo.Instruction | None = None
    if value.opcode == "parameter" and callers:
      given = callers.pop().operand_instructions
      number = int(value.literal)
      following = given[number] if number < len(given) else None
    elif value.opcode == "tuple" and elements:
      following = operands[elements.pop()]
    elif value.opcode == "get-tuple-element":
      elements.append(int(value.attribute(r"index=(\d+)")))
      following = operands[0]
    elif value.opcode in _MOVES:
      following = operands[0]
    elif is_call(value) and value.called:
      callers.append(value)
      following = program.computations[value.called[0]].root
    if following is None:
      return False
    value = following
  return False


def trip_count(program: hlo.Program, loop: hlo.Instruction) -> int | None:
  """Returns how many turns a `while` runs; None if the program has no count.

  XLA writes the count of a loop with constant bounds into `backend_config`. The
  TPU compiler does not: there the count follows from the counter's first
  value, its step and its bound.
  """
  match = re.search(r'"?known_trip_count"?[:=]\s*(\{[^}]*\})', loop.attributes)
  if match:
    return int(json.loads(match[1])["n"])
  condition = program.computations.get(loop.called_as("condition"))
  body = program.computations.get(loop.called_as("body"))
  if condition is None or body is None:
    return None
  compare, (counter, bound) = _inlined(program, condition.root, 2)
  if compare is None or "direction=LT" not in compare.attributes:
    return None
  last = _integer(bound)
  if counter is None or counter.opcode != "get-tuple-element" or last is None:
    return None
  index = int(counter.attribute(r"index=(\d+)"))
  first = _integer(_element(loop.operand_instructions[0], index))
  add, terms = _inlined(program, _element(body.root, index), 2)
  steps = [i for i in map(_integer, terms) if i is not None]
  if first is None or add is None or add.opcode != "add" or len(steps) != 1:
    return None
  return max(0, -(-(last - first) // steps[0])) if steps[0] > 0 else None


def _inlined(
  program: hlo.Program, value: hlo.Instruction | None, count: int
) -> tuple[hlo.Instruction | None, Sequence[hlo.Instruction | None]]:
  """Returns an operation, which a fusion may hold alone, and its operands."""
  nothing = [None] * count
  value = None if value is None else _uncopied(value)
  if value is None:
    return None, nothing
  operands = value.operand_instructions
  if value.opcode == "fusion":
    given = operands
    value = program.computations[value.called[0]].root
    if value is None:
      return None, nothing
    # What the fusion is given takes the place of its parameters.
    operands = [
      given[int(i.literal)] if i.opcode == "parameter" else i
      for i in map(_uncopied, value.operand_instructions)
    ]
  if len(operands) != count:
    return None, nothing
  return value, [_uncopied(i) for i in operands]


def _element(
  value: hlo.Instruction | None, index: int
) -> hlo.Instruction | None:
  if value is None or value.opcode != "tuple":
    return None
  return value.operand_instructions[index]


def _uncopied(value: hlo.Instruction) -> hlo.Instruction:
  while value.opcode in ("bitcast", "convert", "copy"):
    value = value.operand_instructions[0]
  return value


def _integer(value: hlo.Instruction | None) -> int | None:
  """Returns the value of a constant; None if it is no integer."""
  value = None if value is None else _uncopied(value)
  if value is None or value.opcode != "constant":
    return None
  is_integer = re.fullmatch(r"-?\d+", value.literal)
  return int(value.literal) if is_integer else None
