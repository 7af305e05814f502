"""Checks of collectives in loops that could run once, outside."""

from __future__ import annotations

import functools

from flaxshard.analysis.findings import Finding
from flaxshard.analysis.step_facts import StepFacts
from flaxshard.compiled import dataflow
from flaxshard.compiled import hlo
from flaxshard.compiled import sources
from flaxshard.compiled.find import Found
from flaxshard.state import summary

_size = summary.format_bytes
Sums = list[tuple[int, list[int]]]  # as `dataflow.sums_over_turns` returns
_REDUCTIONS = ("all-reduce", "reduce-scatter")


def check_loops(facts: StepFacts, min_bytes: int) -> list[Finding]:
  """Finds collectives that repeat in a loop what could be done outside."""
  if facts.program is None or facts.mesh is None:
    return []
  sums_of = functools.cache(
    functools.partial(dataflow.sums_over_turns, facts.values)
  )
  sums: dict[str, int] = {}
  repeated: dict[str, int] = {}
  for found in facts.collectives:
    callers = found.site.callers[::-1]
    loop = next((i for i in callers if i.opcode == "while"), None)
    turns = found.site.executions
    if loop is None or (found.site.known and turns <= 1):
      continue
    # A loop whose turns are unknown has two at least.
    turns = max(turns, 2)
    nbytes = int(turns * sum(array.nbytes for array in found.results))
    if nbytes < min_bytes:
      continue
    source = _source(facts.program, found.instruction, *callers)
    if _is_invariant(facts, found, loop):
      if not _is_fsdp_accumulation(facts, found):
        repeated[source] = repeated.get(source, 0) + nbytes
    elif found.kind in _REDUCTIONS:
      nbytes = int(turns * _accumulated_bytes(facts, found, sums_of(loop)))
      if nbytes < min_bytes or not nbytes:
        continue
      # The loop is what to change, unless the user wrote the collective.
      if "shard_map" not in found.instruction.op_name:
        source = _source(facts.program, loop) or source
      sums[source] = sums.get(source, 0) + nbytes
  kind = "collective in loop"
  return [
    *(
      Finding(
        kind,
        f"a loop reduces in each turn what it adds up ({_size(total)} on each "
        "device). Add up each device's own values, and reduce the sum after "
        "the loop: apply_gradients does so in Strategy.run.",
        source=source,
        nbytes=total,
      )
      for source, total in sums.items()
    ),
    *(
      Finding(
        kind,
        f"a loop moves the same data in each turn ({_size(total)} on each "
        "device). Move it before the loop.",
        source=source,
        nbytes=total,
      )
      for source, total in repeated.items()
    ),
  ]


def _source(program: hlo.Program, *instructions: hlo.Instruction) -> str:
  """Returns the user's line of the first instruction that has one."""
  lines = (sources.source_line(program, one) for one in instructions)
  return next(filter(None, lines), "")


def _is_invariant(
  facts: StepFacts, found: Found, loop: hlo.Instruction
) -> bool:
  moved = dataflow.operands(facts.values, found.instruction)
  return bool(moved) and all(
    dataflow.is_invariant(facts.values, value, loop) for value in moved
  )


def _is_fsdp_accumulation(facts: StepFacts, found: Found) -> bool:
  """Returns whether a loop around the gradient gathers split parameters.

  That is meant: without it, all parameters would be whole in memory at once.
  """
  before, _, _ = found.instruction.op_name.partition("jvp(")
  leaves = map(
    facts.state_leaf, dataflow.operands(facts.values, found.instruction)
  )
  return "while/body" in before and any(x and x.is_param for x in leaves)


def _accumulated_bytes(facts: StepFacts, found: Found, sums: Sums) -> int:
  """Returns the bytes that a collective reduces only for sums over the turns.

  A sum of which each device keeps its part does not count: that is what FSDP
  does, so that no device has all gradients at once.
  """
  values = facts.values
  nbytes = 0
  for total, terms in sums:
    array = values.array(total)
    for term in terms:
      is_result = values.owner[term] is found.instruction
      if is_result and values.array(term).size == array.size:
        nbytes += array.nbytes
  return nbytes
