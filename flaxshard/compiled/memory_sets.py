"""Values of a program that share memory."""

from __future__ import annotations

import json
import re

from flaxshard.compiled import hlo
from flaxshard.compiled import shapes
from flaxshard.compiled import values as values_lib

# Where the TPU compiler writes which operands' memory a result reuses.
ALIASING = '"aliasing_operands":'


class DisjointSets:
  """Sets of numbers that are joined (union-find)."""

  def __init__(self, count: int) -> None:
    self._parent = list(range(count))

  def find(self, number: int) -> int:
    """Returns the number that stands for the set of a number."""
    parent = self._parent
    while parent[number] != number:
      parent[number] = parent[parent[number]]
      number = parent[number]
    return number

  def join(self, first: int, second: int) -> None:
    """Makes one set of the sets of two numbers."""
    self._parent[self.find(first)] = self.find(second)


def join_values(
  program: hlo.Program, values: values_lib.Values
) -> DisjointSets:
  """Joins the values that share memory."""
  sets = DisjointSets(len(values.owner))
  fused = values.in_fusion
  for source, target, edge in values.edges:
    if (
      edge == values_lib.Edge.SAME
      and values.owner[target].computation.name not in fused
    ):
      sets.join(source, target)
  for instruction in unfused(values):
    operands = [
      value
      for operand in instruction.operand_instructions
      for value in values.of(operand)
    ]
    result = values.of(instruction)
    for source, target in _reused_operands(program, instruction, operands):
      sets.join(operands[source], result[target])
  # An output in an argument's memory.
  root = program.entry.root
  if root is not None:
    arguments = {int(p.literal): p for p in program.entry.parameters}
    ranges = shapes.element_ranges(root.shape)
    for output, (number, index) in program.aliases.items():
      leaf = ranges[output[0]][0] if output else 0
      if number in arguments and not index:
        sets.join(values.of(arguments[number])[0], values.of(root)[leaf])
  return sets


def _reused_operands(
  program: hlo.Program,
  instruction: hlo.Instruction,
  operands: list[int],
) -> list[tuple[int, int]]:
  """Returns which leaves of the operands become which leaves of the result.

  The TPU compiler writes its choice into `backend_config`: numbers count the
  operands' leaves, then the result's. Elsewhere an instruction that updates a
  slice works in place.
  """
  text = instruction.attributes
  start = text.find(ALIASING)
  if start >= 0:
    start += len(ALIASING)
    written, _ = json.JSONDecoder().raw_decode(text, start)
    found: list[tuple[int, int]] = []
    for group in written["lists"]:
      indices = [int(i) for i in group["indices"]]
      sources = [i for i in indices if i < len(operands)]
      targets = [i - len(operands) for i in indices if i >= len(operands)]
      found.extend((s, t) for s in sources[:1] for t in targets)
    return found
  found = []
  for target, source in re.findall(
    r"\{(\d*)\}: \((\d+), \{\}\)", text.partition("calls=")[0]
  ):
    found.append((int(source), int(target or 0)))
  if found:
    return found
  if instruction.opcode == "dynamic-update-slice":
    return [(0, 0)]
  if instruction.opcode == "fusion":
    called = program.computations.get(instruction.called[0])
    return _updates_in_place(called) if called else []
  return []


def _updates_in_place(called: hlo.Computation) -> list[tuple[int, int]]:
  """A fusion whose result is an operand with an updated slice."""
  root = called.root
  while root is not None and root.opcode in ("bitcast", "convert", "copy"):
    root = next(iter(root.operand_instructions), None)
  if root is None or root.opcode != "dynamic-update-slice":
    return []
  updated = root.operand_instructions[0]
  while updated.opcode in ("bitcast", "convert", "copy"):
    updated = updated.operand_instructions[0]
  return [(int(updated.literal), 0)] if updated.opcode == "parameter" else []


def unfused(values: values_lib.Values) -> list[hlo.Instruction]:
  """Returns the instructions that are not parts of fusions."""
  return [
    instruction
    for instruction, leaf in zip(values.owner, values.leaf, strict=True)
    if not leaf and instruction.computation.name not in values.in_fusion
  ]
