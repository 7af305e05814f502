"""Counts how often each computation of a program runs."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import json
import re

from flaxshard.compiled import hlo
from flaxshard.core import tracing


@dataclasses.dataclass(frozen=True)
class CallSite:
  """The instructions through which a computation is reached.

  Attributes:
    executions: Runs per call of the program: product of the trip counts.
    branches: The branches of conditionals around it, as pairs of the
      conditional's name and the branch's number, outermost first.
    known: False if a loop around it has a trip count that the program does not
      state; such a loop counts as one turn.
    callers: Instructions that call it, outermost first.
  """

  executions: float = 1.0
  branches: tuple[tuple[str, int], ...] = ()
  known: bool = True
  callers: tuple[hlo.Instruction, ...] = ()


def walk(
  program: hlo.Program,
) -> Iterator[tuple[hlo.Instruction, CallSite]]:
  """Yields the instructions that a program runs, with how often it runs them.

  Loops, branches, calls, fusions and asynchronous computations are entered.
  Computations that an instruction applies to elements (`to_apply` of a
  reduction) are not.
  """
  stack = [(program.entry, CallSite())]
  while stack:
    computation, site = stack.pop()
    for instruction in computation.instructions.values():
      yield instruction, site
      stack.extend(
        (program.computations[name], inner)
        for name, inner in _calls(program, instruction, site)
        if name in program.computations
      )


def find_commits(program: hlo.Program) -> set[str]:
  """Returns the conditionals of AGN, which commits once in a period.

  Without AGN they are those of Accumulate, which updates once in a period.
  Those around it and in it, such as LossScale's, are not among them.
  """
  conditionals = [
    i
    for computation in program.computations.values()
    for i in computation.instructions.values()
    if i.opcode == "conditional"
  ]
  for scope in (tracing.COMMIT_SCOPE, tracing.UPDATE_SCOPE):
    found = {
      i.name for i in conditionals if i.op_name.endswith(f"/{scope}/cond")
    }
    if found:
      return found
  return set()


def _calls(
  program: hlo.Program, instruction: hlo.Instruction, site: CallSite
) -> list[tuple[str, CallSite]]:
  opcode = instruction.opcode
  callers = (*site.callers, instruction)
  if opcode == "while":
    count = trip_count(program, instruction)
    known = site.known and count is not None
    turns = site.executions * (1 if count is None else count)
    inner = CallSite(turns, site.branches, known, callers)
    return [
      (instruction.called_as("body"), inner),
      (instruction.called_as("condition"), inner),
    ]
  if opcode == "conditional":
    return [
      (
        name,
        CallSite(
          site.executions,
          (*site.branches, (instruction.name, number)),
          site.known,
          callers,
        ),
      )
      for number, name in enumerate(instruction.called)
    ]
  # XLA writes an asynchronous fusion as `fusion-start`.
  if opcode.removesuffix("-start") in (
    "async",
    "call",
    "custom-call",
    "fusion",
  ):
    inner = CallSite(site.executions, site.branches, site.known, callers)
    return [(name, inner) for name in instruction.called]
  return []


def trip_count(program: hlo.Program, loop: hlo.Instruction) -> int | None:
  """Returns how many turns a `while` runs; None if the program has no count.

  XLA writes the count of a loop with constant bounds into `backend_config`. The
  TPU compiler does not: there the count follows from the counter's first
  value, its step and its bound.
  """
  match = re.search(r'"?known_trip_count"?[:=]\s*(\{[^}]*\})', loop.attributes)
  if match:
    return int(json.loads(match[1])["n"])
  counter = _counter_and_bound(program, loop)
  if counter is None:
    return None
  index, bound = counter
  start = _initial_value(loop, index)
  step = _step(program, loop, index)
  if start is None or not step or step < 0:
    return None
  return max(0, -(-(bound - start) // step))


def _counter_and_bound(
  program: hlo.Program, loop: hlo.Instruction
) -> tuple[int, int] | None:
  """Returns the counter's place in the loop's state, and its bound.

  None unless the condition is `counter < constant`.
  """
  condition = program.computations.get(loop.called_as("condition"))
  root = condition.root if condition is not None else None
  if root is None:
    return None
  compare, given = root, root.operand_instructions
  if root.opcode == "fusion":
    called = program.computations[root.called[0]]
    if called.root is None:
      return None
    compare = called.root
    # What the fusion is given takes the place of its parameters.
    given = [
      given[int(i.literal)] if i.opcode == "parameter" else i
      for i in compare.operand_instructions
    ]
  if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
    return None
  counter = _unwrap(given[0])
  bound = _integer(_unwrap(given[1]))
  if counter.opcode != "get-tuple-element" or bound is None:
    return None
  return int(counter.attribute(r"index=(\d+)")), bound


def _initial_value(loop: hlo.Instruction, index: int) -> int | None:
  state = loop.operand_instructions[0]
  if state.opcode != "tuple":
    return None
  return _integer(_unwrap(state.operand_instructions[index]))


def _step(
  program: hlo.Program, loop: hlo.Instruction, index: int
) -> int | None:
  body = program.computations[loop.called_as("body")]
  if body.root is None or body.root.opcode != "tuple":
    return None
  add = _unwrap(body.root.operand_instructions[index])
  given = add.operand_instructions
  if add.opcode == "fusion":
    root = program.computations[add.called[0]].root
    if root is None:
      return None
    add, given = root, [*root.operand_instructions, *given]
  constants = [i for i in given if i.opcode == "constant"]
  if add.opcode != "add" or len(constants) != 1:
    return None
  return _integer(constants[0])


def _integer(instruction: hlo.Instruction) -> int | None:
  """Returns the value of a constant; None if it is no integer."""
  if instruction.opcode != "constant":
    return None
  is_integer = re.fullmatch(r"-?\d+", instruction.literal)
  return int(instruction.literal) if is_integer else None


def _unwrap(instruction: hlo.Instruction) -> hlo.Instruction:
  """Returns what an instruction copies."""
  while instruction.opcode in ("bitcast", "convert", "copy"):
    instruction = instruction.operand_instructions[0]
  return instruction
