"""The values of a program, and how instructions pass them on.

A value is one array of an instruction's result. Edges say which value becomes
part of which other one, through tuples, loops, branches and fusions too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import enum
import functools

from flaxshard.compiled import hlo
from flaxshard.compiled import shapes


class Edge(enum.IntEnum):
  """The relation of a value to one that is made of it."""

  SAME = 0  # the same array, outside of fusions: the same memory
  FUSED = 1  # the same array, into or out of a fusion
  LAYOUT = 2  # the same numbers in another shape, layout, type, or on others
  REDUCED = 3  # combined with the same array of other devices
  ELEMENTWISE = 4  # a function of it, element by element
  OTHER = 5  # any other function of it, such as a product or an index


# How a value remains what it is, in another place, layout or precision.
MOVES = (Edge.SAME, Edge.FUSED, Edge.LAYOUT)


_SAME = {
  "add-dependency",
  "bitcast",
  "domain",
  "get-tuple-element",
  "opt-barrier",
  "optimization-barrier",
  "tuple",
}
_LAYOUT = {
  "all-gather",
  "all-to-all",
  "collective-broadcast",
  "collective-permute",
  "concatenate",
  "convert",
  "copy",
  "dynamic-slice",
  "pad",
  "ragged-all-to-all",
  "reduce-precision",
  "reshape",
  "reverse",
  "slice",
  "transpose",
}
_REDUCED = {"all-reduce", "reduce-scatter"}
# Custom calls of the TPU compiler: parts of collectives, and moves.
_ASYNC_CALLS = ("AsyncCollectiveStart", "AsyncCollectiveDone")
_MOVING_CALLS = ("ConcatBitcast", "ZeroCrop", "Sharding")
_NOT_ELEMENTWISE = {
  "after-all",
  "broadcast",
  "constant",
  "convolution",
  "custom-call",
  "dot",
  "dynamic-update-slice",
  "fft",
  "gather",
  "infeed",
  "iota",
  "parameter",
  "partition-id",
  "recv",
  "reduce",
  "reduce-window",
  "rng",
  "scatter",
  "send",
  "sort",
}


def is_elementwise(opcode: str) -> bool:
  """Whether an element of the result depends on the operands' same element."""
  return opcode == "convert" or not (
    opcode in _NOT_ELEMENTWISE
    or opcode in _SAME
    or opcode in _LAYOUT
    or opcode in _REDUCED
    or opcode in _CALLERS
    or opcode.endswith(("-start", "-update", "-done"))
  )


@dataclasses.dataclass(eq=False)
class Values:
  """The values of the computations that a program runs.

  Attributes:
    program: The program.
    owner: The instruction of each value.
    leaf: The place of each value in its instruction's result.
    edges: Pairs of values, and how the first becomes the second.
    in_fusion: Names of the computations that fusions call.
  """

  program: hlo.Program
  owner: list[hlo.Instruction]
  leaf: list[int]
  edges: list[tuple[int, int, Edge]]
  in_fusion: set[str]
  _ranges: dict[int, range]  # by the identity of the instruction

  def of(self, instruction: hlo.Instruction) -> range:
    """Returns the values of an instruction's result."""
    return self._ranges[id(instruction)]

  def array(self, value: int) -> shapes.Array:
    """Returns the shape of a value."""
    return self.owner[value].arrays[self.leaf[value]]

  @functools.cached_property
  def forward(self) -> list[list[tuple[int, Edge]]]:
    """For each value, the values that it becomes."""
    return self._neighbors(self.edges)

  @functools.cached_property
  def backward(self) -> list[list[tuple[int, Edge]]]:
    """For each value, the values that it is made of."""
    return self._neighbors((b, a, edge) for a, b, edge in self.edges)

  def _neighbors(
    self, edges: Iterable[tuple[int, int, Edge]]
  ) -> list[list[tuple[int, Edge]]]:
    """Returns the second values of edges, by the first."""
    found: list[list[tuple[int, Edge]]] = [[] for _ in self.owner]
    for first, second, edge in edges:
      found[first].append((second, edge))
    return found


def trace(program: hlo.Program) -> Values:
  """Returns the values of a program and the edges between them.

  They are computed at the first call and shared by all who ask for them.
  """
  if "values" not in program.shared:
    program.shared["values"] = _trace(program)
  return program.shared["values"]


