"""The collectives of a compiled program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
import dataclasses
import itertools
import operator
from typing import Any

import jax

from flaxshard.plans import groups
from flaxshard.plans import hlo
from flaxshard.wrappers import accumulate
from flaxshard.wrappers import agn

KINDS = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-permute",
  "collective-broadcast",
)
_STARTS = 'custom_call_target="AsyncCollectiveStart"'
# Of a `send` between slices.
_TRANSFER = r'_xla_megascale_transfer_type="(\w+)"'
_RENDEZVOUS = r'_xla_host_transfer_rendezvous="([^"]*)"'
# What equal collectives of several branches of a conditional share.
_signature = operator.attrgetter(
  "kind", "operand_bytes", "axes", "along", "executions", "in_conditional"
)
# How far to look for a name stack: a transfer between slices stands some
# instructions behind what made its operand.
_NAME_DISTANCE = 9
_NEIGHBORS = 8


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective of a program; bytes are those of one device.

  Attributes:
    kind: Such as `all-reduce`. An all-reduce whose result each device cuts to
      its part in the same fusion is a `reduce-scatter`.
    operands: The arrays that a device gives, without padding.
    results: The arrays that it gets.
    group_size: Number of devices that exchange data with each other.
    axes: Mesh axes along which it moves data; empty if its groups are those of
      no set of axes.
    along: Mesh axes along which the devices of a group differ.
    network: The slowest network that it uses: "dcn", "ici" or "none".
    widened: Those of the operands that are float32 and were cast from bfloat16.
    executions: Executions in one call of the program: the product of the trip
      counts of the loops around it.
    trip_count_known: False if a loop around it has a trip count that the
      program does not state; `executions` then counts one turn of it.
    in_conditional: Whether it stands in a branch that need not run.
    in_commit: Whether it stands in AGN's conditional, and runs at commits only.
    op_name: JAX's name stack of the operation, or of one next to it if the
      compiler kept none.
    source: The user's line, such as `model.py:12`, or "".
  """

  kind: str
  operands: tuple[hlo.Array, ...]
  results: tuple[hlo.Array, ...]
  group_size: int
  axes: tuple[str, ...]
  along: tuple[str, ...]
  network: str
  widened: tuple[hlo.Array, ...] = ()
  executions: float = 1
  trip_count_known: bool = True
  in_conditional: bool = False
  in_commit: bool = False
  op_name: str = ""
  source: str = ""

  @property
  def operand_bytes(self) -> int:
    """Bytes of the operands of one execution."""
    return sum(array.nbytes for array in self.operands)

  @property
  def result_bytes(self) -> int:
    """Bytes of the results of one execution."""
    return sum(array.nbytes for array in self.results)

  @property
  def payload_bytes(self) -> int:
    """Bytes of the whole values: an all-gather's results, else the operands."""
    if self.kind == "all-gather":
      return self.result_bytes
    return self.operand_bytes

  @property
  def link_bytes(self) -> float:
    """Bytes that a device sends in one execution, with ring algorithms."""
    n = self.group_size
    share = (n - 1) / n
    if self.kind == "all-reduce":
      return 2 * share * self.operand_bytes
    if self.kind == "all-gather":
      return share * self.result_bytes
    if self.kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
      return share * self.operand_bytes
    return float(self.operand_bytes) if n > 1 else 0.0

  def executions_per_step(self, period: float) -> float:
    """Returns how often it runs in a step, on average.

    Args:
      period: Steps between two commits of AGN. Other conditionals are assumed
        to take the branch of the collective in every step.
    """
    return self.executions / (period if self.in_commit else 1)

  def __str__(self) -> str:
    over = f" over {', '.join(self.axes)}" if self.axes else ""
    parts = [f"{self.kind}{over}: {self.payload_bytes:,} bytes"]
    if self.executions != 1:
      parts.append(f"{self.executions:g} times")
    if not self.trip_count_known:
      parts.append("in a loop whose number of turns is unknown")
    if self.in_conditional:
      parts.append("in a conditional")
    if self.source:
      parts.append(self.source)
    op_name = f" [{self.op_name}]" if self.op_name else ""
    return ", ".join(parts) + op_name


