"""The collectives of a compiled program."""

from __future__ import annotations

from collections import Counter
import dataclasses

import jax

from flaxshard.compiled import executions as executions_lib
from flaxshard.compiled import groups as groups_lib
from flaxshard.compiled import hlo
from flaxshard.compiled import purposes as purposes_lib
from flaxshard.compiled import shapes
from flaxshard.compiled import sources

KINDS = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-permute",
  "collective-broadcast",
)

# Parameters that the text of a collective names.
_MAX_NAMES = 3


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective of a program; bytes are those of one device.

  Attributes:
    kind: Such as `all-reduce`. An all-reduce whose result each device cuts to
      its part in the same fusion is a `reduce-scatter`.
    dtype: Type of the largest operand, such as `bf16`.
    operand_bytes: Bytes of the operands of one execution, without padding.
    result_bytes: Bytes of the results of one execution, without padding.
    group_size: Number of devices that exchange data with each other.
    axes: Mesh axes along which the groups lie; empty if the groups are those
      of no set of axes. For a collective-permute, the axes along which data
      moves.
    network: "dcn" if a group has devices of several slices, "ici" if not,
      "none" if each group is one device.
    executions: Executions in one call of the program: the product of the trip
      counts of the loops around it.
    in_conditional: Whether it stands in a branch that need not run.
    purpose: "gradients", "parameter", "optimizer state", "activations",
      "metrics" or "other" (unknown).
    parameters: Paths of the parameters that it concerns, as far as known.
    op_name: JAX's name stack of the operation, or of one next to it if the
      compiler kept none.
    source: The user's line, such as `model.py:12`, or "".
    instruction: Name of the HLO instruction.
    trip_count_known: False if a loop around it has a trip count that the
      program does not state; `executions` then counts one turn of it.
  """

  kind: str
  dtype: str
  operand_bytes: int
  result_bytes: int
  group_size: int
  axes: tuple[str, ...]
  network: str
  executions: float
  in_conditional: bool
  purpose: str
  parameters: tuple[str, ...]
  op_name: str
  source: str
  instruction: str = ""
  trip_count_known: bool = True

  @property
  def payload_bytes(self) -> int:
    """Bytes of the whole values: an all-gather's results, else the operands."""
    if self.kind == "all-gather":
      return self.result_bytes
    return self.operand_bytes

  def __str__(self) -> str:
    over = f" over {', '.join(self.axes)}" if self.axes else ""
    times = f", {self.executions:g} times" if self.executions != 1 else ""
    conditional = ", in a conditional" if self.in_conditional else ""
    what = self.purpose
    if self.parameters:
      more = len(self.parameters) - _MAX_NAMES
      names = ", ".join(self.parameters[:_MAX_NAMES])
      what += f" ({names}{f' and {more} more' if more > 0 else ''})"
    place = f", {self.source}" if self.source else ""
    op_name = f" [{self.op_name}]" if self.op_name else ""
    return (
      f"{self.kind}{over}: {self.payload_bytes:,} bytes{times}{conditional},"
      f" {what}{place}{op_name}"
    )

  @property
  def link_bytes(self) -> float:
    """Bytes that a device sends in one execution, with ring algorithms."""
    n = self.group_size
    share = (n - 1) / n if n else 0.0
    if self.kind == "all-reduce":
      return 2 * share * self.operand_bytes
    if self.kind == "all-gather":
      return share * self.result_bytes
    if self.kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
      return share * self.operand_bytes
    return float(self.operand_bytes) if n > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class Found:
  """A collective instruction and where it was found."""

  kind: str
  instruction: hlo.Instruction
  site: executions_lib.CallSite
  operands: tuple[shapes.Array, ...]
  results: tuple[shapes.Array, ...]


def collectives(
  compiled: hlo.HasText | hlo.Program | str, mesh: jax.sharding.Mesh
) -> tuple[Collective, ...]:
  """Reads the collectives off a compiled program.

  The start and the end of an asynchronous collective, and the pieces of one
  that the TPU compiler spreads over several fusions, count once.

  Args:
    compiled: A compiled program, or its HLO text.
    mesh: The mesh that the program was compiled for.

  Returns:
    The collectives, in the order of the text.

  Raises:
    TypeError: `compiled` is no program, or `mesh` is no mesh.
    ValueError: The text is no HLO module, or `mesh` has another number of
      devices than the program.

  Example:
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    >>> collectives(compiled, mesh)
    ()
  """
  if not isinstance(mesh, jax.sharding.Mesh):
    raise TypeError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}.")
  program = hlo.parse(compiled)
  numbers = groups_lib.device_numbers(program, mesh)
  items = find(program)
  if not items:
    return ()
  purposes = purposes_lib.Purposes(program)
  found = [
    (item, _describe(program, numbers, purposes, item)) for item in items
  ]
  return tuple(_merge_branches(program, found))


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
  if instruction.opcode.endswith("-start"):
    # The start's own shape also has the operands and the compiler's flags.
    results = next(
      (i.arrays for i in instruction.users if i.opcode == f"{kind}-done"),
      results,
    )
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


