"""Checks of collectives in loops that could run once, outside."""

from __future__ import annotations

from flaxshard.analysis.findings import Finding
from flaxshard.analysis.step_facts import StepFacts
from flaxshard.compiled import dataflow
from flaxshard.compiled import hlo
from flaxshard.compiled import sources
from flaxshard.compiled.find import Found
from flaxshard.state import summary

_size = summary.format_bytes
_REDUCTIONS = ("all-reduce", "reduce-scatter")


def check_loops(facts: StepFacts, min_bytes: int) -> list[Finding]:
  """Finds collectives that repeat in a loop what could be done outside."""
  if facts.program is None or facts.mesh is None:
    return []
  sums: dict[str, int] = {}
  repeated: dict[str, int] = {}
  for found in facts.collectives:
    loop = dataflow.enclosing_loop(found.site)
    turns = found.site.executions
    if loop is None or (found.site.known and turns <= 1):
      continue
    nbytes = sum(array.nbytes for array in found.results)
    total = int(nbytes * max(turns, 2))
    if total < min_bytes:
      continue
    callers = reversed(found.site.callers)
    source = _source(facts.program, found.instruction, *callers)
    if _is_invariant(facts, found, loop):
      if not _is_fsdp_accumulation(facts, found):
        repeated[source] = repeated.get(source, 0) + total
    elif found.kind in _REDUCTIONS and _is_accumulated(
      facts.program, found, loop
    ):
      # The loop is what to change, unless the user wrote the collective.
      if "shard_map" not in found.instruction.op_name:
        source = _source(facts.program, found.site.callers[loop]) or source
      sums[source] = sums.get(source, 0) + total
  kind = "collective in loop"
  return [
    *(
      Finding(
        kind,
        f"a loop reduces in each turn what it adds up ({_size(total)} on each "
        "device). Add up each device's own values, and reduce the sum after "
        "the loop: in Strategy.run or jax.shard_map, apply_gradients does so.",
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


def _is_invariant(facts: StepFacts, found: Found, loop: int) -> bool:
  assert facts.program is not None
  operands = [
    dataflow.Value(i, found.site.callers)
    for i in found.instruction.operand_instructions
  ]
  return bool(operands) and all(
    dataflow.is_invariant(facts.program, value, loop) for value in operands
  )


def _is_fsdp_accumulation(facts: StepFacts, found: Found) -> bool:
  """Returns whether a loop around the gradient gathers split parameters.

  That is meant: without it, all parameters would be whole in memory at once.
  """
  before, _, _ = found.instruction.op_name.partition("jvp(")
  around_gradient = "while/body" in before
  values = [
    dataflow.Value(i, found.site.callers)
    for i in found.instruction.operand_instructions
  ]
  return around_gradient and any(
    (leaf := facts.state_leaf(value)) is not None and leaf.is_param
    for value in values
  )


def _is_accumulated(program: hlo.Program, found: Found, position: int) -> bool:
  """Returns whether a loop only adds up what a collective reduces."""
  callers = found.site.callers[: position + 1]
  loop = found.site.callers[position]
  for result, readers in dataflow.carried(program, loop):
    # Read for the sum alone: nothing in the loop needs the sum so far.
    if len(readers) != 1:
      continue
    terms = _terms(program, dataflow.Value(result, callers), position)
    names = {term.instruction.name for term, _ in terms}
    # An average over the turns multiplies the carried value too.
    carries = any(
      term.instruction is readers[0] and not is_scaled
      for term, is_scaled in terms
    )
    if carries and len(terms) > 1 and found.instruction.name in names:
      if _count_readers(readers[0]) == 1:
        return True
  return False


def _terms(
  program: hlo.Program, value: dataflow.Value, loop: int
) -> list[tuple[dataflow.Value, bool]]:
  """Returns the terms of a sum, and whether each is multiplied."""
  stack, terms = [(value, False)], []
  for _ in range(1000):
    if not stack:
      break
    one, is_scaled = stack.pop()
    one = dataflow.resolve(program, one)
    opcode, operands = one.instruction.opcode, one.operands
    # The element of a combined all-reduce, or the end of one.
    is_result = opcode == "get-tuple-element" or opcode.endswith("-done")
    if is_result and operands[0].instruction.opcode.startswith(_REDUCTIONS):
      stack.append((operands[0], is_scaled))
    elif opcode in ("add", "subtract"):
      stack.extend((x, is_scaled) for x in operands)
    elif opcode == "select":  # zeros in the first turn
      stack.extend((x, is_scaled) for x in operands[1:])
    elif opcode == "negate" or (dataflow.is_move(one.instruction) and operands):
      stack.append((operands[0], is_scaled))
    elif factors := _split_product(program, one, loop):
      stack.append((factors, True))
    else:
      terms.append((one, is_scaled))
  return terms


def _split_product(
  program: hlo.Program, value: dataflow.Value, loop: int
) -> dataflow.Value | None:
  """Returns the operand that the same factor multiplies in each turn."""
  opcode, operands = value.instruction.opcode, value.operands
  if opcode not in ("multiply", "divide"):
    return None
  if dataflow.is_invariant(program, operands[1], loop):
    return operands[0]
  if opcode == "multiply" and dataflow.is_invariant(program, operands[0], loop):
    return operands[1]
  return None


def _count_readers(instruction: hlo.Instruction) -> int:
  return sum(
    instruction.name in other.operands
    for other in instruction.computation.instructions.values()
  )
