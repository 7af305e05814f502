"""Finds the purpose of a collective and the parameters that it concerns.

Follows the data from the arguments to the collective and from the collective to
the outputs. A value that only moves, or changes its shape or type, remains what
it was. A gradient reaches its parameter element by element, through the
optimizer's update; an activation does not, because the backward pass reduces or
multiplies it first.
"""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import heapq

from flaxshard.compiled import arguments as arguments_lib
from flaxshard.compiled import hlo
from flaxshard.compiled import values as values_lib
from flaxshard.compiled.values import Edge
from flaxshard.core import tracing

# Scopes of collectives of gradients whose data flow does not show that: rows
# reach their parameter through indices, quantized gradients as bytes.
_GRADIENT_SCOPES = frozenset({tracing.ROWS_SCOPE, tracing.QUANTIZED_SCOPE})

_ELEMENT_BY_ELEMENT = tuple(edge for edge in Edge if edge != Edge.OTHER)


@dataclasses.dataclass(frozen=True)
class Purpose:
  """The purpose of a value, and the parameters that it concerns."""

  name: str
  parameters: tuple[str, ...] = ()


class Purposes:
  """Answers what the values that a collective moves are for.

  Args:
    program: The program.
  """

  def __init__(self, program: hlo.Program) -> None:
    self._values = values_lib.trace(program)
    self._arguments = list(arguments_lib.argument_leaves(program).items())
    self._outputs = arguments_lib.output_leaves(program)
    entry = program.entry
    seeds: dict[int, int] = {}
    by_number = {int(p.literal): p for p in entry.parameters}
    for bit, (number, _) in enumerate(self._arguments):
      for value in self._values.of(by_number[number]):
        seeds[value] = 1 << bit
    forward, backward = self._values.forward, self._values.backward
    self._moved_from = _spread(forward, seeds, values_lib.MOVES)
    self._made_from = _spread(forward, seeds, _ELEMENT_BY_ELEMENT)
    self._computed = _spread(forward, self._computed_values(), values_lib.MOVES)
    results = self._values.of(entry.root) if entry.root is not None else ()
    ends = {value: 1 << bit for bit, value in enumerate(results)}
    self._reaches = _spread(backward, ends, _ELEMENT_BY_ELEMENT, order=-1)
    self._is_training = any(
      "jvp(" in instruction.attributes for instruction in self._values.owner
    )

  def of(self, collective: hlo.Instruction, op_name: str) -> Purpose:
    """Returns what a collective is for: what most of its bytes are for.

    Args:
      collective: The instruction.
      op_name: Its name stack, or that of an instruction near it.
    """
    if not _GRADIENT_SCOPES.isdisjoint(op_name.split("/")):
      return Purpose("gradients")
    nbytes: dict[str, int] = {}
    parameters: dict[str, dict[str, None]] = {}
    for operand in collective.operand_instructions:
      for value in self._values.of(operand):
        size = self._values.array(value).nbytes
        if not size:
          continue
        purpose = self._of_value(collective, value, op_name)
        nbytes[purpose.name] = nbytes.get(purpose.name, 0) + size
        found = parameters.setdefault(purpose.name, {})
        found.update(dict.fromkeys(purpose.parameters))
    if not nbytes:
      return Purpose("other")
    name = max(nbytes, key=lambda purpose: nbytes[purpose])
    return Purpose(name, tuple(parameters[name]))

  def _of_value(
    self, collective: hlo.Instruction, value: int, op_name: str
  ) -> Purpose:
    moved = self._sources(self._moved_from[value])
    if moved and not self._computed[value]:
      return _purpose_of_argument(moved)
    reached = self._destinations(self._results(collective, value))
    concerned = [
      x for x in reached if x.category in _OF_PARAMETERS or x.parameter
    ]
    names = tuple(dict.fromkeys(x.parameter for x in concerned if x.parameter))
    if concerned:
      made_from = {x.category for x in self._sources(self._made_from[value])}
      if "parameter" in made_from:
        return Purpose("parameter", names)
      if "optimizer state" in made_from:
        # The update of a parameter, or the next slot.
        updates = any(x.category == "parameter" for x in concerned)
        return Purpose("parameter" if updates else "optimizer state", names)
      return Purpose("gradients", names)
    # A scalar may be padded on the way between slices: what counts is the
    # output.
    if reached and all(x.category == "data" for x in reached):
      if self._are_scalars(self._results(collective, value)):
        return Purpose("metrics")
    if self._values.array(value).size == 1:
      return Purpose("other")
    if "jvp(" in op_name or not self._is_training:
      return Purpose("activations")
    return Purpose("other")

  def _are_scalars(self, outputs: int) -> bool:
    root = self._values.program.entry.root
    arrays = root.arrays if root is not None else ()
    return all(
      array.size == 1 for bit, array in enumerate(arrays) if outputs >> bit & 1
    )

  def _results(self, collective: hlo.Instruction, value: int) -> int:
    """Returns which outputs an operand of a collective reaches through it."""
    mask = 0
    for target, _ in self._values.forward[value]:
      owner = self._values.owner[target]
      is_received = collective.opcode == "send" and owner.opcode == "recv"
      if owner is collective or is_received:
        mask |= self._reaches[target]
    return mask

  def _sources(self, mask: int) -> list[arguments_lib.Leaf]:
    return [leaf for bit, (_, leaf) in enumerate(self._arguments)
            if mask >> bit & 1]  # fmt: skip

  def _destinations(self, mask: int) -> list[arguments_lib.Leaf]:
    return [leaf for bit, leaf in enumerate(self._outputs) if mask >> bit & 1]

  def _computed_values(self) -> dict[int, int]:
    """Returns the values that are neither arguments, moved, nor constant."""
    entry = self._values.program.entry
    found = {}
    for value, instruction in enumerate(self._values.owner):
      is_argument = (
        instruction.opcode == "parameter" and instruction.computation is entry
      )
      if is_argument or _is_constant(instruction):
        continue
      edges = self._values.backward[value]
      if not any(edge in values_lib.MOVES for _, edge in edges):
        found[value] = 1
    return found


