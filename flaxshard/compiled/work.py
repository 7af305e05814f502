"""The arithmetic and the memory traffic of a compiled program.

XLA's own `cost_analysis` counts the body of a loop once and the larger branch
of a conditional always, and on TPU its bytes include those between the cores
and their VMEM. Here a loop counts as often as it runs, a conditional by its
period, and only bytes in HBM count.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
import dataclasses
import math
import re

from flaxshard.compiled import executions
from flaxshard.compiled import hlo
from flaxshard.compiled import products
from flaxshard.compiled import shapes

# Instructions that move no bytes themselves. Those that call a computation do
# their work in it.
_FREE = {
  "add-dependency", "after-all", "async-start", "async-update", "bitcast",
  "call", "conditional", "constant", "domain", "get-tuple-element",
  "opt-barrier", "parameter", "partition-id", "replica-id", "tuple", "while",
}  # fmt: skip
# Which operand of an update in place has the new elements.
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}
_SLICES = ("slice", "dynamic-slice", "gather")
# Operations that pass an operand on, in a fusion without a copy of it.
_VIEWS = ("bitcast", "reshape", "copy", "convert", "transpose", "broadcast")
_HBM = 0


@dataclasses.dataclass(frozen=True)
class Work:
  """The work of one device in one call of a program.

  Attributes:
    hbm_bytes: Bytes that are read from and written to HBM.
    flops: Operations of matrix products and convolutions (an addition and a
      multiplication are two), by the dtype of their operands.
    trip_counts_known: False if the program does not state how often one of its
      loops runs. It counts as one turn.
    has_kernels: Whether custom calls may multiply matrices; their operations
      are not counted.
  """

  hbm_bytes: float = 0.0
  flops: Mapping[str, float] = dataclasses.field(default_factory=dict)
  trip_counts_known: bool = True
  has_kernels: bool = False

  @property
  def total_flops(self) -> float:
    """Operations of all dtypes."""
    return sum(self.flops.values())

  def __add__(self, other: Work) -> Work:
    dtypes = {*self.flops, *other.flops}
    return Work(
      self.hbm_bytes + other.hbm_bytes,
      {k: self.flops.get(k, 0) + other.flops.get(k, 0) for k in dtypes},
      self.trip_counts_known and other.trip_counts_known,
      self.has_kernels or other.has_kernels,
    )

  def __mul__(self, factor: float) -> Work:
    return Work(
      self.hbm_bytes * factor,
      {dtype: value * factor for dtype, value in self.flops.items()},
      self.trip_counts_known,
      self.has_kernels,
    )


def count_work(
  compiled: hlo.HasText | hlo.Program | str,
  period: float = 1,
) -> Work:
  """Counts the work of one device in one call of a program.

  Args:
    compiled: A compiled program, or its HLO text.
    period: Calls of the program for each commit of AGN. The smaller branch of
      its conditional runs at the others. Of other conditionals the larger
      branch counts.

  Returns:
    The work, as a mean over the calls of a period.

  Example:
    >>> import jax
    >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
    >>> count_work(jax.jit(lambda x: x @ x).lower(x).compile()).total_flops
    1024.0
  """
  program = hlo.parse(compiled)
  by_branches: dict[tuple[tuple[str, int], ...], Work] = (
    collections.defaultdict(Work)
  )
  commits = executions.find_commits(program)
  for instruction, site in executions.walk(program):
    work = _work_of(program, instruction, site) * site.executions
    if not site.known:
      work = dataclasses.replace(work, trip_counts_known=False)
    by_branches[site.branches] += work
  # The innermost conditionals first.
  for depth in range(max(map(len, by_branches), default=0), 0, -1):
    groups: dict[tuple, list[Work]] = collections.defaultdict(list)
    for branches in [b for b in by_branches if len(b) == depth]:
      groups[(*branches[:-1], branches[-1][0])].append(
        by_branches.pop(branches)
      )
    for (*outer, name), works in groups.items():
      by_branches[tuple(outer)] += _mean_of_branches(
        works, period if name in commits else 1
      )
  return by_branches[()]


def _mean_of_branches(works: list[Work], period: float) -> Work:
  ordered = sorted(works, key=lambda work: work.hbm_bytes)
  # A branch without instructions that do work is not in the list.
  smallest = ordered[0] if len(ordered) > 1 else Work()
  return ordered[-1] * (1 / period) + smallest * (1 - 1 / period)


def _work_of(
  program: hlo.Program, instruction: hlo.Instruction, site: executions.CallSite
) -> Work:
  flops = products.flops_of(instruction)
  # In a fusion, values stay in registers or VMEM; the fusion reads and writes.
  in_fusion = any(
    caller.opcode in ("fusion", "fusion-start") for caller in site.callers
  )
  return Work(
    0.0 if in_fusion else _hbm_bytes_of(program, instruction),
    flops,
    True,
    instruction.opcode == "custom-call"
    and not flops
    and bool(
      re.search(
        r'target="(tpu_custom_call|__cudnn|__triton)', instruction.attributes
      )
    ),
  )


def _hbm_bytes_of(program: hlo.Program, instruction: hlo.Instruction) -> float:
  """Returns the bytes that an instruction reads from and writes to HBM."""
  opcode = instruction.opcode
  if opcode in _FREE or opcode.endswith("-done"):
    return 0.0
  operands = instruction.operand_instructions
  if opcode.endswith("-start") or opcode in ("send", "recv"):
    return _started_bytes(instruction)
  if opcode == "custom-call" and (
    not operands or '"ConcatBitcast"' in instruction.attributes
  ):
    # Allocations, and slices that lie side by side.
    return 0.0
  if opcode in _SLICES:
    return 2.0 * _hbm_size(instruction)
  if opcode in _UPDATES:
    # In place: only the part that changes is read and written.
    return 2.0 * _hbm_size(operands[_UPDATES[opcode]])
  if opcode != "fusion":
    return sum(map(_hbm_size, operands)) + _hbm_size(instruction)
  fused = program.computations[instruction.called[0]]
  reads = sum(
    min(_read_bytes(program, fused, number), _hbm_size(operand))
    for number, operand in enumerate(operands)
    if _hbm_size(operand)
  )
  return reads + _written_bytes(program, instruction, fused)


def _started_bytes(instruction: hlo.Instruction) -> float:
  """Returns the bytes that move until an asynchronous instruction is done.

  Its result has the operands, as aliases, beside the arrays that it makes.
  """
  opcode, arrays = instruction.opcode, instruction.arrays
  operands = [a for i in instruction.operand_instructions for a in i.arrays]
  count = len(operands)
  if opcode == "copy-start":
    made = arrays[:1]
  elif opcode == "all-reduce-start":
    made = arrays
  else:
    made = arrays[count : 2 * count] or arrays[count:]
  if opcode.removesuffix("-start") in _SLICES:
    # Of the operand, only the part that the slice has is read.
    made = arrays[count : count + 1]
    read = made[0].padded_bytes if operands[0].memory_space == _HBM else 0
    return read + _sum_hbm(made)
  return _sum_hbm(operands) + _sum_hbm(made)


def _hbm_size(instruction: hlo.Instruction) -> float:
  return _sum_hbm(instruction.arrays)


def _sum_hbm(arrays: Iterable[shapes.Array]) -> float:
  return float(sum(a.padded_bytes for a in arrays if a.memory_space == _HBM))


def _read_bytes(
  program: hlo.Program, fused: hlo.Computation, number: int
) -> float:
  """Returns the bytes of a fusion's operand that the fusion reads."""
  parameters = fused.parameters
  if number >= len(parameters):
    return math.inf
  total = 0.0
  pending = [parameters[number]]
  while pending:
    value = pending.pop()
    for user in fused.instructions.values():
      if value.name not in user.operands:
        continue
      position = user.operands.index(value.name)
      if user.opcode in _SLICES and position == 0:
        total += sum(a.padded_bytes for a in user.arrays)
      elif user.opcode in _UPDATES and position == 0:
        # The rest of the operand stays where it is.
        pass
      elif user.opcode == "fusion":
        inner = program.computations[user.called[0]]
        total += _read_bytes(program, inner, position)
      elif user.opcode in _VIEWS and not user.is_root:
        pending.append(user)
      else:
        return math.inf
  return total


def _written_bytes(
  program: hlo.Program, fusion: hlo.Instruction, fused: hlo.Computation
) -> float:
  """Returns the bytes that a fusion writes to HBM."""
  root = fused.root
  if root is None:
    return _hbm_size(fusion)
  roots = root.operand_instructions if root.opcode == "tuple" else [root]
  if len(roots) != len(fusion.arrays):
    return _hbm_size(fusion)
  total = 0.0
  for array, value in zip(fusion.arrays, roots, strict=True):
    if array.memory_space != _HBM:
      continue
    update = _update_in_place(program, value)
    arrays = [array] if update is None else update.arrays
    total += sum(a.padded_bytes for a in arrays)
  return total


def _update_in_place(
  program: hlo.Program, value: hlo.Instruction | None
) -> hlo.Instruction | None:
  """Returns what a value writes into an array in place; None if it does not."""
  while value is not None:
    operands = value.operand_instructions
    if value.opcode == "fusion":
      value = program.computations[value.called[0]].root
    elif value.opcode in ("bitcast", "copy") and operands:
      value = operands[0]
    elif value.opcode in _UPDATES:
      return operands[_UPDATES[value.opcode]]
    else:
      return None
  return None