def collectives(
  compiled: Any, mesh: jax.sharding.Mesh
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
    TypeError: `compiled` is no program.
    ValueError: `mesh` has another number of devices than the program.

  Example:
    >>> import flaxshard as fs, jax
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    >>> fs.plans.collectives(compiled, mesh)
    ()
  """
  program = hlo.parse(compiled)
  reader = _Reader(program, groups.Devices(program, mesh))
  return tuple(reader.read(program.entry))


class _Reader:
  """Finds and describes the collectives of a program."""

  def __init__(self, program: hlo.Program, devices: groups.Devices) -> None:
    self._program = program
    self._devices = devices
    self._commits = _find_commits(program)
    # Collectives that the TPU compiler spreads over several fusions.
    self._started = {
      (start.opcode, _channel(start))
      for call in program.instructions()
      if _STARTS in call.attributes
      for start in call.operands
    }

  def read(
    self,
    computation: hlo.Computation,
    caller: hlo.Instruction | None = None,
  ) -> list[Collective]:
    """Returns the collectives of a computation and those that it calls.

    Args:
      computation: The computation.
      caller: The instruction that calls it; None for the program itself.
    """
    found = []
    for one in computation.instructions.values():
      if moved := self._moved(one, computation, caller):
        found.append(self._describe(one, caller, *moved))
      elif one.opcode in ("conditional", "while") or hlo.is_call(one):
        called = [self.read(x, one) for x in self._program.called(one)]
        if one.opcode == "conditional":
          found += _merge(called, one.name in self._commits)
        elif one.opcode == "while":
          turns = hlo.trip_count(self._program, one)
          found += [_repeat(x, turns) for x in itertools.chain(*called)]
        else:
          found += itertools.chain(*called)
    return found

  def _moved(
    self,
    one: hlo.Instruction,
    computation: hlo.Computation,
    caller: hlo.Instruction | None,
  ) -> tuple[str, list[hlo.Instruction], tuple[hlo.Array, ...]] | None:
    """Returns the kind, operands and results of a collective; else None."""
    if one.opcode == "send" and (kind := one.attribute(_TRANSFER)):
      # A transfer between slices: a `send` and a `recv` of one name.
      kind, name = kind.lower().replace("_", "-"), one.attribute(_RENDEZVOUS)
      received = (
        i.arrays[:1]
        for i in computation.instructions.values()
        if i.opcode == "recv" and i.attribute(_RENDEZVOUS) == name
      )
      value = one.operands[0]
      kind = kind if kind in KINDS else "collective-permute"
      return kind, [value], next(received, value.arrays)
    kind, results = one.opcode.removesuffix("-start"), one.arrays
    if kind not in KINDS or self._is_continuation(one):
      return None
    if kind != one.opcode and kind != "all-reduce":
      # The shape is a tuple of operands, results, and the compiler's flags.
      count = len(_arrays(one.operands))
      results = results[count : 2 * count]
    if kind == "all-reduce" and caller and caller.opcode == "fusion":
      # Each device cuts out its part in the same fusion.
      called = self._program.called(caller)
      if any(x.name.startswith("all-reduce-scatter") for x in called):
        kind, results = "reduce-scatter", caller.arrays
    return kind, one.operands, results

  def _describe(
    self,
    one: hlo.Instruction,
    caller: hlo.Instruction | None,
    kind: str,
    given: Sequence[hlo.Instruction],
    results: tuple[hlo.Array, ...],
  ) -> Collective:
    named = _nearest_named([one, caller] if caller else [one])
    return Collective(
      kind,
      _arrays(given),
      results,
      *self._devices.spanned(one),
      _arrays(x for x in given if hlo.is_widened(self._program, x, caller)),
      op_name=named.op_name if named else "",
      source=self._program.source_line(named) if named else "",
    )

  def _is_continuation(self, one: hlo.Instruction) -> bool:
    """Whether another fusion starts the collective that this one goes on."""
    return (
      (one.opcode, _channel(one)) in self._started
      and "async_collective_fusion_config" in one.attributes
      and not any(_STARTS in user.attributes for user in one.users)
    )


def _arrays(given: Iterable[hlo.Instruction]) -> tuple[hlo.Array, ...]:
  return tuple(array for value in given for array in value.arrays)


def _channel(instruction: hlo.Instruction) -> str:
  return instruction.attribute(r"channel_id=(\d+)")


def _find_commits(program: hlo.Program) -> set[str]:
  """Returns the conditionals of AGN, which commits once in a period.

  Without AGN they are those of Accumulate, which updates once in a period.
  Those around it and in it, such as LossScale's, are not among them.
  """
  conditionals = [
    (i.name, i.op_name)
    for i in program.instructions()
    if i.opcode == "conditional"
  ]
  for scope in (agn.COMMIT_SCOPE, accumulate.UPDATE_SCOPE):
    found = {
      name for name, stack in conditionals if stack.endswith(f"/{scope}/cond")
    }
    if found:
      return found
  return set()


def _repeat(one: Collective, turns: int | None) -> Collective:
  """Returns a collective of a loop's body, for all turns of the loop."""
  return dataclasses.replace(
    one,
    executions=one.executions * (1 if turns is None else turns),
    trip_count_known=one.trip_count_known and turns is not None,
  )


def _merge(
  branches: Sequence[Sequence[Collective]], is_commit: bool
) -> list[Collective]:
  """Returns the collectives of a conditional; what all branches have, once."""
  common = Counter(map(_signature, branches[0]))
  for branch in branches[1:]:
    common &= Counter(map(_signature, branch))
  merged = []
  for number, branch in enumerate(branches):
    left = common.copy()
    for one in branch:
      if not one.in_conditional and left[_signature(one)] > 0:
        left[_signature(one)] -= 1
        if not number:
          merged.append(one)
      else:
        in_commit = one.in_commit or is_commit
        merged.append(
          dataclasses.replace(one, in_conditional=True, in_commit=in_commit)
        )
  return merged


def _nearest_named(
  starts: Sequence[hlo.Instruction],
) -> hlo.Instruction | None:
  """Returns the nearest instruction that has a name stack, or None.

  The compiler drops the names of some instructions that it splits or adds.
  Those that make their operands, or use their results, may have them.
  """
  behind = ahead = list(starts)
  for _ in range(_NAME_DISTANCE):
    for near in (*behind, *ahead):
      if near.op_name and near.opcode != "parameter":
        return near
    behind = [x for near in behind for x in near.operands][:_NEIGHBORS]
    ahead = [x for near in ahead for x in near.users][:_NEIGHBORS]
  return None
