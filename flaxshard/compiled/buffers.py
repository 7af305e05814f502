"""The largest buffers that are alive at a program's peak.

The compiled text has the order of the instructions, their layouts, and (on TPU)
which results reuse an operand's memory. From these follows when each buffer is
alive. Offsets in memory are not in the text: gaps between buffers are not
counted. Totals are those of `Compiled.memory_analysis`.
"""

from __future__ import annotations

import dataclasses

from flaxshard.compiled import hlo
from flaxshard.compiled import memory_sets
from flaxshard.compiled import sources
from flaxshard.compiled import values as values_lib
from flaxshard.core import checks

_HBM = 0


@dataclasses.dataclass(frozen=True)
class Buffer:
  """A buffer in a device's main memory at the peak of a program.

  Attributes:
    nbytes: Bytes, with the padding of its layout.
    shape: Such as `f32[4096,4096]`.
    origin: Path of the argument, or the name stack of what makes the buffer.
    source: The user's line, such as `model.py:12`, or "".
    kind: "argument", "output" (one that reuses no argument's memory), or
      "temporary".
  """

  nbytes: int
  shape: str
  origin: str
  source: str
  kind: str


@dataclasses.dataclass(frozen=True)
class PeakMemory:
  """Bytes of the main memory at a program's peak, by kind.

  Attributes:
    arguments: Bytes of the arguments.
    outputs: Bytes of the outputs that reuse no argument's memory.
    temporaries: Bytes of temporaries that are alive at the peak.
    buffers: The buffers, the largest first.
  """

  arguments: int
  outputs: int
  temporaries: int
  buffers: tuple[Buffer, ...]


def largest_buffers(
  compiled: hlo.HasText | hlo.Program | str, count: int = 10
) -> tuple[Buffer, ...]:
  """Returns the largest buffers that are alive at a program's peak.

  Args:
    compiled: A compiled program, or its HLO text.
    count: Number of buffers.

  Returns:
    The largest first.

  Raises:
    TypeError: `compiled` is no program.
    ValueError: The text is no HLO module, or `count` is below 1.

  Example:
    >>> import jax
    >>> x = jax.ShapeDtypeStruct((1000,), "float32")
    >>> compiled = jax.jit(lambda x: x.sum()).lower(x).compile()
    >>> largest_buffers(compiled, 1)[0].shape
    'f32[1000]'
  """
  count = checks.integer("count", count, minimum=1)
  return peak_memory(compiled).buffers[:count]


def peak_memory(compiled: hlo.HasText | hlo.Program | str) -> PeakMemory:
  """Returns the buffers that are alive when most of the memory is used."""
  program = hlo.parse(compiled)
  values = values_lib.trace(program)
  sets = memory_sets.join_values(program, values)
  times = _times(program)
  regions = _regions(program, values, sets, times)
  alive = _at_peak(regions)
  found = [_buffer(program, values, region) for region in alive]
  found.sort(key=lambda b: -b.nbytes)
  total = {
    kind: sum(b.nbytes for b in found if b.kind == kind)
    for kind in ("argument", "output", "temporary")
  }
  return PeakMemory(
    total["argument"], total["output"], total["temporary"], tuple(found)
  )


@dataclasses.dataclass
class _Region:
  """Memory that several values use one after another, or as one."""

  nbytes: int
  value: int  # the one that names the region
  first: float
  last: float
  kind: str


def _times(program: hlo.Program) -> dict[tuple[str, str], int]:
  """Returns when each instruction runs, counted in instructions.

  The instructions of a loop's body or of a branch run just before the loop or
  the conditional ends.
  """
  times: dict[tuple[str, str], int] = {}

  def visit(computation: hlo.Computation) -> None:
    for instruction in computation.instructions.values():
      if instruction.opcode in ("while", "conditional", "call"):
        for name in instruction.called:
          if name in program.computations:
            visit(program.computations[name])
      times[computation.name, instruction.name] = len(times)

  visit(program.entry)
  return times


