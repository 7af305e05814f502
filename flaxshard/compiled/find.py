"""Finds the collectives of a compiled program."""

from __future__ import annotations

import dataclasses

from flaxshard.compiled import executions as executions_lib
from flaxshard.compiled import hlo
from flaxshard.compiled import shapes

KINDS = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-permute",
  "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class Found:
  """A collective instruction and where it was found."""

  kind: str
  instruction: hlo.Instruction
  site: executions_lib.CallSite
  operands: tuple[shapes.Array, ...]
  results: tuple[shapes.Array, ...]


def find(program: hlo.Program) -> list[Found]:
  """Returns each collective of a program once."""
  found: list[Found] = []
  started = _started_channels(program)
  for instruction, site in executions_lib.walk(program):
    opcode = instruction.opcode
    if opcode == "send":
      item = _slice_transfer(instruction, site)
    elif opcode.removesuffix("-start") in KINDS:
      if _is_continuation(instruction, started):
        continue
      item = _collective(instruction, site)
    else:
      continue
    if item is not None:
      found.append(item)
  return found


def _collective(
  instruction: hlo.Instruction, site: executions_lib.CallSite
) -> Found:
  operands = tuple(
    array for i in instruction.operand_instructions for array in i.arrays
  )
  kind = instruction.opcode.removesuffix("-start")
  results = instruction.arrays
  if instruction.opcode.endswith("-start") and kind != "all-reduce":
    # The shape is a tuple of operands, results, and the compiler's flags.
    _, (start, stop), *_ = shapes.element_ranges(instruction.shape)
    results = results[start:stop]
  if kind == "all-reduce" and _is_reduce_scatter(site):
    kind = "reduce-scatter"
    results = tuple(site.callers[-1].arrays)
  return Found(kind, instruction, site, operands, results)


def _is_reduce_scatter(site: executions_lib.CallSite) -> bool:
  """Whether a fused all-reduce is cut to each device's part in its fusion."""
  if not site.callers or site.callers[-1].opcode != "fusion":
    return False
  return any(
    name.startswith("all-reduce-scatter") for name in site.callers[-1].called
  )


def _slice_transfer(
  send: hlo.Instruction, site: executions_lib.CallSite
) -> Found | None:
  """Reads a transfer between slices: a `send` and a `recv` of one name."""
  kind = send.attribute(r'_xla_megascale_transfer_type="(\w+)"')
  if not kind:
    return None
  rendezvous = r'_xla_host_transfer_rendezvous="([^"]*)"'
  name = send.attribute(rendezvous)
  operands = send.operand_instructions[0].arrays
  results = next(
    (
      i.arrays[:1]
      for i in send.computation.instructions.values()
      if i.opcode == "recv" and i.attribute(rendezvous) == name
    ),
    operands,
  )
  kind = kind.lower().replace("_", "-")
  if kind not in KINDS:
    kind = "collective-permute"
  return Found(kind, send, site, operands, results)


def _started_channels(program: hlo.Program) -> set[tuple[str, str]]:
  """Returns collectives that the TPU compiler spreads over several fusions."""
  return {
    (start.opcode, _channel(start))
    for computation in program.computations.values()
    for call in computation.instructions.values()
    if 'custom_call_target="AsyncCollectiveStart"' in call.attributes
    for start in call.operand_instructions
  }


def _is_continuation(
  instruction: hlo.Instruction, started: set[tuple[str, str]]
) -> bool:
  """Whether another fusion starts the collective that this one goes on with."""
  if (instruction.opcode, _channel(instruction)) not in started:
    return False
  if "async_collective_fusion_config" not in instruction.attributes:
    return False
  return not any(
    'custom_call_target="AsyncCollectiveStart"' in user.attributes
    for user in instruction.users
  )


def _channel(instruction: hlo.Instruction) -> str:
  return instruction.attribute(r"channel_id=(\d+)")
