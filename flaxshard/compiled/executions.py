"""How often each computation of a program runs."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import json
import re

from flaxshard.compiled import hlo


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
  if opcode in ("call", "fusion", "async-start", "custom-call"):
    inner = CallSite(site.executions, site.branches, site.known, callers)
    return [(name, inner) for name in instruction.called]
  return []


def trip_count(program: hlo.Program, loop: hlo.Instruction) -> int | None:
  """Returns how many turns a `while` runs; None if the program has no count.

  XLA writes the count of a loop with constant bounds into `backend_config`, or
  leaves a condition `i < constant` of a counter that starts at zero.
  """
  match = re.search(r'"?known_trip_count"?[:=]\s*(\{[^}]*\})', loop.attributes)
  if match:
    return int(json.loads(match[1])["n"])
  condition = program.computations.get(loop.called_as("condition"))
  if condition is None or condition.root is None:
    return None
  return _bound(program, condition)


def _bound(program: hlo.Program, condition: hlo.Computation) -> int | None:
  root = condition.root
  if root is None:
    return None
  constants = [
    int(i.literal)
    for i in condition.instructions.values()
    if i.opcode == "constant" and re.fullmatch(r"-?\d+", i.literal)
  ]
  if root.opcode == "fusion":
    called = program.computations[root.called[0]]
    compare = called.root
  else:
    compare = root
  if compare is None or compare.opcode != "compare" or len(constants) != 1:
    return None
  is_less = "direction=LT" in compare.attributes
  return constants[0] if is_less else None
