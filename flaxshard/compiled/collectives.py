"""The collectives of a compiled program."""

from __future__ import annotations

import dataclasses

import jax

from flaxshard.compiled import branches
from flaxshard.compiled import executions
from flaxshard.compiled import find as find_lib
from flaxshard.compiled import groups as groups_lib
from flaxshard.compiled import hlo
from flaxshard.compiled import purposes as purposes_lib
from flaxshard.compiled import sources

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
    in_commit: Whether it stands in AGN's conditional, and runs at commits only.
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
  in_commit: bool = False

  def executions_per_step(self, period: float) -> float:
    """Returns how often it runs in a step, on average.

    Args:
      period: Steps between two commits of AGN. Other conditionals are assumed
        to take the branch of the collective in every step.
    """
    return self.executions / (period if self.in_commit else 1)

  @property
  def payload_bytes(self) -> int:
    """Bytes of the whole values: an all-gather's results, else the operands."""
    if self.kind == "all-gather":
      return self.result_bytes
    return self.operand_bytes

  def __str__(self) -> str:
    over = f" over {', '.join(self.axes)}" if self.axes else ""
    times = f", {self.executions:g} times" if self.executions != 1 else ""
    if not self.trip_count_known:
      times += ", in a loop whose number of turns is unknown"
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
    The collectives; one that all branches of a conditional have counts once, as
    outside of it.

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
  items = find_lib.find(program)
  if not items:
    return ()
  purposes = purposes_lib.Purposes(program)
  found = [_describe(program, numbers, purposes, item) for item in items]
  merged = branches.merge(
    program,
    [
      (item.site.branches, _signature(collective))
      for item, collective in zip(items, found, strict=True)
    ],
  )
  commits = executions.find_commits(program)
  return tuple(
    dataclasses.replace(
      found[number],
      in_conditional=bool(path),
      in_commit=any(name in commits for name, _ in path),
    )
    for number, path in merged.items()
  )


def _describe(
  program: hlo.Program,
  numbers: groups_lib.DeviceNumbers,
  purposes: purposes_lib.Purposes,
  item: find_lib.Found,
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


def _signature(collective: Collective) -> tuple[object, ...]:
  """Returns what equal collectives of several branches share."""
  return (
    collective.kind,
    collective.dtype,
    collective.operand_bytes,
    collective.axes,
    collective.group_size,
    collective.executions,
  )


def _groups(
  numbers: groups_lib.DeviceNumbers, item: find_lib.Found
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
