"""Reads the trip counts of loops, and which values were cast."""

from __future__ import annotations

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
    if value.opcode == "parameter" and callers:
      value = callers.pop().operands[int(value.literal)]
    elif value.opcode == "tuple" and elements:
      value = value.operands[elements.pop()]
    elif value.opcode == "get-tuple-element":
      elements.append(_index(value))
      value = value.operands[0]
    elif value.opcode in _MOVES:
      value = value.operands[0]
    elif is_call(value) and (called := program.called(value)):
      callers.append(value)
      value = called[0].root
    else:
      return False
  return False


def trip_count(program: hlo.Program, loop: hlo.Instruction) -> int | None:
  """Returns how many turns a `while` runs; None if the program has no count.

  XLA writes the count of a loop with constant bounds into `backend_config`. The
  TPU compiler does not: there the count follows from the counter's first
  value, its step and its bound.
  """
  known = loop.attribute(r'known_trip_count"?[:=]\s*\{"?n"?:"?(\d+)')
  if known:
    return int(known)
  condition, body = program.called(loop)
  compare, compared = _inlined(program, condition.root)
  if "direction=LT" not in compare.attributes:
    return None
  counter, bound = compared
  if counter.opcode != "get-tuple-element":
    return None
  index = _index(counter)
  first, last = _integer(_element(loop.operands[0], index)), _integer(bound)
  add, terms = _inlined(program, _element(body.root, index))
  steps = [x for x in map(_integer, terms) if x is not None]
  if first is None or last is None or add.opcode != "add" or len(steps) != 1:
    return None
  return len(range(first, last, steps[0])) if steps[0] > 0 else None


def _inlined(
  program: hlo.Program, value: hlo.Instruction
) -> tuple[hlo.Instruction, list[hlo.Instruction]]:
  """Returns an operation, which a fusion may hold alone, and its operands."""
  value = _uncopied(value)
  operands = value.operands
  if value.opcode == "fusion":
    given = operands
    value = program.called(value)[0].root
    # What the fusion is given takes the place of its parameters.
    operands = [
      given[int(x.literal)] if x.opcode == "parameter" else x
      for x in map(_uncopied, value.operands)
    ]
  return value, list(map(_uncopied, operands))


def _index(value: hlo.Instruction) -> int:
  """Returns the number of the element that a `get-tuple-element` reads."""
  return int(value.attribute(r"index=(\d+)"))


def _element(value: hlo.Instruction, index: int) -> hlo.Instruction:
  """Returns what makes an element of a tuple; else the value itself."""
  return value.operands[index] if value.opcode == "tuple" else value


def _uncopied(value: hlo.Instruction) -> hlo.Instruction:
  while value.opcode in ("bitcast", "convert", "copy"):
    value = value.operands[0]
  return value


def _integer(value: hlo.Instruction) -> int | None:
  """Returns the value of a constant; None if it is no integer."""
  value = _uncopied(value)
  is_integer = re.fullmatch(r"-?\d+", value.literal)
  return (
    int(value.literal) if value.opcode == "constant" and is_integer else None
  )