def _describe(
  program: hlo.Program,
  numbers: groups_lib.DeviceNumbers,
  purposes: purposes_lib.Purposes,
  item: Found,
) -> Collective:
  instruction, site = item.instruction, item.site
  groups, are_pairs = _groups(numbers, item)
  axes = numbers.axes_of_pairs(groups) if are_pairs else numbers.axes(groups)
  named = sources.nearest_named([instruction, *site.callers[-1:]])
  op_name = named.op_name if named else ""
  purpose = purposes.of(instruction, op_name)
  largest = max(item.operands, key=lambda a: a.nbytes, default=None)
  operand_bytes = sum(array.nbytes for array in item.operands)
  return Collective(
    kind=item.kind,
    dtype=largest.dtype if largest else "",
    operand_bytes=operand_bytes,
    result_bytes=sum(array.nbytes for array in item.results),
    group_size=max(len(set(group)) for group in groups) if groups else 1,
    axes=axes,
    network=numbers.network(groups),
    executions=site.executions,
    in_conditional=bool(site.branches),
    purpose=purpose.name,
    parameters=purpose.parameters,
    op_name=op_name,
    source=sources.source_line(program, named) if named else "",
    instruction=instruction.name,
    trip_count_known=site.known,
  )


def _groups(
  numbers: groups_lib.DeviceNumbers, item: Found
) -> tuple[groups_lib.Groups, bool]:
  """Returns groups of mesh positions, and whether they are pairs."""
  attributes = item.instruction.attributes
  if item.instruction.opcode == "send":
    return numbers.slice_transfer(attributes) or ((), False)
  pairs = groups_lib.source_target_pairs(attributes)
  if pairs is not None:
    return numbers.to_positions(pairs), True
  count = len(numbers.positions[0])
  groups = groups_lib.replica_groups(attributes, count)
  return numbers.to_positions(groups or (tuple(range(count)),)), False


def _merge_branches(
  program: hlo.Program, found: list[tuple[Found, Collective]]
) -> list[Collective]:
  """Merges a collective that stands in all branches of a conditional.

  It runs whichever branch is taken: it counts once, as outside of the
  conditional.
  """
  rows = [(item.site.branches, collective) for item, collective in found]
  num_branches = {
    i.name: len(i.called)
    for computation in program.computations.values()
    for i in computation.instructions.values()
    if i.opcode == "conditional"
  }
  # Innermost conditionals first: what runs in all their branches runs always
  # in the branch around them.
  for depth in range(max((len(b) for b, _ in rows), default=0), 0, -1):
    paths = {b for b, _ in rows if len(b) == depth}
    for name, outer in {(b[-1][0], b[:-1]) for b in paths}:
      branches = [(*outer, (name, k)) for k in range(num_branches[name])]
      rows = _merge_one(rows, outer, branches)
  return [
    dataclasses.replace(c, in_conditional=bool(branches))
    for branches, c in rows
  ]


_Path = tuple[tuple[str, int], ...]


def _merge_one(
  rows: list[tuple[_Path, Collective]], outer: _Path, branches: list[_Path]
) -> list[tuple[_Path, Collective]]:
  """Merges what stands in all branches of one conditional."""
  counts = [
    Counter(_signature(c) for path, c in rows if path == branch)
    for branch in branches
  ]
  common = counts[0]
  for count in counts[1:]:
    common = common & count
  left = {branch: common.copy() for branch in branches}
  merged = []
  for path, collective in rows:
    key = _signature(collective)
    if path in left and left[path][key] > 0:
      left[path][key] -= 1
      if path != branches[0]:
        continue
      path = outer
    merged.append((path, collective))
  return merged


def _signature(collective: Collective) -> tuple[object, ...]:
  return (
    collective.kind,
    collective.dtype,
    collective.operand_bytes,
    collective.axes,
    collective.group_size,
    collective.executions,
  )