_OF_PARAMETERS = ("parameter", "optimizer state")


def _is_constant(instruction: hlo.Instruction) -> bool:
  if instruction.opcode == "broadcast":
    return all(i.opcode == "constant" for i in instruction.operand_instructions)
  return (
    instruction.opcode in ("constant", "iota", "parameter")
    or "AllocateBuffer" in instruction.attributes
  )


def _purpose_of_argument(leaves: list[arguments_lib.Leaf]) -> Purpose:
  categories = {leaf.category for leaf in leaves}
  names = tuple(dict.fromkeys(x.parameter for x in leaves if x.parameter))
  if categories <= {"parameter", "optimizer state"}:
    if "parameter" in categories:
      return Purpose("parameter", names)
    return Purpose("optimizer state", names)
  return Purpose("activations" if categories == {"data"} else "other")


def _spread(
  edges: list[list[tuple[int, Edge]]],
  seeds: dict[int, int],
  kinds: Iterable[Edge],
  order: int = 1,
) -> list[int]:
  """Returns for each value the bits of the seeds that it is reached from.

  Args:
    edges: The values that follow each value, and how.
    seeds: Values and their bits.
    kinds: The edges to follow.
    order: 1 if most edges lead to larger numbers, -1 if to smaller ones. In
      that order most values are visited once.
  """
  allowed = frozenset(kinds)
  masks = [0] * len(edges)
  waiting = [order * value for value in seeds]
  for value, mask in seeds.items():
    masks[value] = mask
  heapq.heapify(waiting)
  while waiting:
    value = order * heapq.heappop(waiting)
    if waiting and waiting[0] == order * value:
      continue
    mask = masks[value]
    for target, edge in edges[value]:
      if edge in allowed and mask & ~masks[target]:
        masks[target] |= mask
        heapq.heappush(waiting, order * target)
  return masks
