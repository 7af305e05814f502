"""Reads the trip counts of loops, and the sources of the values in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import json
import re

from flaxshard.plans import hlo

# Their result is the operand, in another shape, layout, type or place.
_MOVES = frozenset(
  "add-dependency all-gather all-to-all bitcast collective-broadcast "
  "collective-permute convert copy domain dynamic-slice opt-barrier "
  "optimization-barrier pad reduce-precision reshape reverse slice "
  "transpose".split()
)
_CALLS = frozenset("async call custom-call fusion".split())
# Custom calls of the TPU compiler that move values.
_MOVING_CALLS = re.compile(
  '"(AsyncCollectiveDone|ConcatBitcast|Sharding|ZeroCrop)"'
)

Callers = tuple[hlo.Instruction, ...]


def is_call(instruction: hlo.Instruction) -> bool:
  """Returns whether an instruction runs what it calls once."""
  # XLA writes an asynchronous fusion as `fusion-start`.
  return instruction.opcode.removesuffix("-start") in _CALLS


def origin(
  program: hlo.Program, value: hlo.Instruction, callers: Callers
) -> Iterator[hlo.Instruction]:
  """Follows a value back as long as it is only moved or cast.

  Args:
    program: The program.
    value: The instruction that makes it.
    callers: The instructions that call the value's computation, outermost
      first.

  Yields:
    The value, what it is a copy of, and so on. The last one is a parameter of
    the program, or computes the value.
  """
  around = list(callers)
  elements: list[int] = []  # the elements of tuples that are followed
  for _ in range(1000):  # a bound, should a text be odd
    yield value
    opcode = value.opcode
    operands = value.operand_instructions
    following: hlo.Instruction | None = None
    if opcode == "parameter" and around:
      following = _given(value, around.pop())
    elif opcode == "tuple" and elements:
      following = operands[elements.pop()]
    elif opcode == "get-tuple-element":
      elements.append(int(value.attribute(r"index=(\d+)")))
      following = operands[0]
    elif opcode == "while" and elements:
      if _keeps(program, value, elements[-1]):
        following = operands[0]
    elif opcode in _MOVES or _MOVING_CALLS.search(value.attributes):
      following = operands[0]
    elif opcode.endswith(("-start", "-done", "-update")) and operands:
      # A start has the operands and the results in one tuple.
      elements = []
      following = operands[0]
      called = program.computations.get("".join(value.called[:1]))
      if opcode.endswith("-start") and called and called.root:
        following = called.root
        around.append(value)
    elif is_call(value) and value.called:
      around.append(value)
      following = program.computations[value.called[0]].root
    if following is None:
      return
    value = following


def _given(
  parameter: hlo.Instruction, caller: hlo.Instruction
) -> hlo.Instruction | None:
  """Returns what a caller gives as a parameter of a computation."""
  number = int(parameter.literal)
  if caller.opcode == "conditional":
    # The first operand is the condition; each branch has one of the others.
    number = 1 + caller.called.index(parameter.computation.name)
  given = caller.call_operands
  return given[number] if number < len(given) else None


def _keeps(program: hlo.Program, loop: hlo.Instruction, element: int) -> bool:
  """Returns whether each turn of a loop hands on an element unchanged."""
  root = program.computations[loop.called_as("body")].root
  if root is None or root.opcode != "tuple":
    return False
  value = _uncopied(root.operand_instructions[element])
  return (
    value.opcode == "get-tuple-element"
    and int(value.attribute(r"index=(\d+)")) == element
    and value.operand_instructions[0].opcode == "parameter"
  )


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