def _trace(program: hlo.Program) -> Values:
  values = Values(program, [], [], [], set(), {})
  instructions = list(
    _in_order(program, program.entry, values.in_fusion, set())
  )
  for instruction in instructions:
    count = len(instruction.arrays)
    first = len(values.owner)
    values._ranges[id(instruction)] = range(first, first + count)
    values.owner.extend([instruction] * count)
    values.leaf.extend(range(count))
  for instruction in instructions:
    values.edges.extend(_edges(values, instruction))
  return values


def _in_order(
  program: hlo.Program,
  computation: hlo.Computation,
  in_fusion: set[str],
  seen: set[str],
) -> Iterator[hlo.Instruction]:
  """Yields the instructions that a program runs, operands before results.

  The instructions of a called computation come before the one that calls it.
  """
  seen.add(computation.name)
  for instruction in computation.instructions.values():
    if instruction.opcode in _CALLERS:
      for name in instruction.called:
        if instruction.opcode in _FUSIONS or computation.name in in_fusion:
          in_fusion.add(name)
        if name in program.computations and name not in seen:
          called = program.computations[name]
          yield from _in_order(program, called, in_fusion, seen)
    yield instruction


_FUSIONS = {"fusion", "fusion-start"}
_ASYNC_CALLERS = {"async-start", "call-start", "fusion-start"}
_CALLERS = {"call", "conditional", "while"} | _FUSIONS | _ASYNC_CALLERS

_Edges = Iterator[tuple[int, int, Edge]]


def _edges(values: Values, instruction: hlo.Instruction) -> _Edges:
  opcode = instruction.opcode
  operands = [values.of(i) for i in instruction.operand_instructions]
  result = values.of(instruction)
  if opcode in _CALLERS:
    operands = [values.of(i) for i in instruction.call_operands]
    yield from _call_edges(values, instruction, operands, result)
  elif opcode == "get-tuple-element":
    index = int(instruction.attribute(r"index=(\d+)") or 0)
    of = instruction.operand_instructions
    parts = shapes.element_ranges(of[0].shape) if of else ()
    if index < len(parts):
      start, stop = parts[index]
      yield from _zip(operands[0][start:stop], result, Edge.SAME)
  elif opcode in _SAME:
    flat = [value for operand in operands for value in operand]
    yield from _zip(flat, result, Edge.SAME)
  elif opcode.endswith(("-start", "-update", "-done")) or opcode in (
    "send",
    "recv",
    "recv-done",
  ):
    yield from _async_edges(values, instruction, operands, result)
  elif opcode == "dynamic-update-slice":
    for operand in operands[:2]:
      yield from _zip(operand, result, Edge.LAYOUT)
    yield from _all_pairs(operands[2:], result)
  elif opcode == "custom-call":
    is_async = any(f'"{x}"' in instruction.attributes for x in _ASYNC_CALLS)
    if any(f'"{x}"' in instruction.attributes for x in _MOVING_CALLS):
      for operand in operands:
        yield from _zip(operand, result, Edge.LAYOUT)
    elif is_async:
      yield from _same_shapes(values, operands, result)
    else:
      yield from _all_pairs(operands, result)
  elif opcode == "concatenate":
    for operand in operands:
      yield from _zip(operand, result, Edge.LAYOUT)
  elif opcode in _LAYOUT:
    # Further operands are positions and padding; a combined collective has as
    # many results as operands.
    flat = [value for operand in operands for value in operand]
    yield from _zip(flat[: len(result)], result, Edge.LAYOUT)
    yield from _all_pairs([flat[len(result) :]], result)
  elif opcode in _REDUCED:
    flat = [value for operand in operands for value in operand]
    yield from _zip(flat, result, Edge.REDUCED)
  elif opcode in _NOT_ELEMENTWISE:
    yield from _all_pairs(operands, result)
  else:
    for number, operand in enumerate(operands):
      is_condition = opcode == "select" and not number
      for value, to in zip(operand, result, strict=False):
        same_size = values.array(value).size == values.array(to).size
        is_data = same_size and not is_condition
        yield value, to, Edge.ELEMENTWISE if is_data else Edge.OTHER