def _regions(
  program: hlo.Program,
  values: values_lib.Values,
  sets: memory_sets.DisjointSets,
  times: dict[tuple[str, str], int],
) -> list[_Region]:
  regions: dict[int, _Region] = {}
  entry = program.entry
  end = len(times)
  for value, instruction in enumerate(values.owner):
    computation = instruction.computation
    time = times.get((computation.name, instruction.name))
    if time is None or instruction.opcode == "constant":
      continue
    array = values.array(value)
    if array.memory_space != _HBM or not array.padded_bytes:
      continue
    key = sets.find(value)
    region = regions.setdefault(key, _Region(0, value, time, time, "temporary"))
    if (
      region.kind != "argument"
      and not _passes_on(instruction)
      and (
        _passes_on(values.owner[region.value])
        or array.padded_bytes > region.nbytes
      )
    ):
      region.value = value
    region.nbytes = max(region.nbytes, array.padded_bytes)
    region.first = min(region.first, time)
    region.last = max(region.last, time)
    for user in instruction.users:
      # Of a tuple, only who reads this leaf uses it. What is asynchronous reads
      # its operands until it is done.
      reads_all = user.opcode.endswith(("-done", "-update", "fusion"))
      if len(instruction.arrays) == 1 or reads_all:
        region.last = max(region.last, times[computation.name, user.name])
    if instruction.opcode == "parameter" and computation is entry:
      region.kind, region.value = "argument", value
      region.first, region.last = 0, end
    elif instruction is entry.root and region.kind != "argument":
      # The results' memory is given to the program before it starts.
      region.kind, region.first, region.last = "output", 0, end
  _join_elementwise(values, sets, times, regions)
  return [region for region in regions.values() if region.nbytes]


def _join_elementwise(
  values: values_lib.Values,
  sets: memory_sets.DisjointSets,
  times: dict[tuple[str, str], int],
  regions: dict[int, _Region],
) -> None:
  """Lets elementwise results take the memory of an operand that ends there.

  XLA does so where the text does not say it.
  """
  instructions = [
    i for i in memory_sets.unfused(values) if _is_elementwise(values, i)
  ]
  instructions.sort(key=lambda i: times.get((i.computation.name, i.name), -1))
  for instruction in instructions:
    time = times.get((instruction.computation.name, instruction.name))
    result = regions.get(sets.find(values.of(instruction)[0]))
    if result is None or result.first != time or result.kind != "temporary":
      continue
    for operand in instruction.operand_instructions:
      given = regions.get(sets.find(values.of(operand)[0]))
      if (
        given is not None
        and given is not result
        and given.kind == "temporary"
        and (given.last, given.nbytes) == (time, result.nbytes)
      ):
        result.first = given.first
        given.nbytes = 0
        break


def _is_elementwise(
  values: values_lib.Values, instruction: hlo.Instruction
) -> bool:
  if (
    memory_sets.ALIASING in instruction.attributes
    or len(instruction.arrays) > 1
  ):
    return False
  if instruction.opcode != "fusion":
    return values_lib.is_elementwise(instruction.opcode)
  called = values.program.computations.get(instruction.called[0])
  return called is not None and all(
    values_lib.is_elementwise(i.opcode)
    or i.opcode in ("bitcast", "broadcast", "constant", "parameter")
    for i in called.instructions.values()
  )


def _passes_on(instruction: hlo.Instruction) -> bool:
  return instruction.opcode in (
    "bitcast",
    "conditional",
    "copy-done",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "tuple",
    "while",
  )


def _at_peak(regions: list[_Region]) -> list[_Region]:
  """Returns the regions at the time at which they are largest together."""
  changes: dict[float, int] = {}
  for region in regions:
    changes[region.first] = changes.get(region.first, 0) + region.nbytes
    changes[region.last + 0.5] = (
      changes.get(region.last + 0.5, 0) - region.nbytes
    )
  used = most = 0
  peak = 0.0
  for time in sorted(changes):
    used += changes[time]
    if used > most:
      most, peak = used, time
  return [r for r in regions if r.first <= peak <= r.last]


def _buffer(
  program: hlo.Program, values: values_lib.Values, region: _Region
) -> Buffer:
  named: hlo.Instruction | None = values.owner[region.value]
  if region.kind != "argument":
    named = sources.nearest_named([values.owner[region.value]])
  return Buffer(
    nbytes=region.nbytes,
    shape=str(values.array(region.value)),
    origin=named.op_name if named else "",
    source=sources.source_line(program, named) if named else "",
    kind=region.kind,
  )