def _call_edges(
  values: Values,
  instruction: hlo.Instruction,
  operands: list[range],
  result: range,
) -> _Edges:
  opcode = instruction.opcode
  edge = Edge.FUSED if opcode in _FUSIONS else Edge.SAME
  if opcode == "while":
    yield from _zip(operands[0], result, Edge.SAME)
  if opcode == "conditional":
    yield from _all_pairs(operands[:1], result)
  for number, name in enumerate(instruction.called):
    computation = values.program.computations.get(name)
    if computation is None or computation.root is None:
      continue
    given = operands
    if opcode == "conditional":
      given = operands[number + 1 : number + 2]
    for parameter in computation.parameters:
      index = int(parameter.literal)
      if index < len(given):
        yield from _zip(given[index], values.of(parameter), edge)
    if opcode == "while" and name == instruction.called_as("condition"):
      continue
    root = values.of(computation.root)
    if opcode == "while":
      for parameter in computation.parameters:
        yield from _zip(root, values.of(parameter), Edge.SAME)
    if opcode in _ASYNC_CALLERS:
      parts = shapes.element_ranges(instruction.binding.shape)
      result = values.of(instruction.binding)
      flat = [value for operand in operands for value in operand]
      yield from _zip(flat, result, Edge.SAME)
      if len(parts) > 1:
        yield from _zip(root, result[parts[1][0] : parts[1][1]], edge)
    else:
      yield from _zip(root, result, edge)


def _async_edges(
  values: Values,
  instruction: hlo.Instruction,
  operands: list[range],
  result: range,
) -> _Edges:
  opcode = instruction.opcode
  if opcode == "send":
    yield from _zip(operands[0], result, Edge.SAME)
    name = instruction.attribute(r'_xla_host_transfer_rendezvous="([^"]*)"')
    for other in instruction.computation.instructions.values():
      if other.opcode == "recv" and name and f'"{name}"' in other.attributes:
        yield operands[0][0], values.of(other)[0], Edge.REDUCED
  elif opcode in ("recv", "send-done"):
    return
  elif opcode.endswith("-update"):
    # Further operands are those of the call, which gives this result too.
    if len(operands) == 1:
      yield from _zip(operands[0], result, Edge.SAME)
  elif opcode == "recv-done":
    yield from _zip(operands[0], result, Edge.SAME)
  elif opcode.endswith("-done"):
    start = instruction.operand_instructions[0]
    parts = shapes.element_ranges(start.shape)
    if opcode == "copy-done" or len(parts) < 2 or start.shape[0] != "(":
      yield from _zip(operands[0], result, Edge.SAME)
    elif opcode == "all-reduce-done":
      yield from _zip(operands[0], result, Edge.SAME)
    else:
      first, last = parts[1]
      yield from _zip(operands[0][first:last], result, Edge.SAME)
  else:
    flat = [value for operand in operands for value in operand]
    is_reduced = opcode.removesuffix("-start") in _REDUCED
    edge = Edge.REDUCED if is_reduced else Edge.LAYOUT
    if opcode == "copy-start":
      yield from _zip(flat, result[1:2], Edge.SAME)
      yield from _zip(flat, result[:1], Edge.LAYOUT)
    elif opcode == "all-reduce-start":
      yield from _zip(flat, result, edge)
    else:
      parts = shapes.element_ranges(instruction.shape)
      yield from _zip(flat, result[: parts[0][1]], Edge.SAME)
      if len(parts) > 1:
        yield from _zip(flat, result[parts[1][0] : parts[1][1]], edge)


def _same_shapes(
  values: Values, operands: list[range], result: range
) -> _Edges:
  """Edges between operands and results of the same type and lengths."""
  flat = [value for operand in operands for value in operand]
  for value in flat:
    array = values.array(value)
    for to in result:
      other = values.array(to)
      if (array.dtype, array.dims) == (other.dtype, other.dims):
        yield value, to, Edge.LAYOUT


def _all_pairs(sources: Sequence[Sequence[int]], targets: range) -> _Edges:
  for operand in sources:
    for source in operand:
      for target in targets:
        yield source, target, Edge.OTHER


def _zip(sources: range | list[int], targets: range, edge: Edge) -> _Edges:
  for source, target in zip(sources, targets, strict=False):
    yield source, target, edge
