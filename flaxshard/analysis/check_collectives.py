"""Checks of what a step moves between devices, and how often."""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import re

from flaxshard.analysis import findings
from flaxshard.analysis.findings import Finding
from flaxshard.analysis.step_arrays import Leaf
from flaxshard.analysis.step_facts import StepFacts
from flaxshard.compiled import dataflow
from flaxshard.compiled import hlo
from flaxshard.compiled import sources
from flaxshard.compiled.find import Found
from flaxshard.state import summary

_size = summary.format_bytes

# How the compiler brings an array from one sharding to another.
_MOVING = ("all-gather", "all-to-all", "collective-permute")
_SLICES = ("dynamic-slice",)
# Matrix products of an optimizer, such as Shampoo's or Muon's, need whole
# matrices.
_PRODUCTS = ("dot_general", "conv_general_dilated")
# The gradient of max pooling.
_POOLING = "select_and_scatter"


@dataclasses.dataclass(frozen=True)
class Moved:
  """A collective that the user did not write, with what it moves.

  Attributes:
    found: The collective.
    operands: The values that it moves, as `StepFacts.values` numbers them.
    leaf: The array of the state that it moves; None if it is none, or unknown.
    op_name: JAX's name stack.
    source: The user's line, or "".
    nbytes: Bytes of its results in one call of the step.
    axes: The mesh axes along which it moves them.
  """

  found: Found
  operands: tuple[int, ...]
  leaf: Leaf | None
  op_name: str
  source: str
  nbytes: int
  axes: frozenset[str]


def check_collectives(facts: StepFacts, min_bytes: int) -> list[Finding]:
  """Finds collectives of parameters and activations that nothing explains."""
  if facts.mesh is None or facts.program is None:
    return []
  moved = list(filter(None, (_describe(facts, x) for x in facts.collectives)))
  expert_axes = _find_expert_axes(facts, moved)
  gathered, rematerialized, activations = [], [], []
  for one in moved:
    if one.nbytes < min_bytes:
      continue
    if _is_unexplained_gather(facts, one):
      gathered.append(one)
    elif _is_cut_again(facts, one):
      rematerialized.append(one)
    elif one.found.kind == "all-to-all" and one.axes <= expert_axes:
      continue  # tokens on the way to their experts, and back
    elif _moves_activations(facts, one):
      activations.append(one)
  pooled = [one for one in activations if _POOLING in one.op_name]
  return [
    *_gathered(facts, gathered),
    *_by_source(
      "rematerialization",
      rematerialized,
      "the compiler gathers a whole array and then cuts out another part of "
      "it, because it cannot go from one sharding to the other ({size} on each "
      "device). Constrain the array to one sharding, or change one dimension "
      "at a time.",
    ),
    *_by_source(
      "activations",
      [one for one in activations if _POOLING not in one.op_name],
      "{kinds} of activations over the axes of the batch ({size} on each "
      "device), so devices exchange examples. " + _advice(facts),
    ),
    *_by_source(
      "activations",
      pooled,
      "{kinds} of activations over the axes of the batch ({size} on each "
      "device): XLA does so for the gradient of max pooling in float16, not in "
      "bfloat16 or float32. Take the maximum of strided slices, or pool in "
      "another dtype.",
    ),
  ]


def _find_expert_axes(
  facts: StepFacts, moved: Iterable[Moved]
) -> frozenset[str]:
  """Returns the mesh axes along which stacked matrices are used in place."""
  elsewhere = {one.leaf.path for one in moved if one.leaf is not None}
  return frozenset[str]().union(
    *(
      leaf.axes_of_dim(dim) & leaf.axes
      for leaf in facts.params
      if leaf.path not in elsewhere
      for dim in range(len(leaf.shape) - 2)
    )
  )


def _advice(facts: StepFacts) -> str:
  axes = sorted(facts.batch_axes)
  if any(leaf.axes & facts.batch_axes for leaf in facts.params):
    # A product of two split operands can move either of them.
    names = ", ".join(map(repr, axes))
    spec = f"P({names})" if len(axes) < 2 else f"P(({names}))"
    return (
      "The parameters are split over the same axes, and the compiler moves the "
      "activations instead of them. Constrain the inputs and outputs of each "
      f"layer with jax.lax.with_sharding_constraint(x, {spec})."
    )
  return (
    "Keep the batch dimension first, do not mix it with others in a reshape or "
    "an index, and constrain activations to the sharding of the batch."
  )


def _describe(facts: StepFacts, found: Found) -> Moved | None:
  """Returns what a collective moves; None if it cannot be a mistake."""
  assert facts.program is not None
  instruction = found.instruction
  named = [instruction, *reversed(found.site.callers[-1:])]
  # A gathered argument may have the argument's name, in place of a name stack.
  if not any(i.op_name.startswith("jit(") for i in named):
    named += _readers(facts, instruction)
  stacks = (i.op_name for i in named if i.op_name.startswith("jit("))
  op_name = next(stacks, "")
  # In jax.shard_map the user writes the collectives. What stands in a
  # conditional is rare, such as a commit of AGN.
  if "shard_map" in op_name or found.site.branches:
    return None
  if instruction.opcode == "send":
    return None
  operands = tuple(dataflow.operands(facts.values, instruction))
  leaf = next(filter(None, map(facts.state_leaf, operands)), None)
  source = next(
    (line for i in named if (line := sources.source_line(facts.program, i))),
    "",
  )
  nbytes = sum(array.nbytes for array in found.results)
  return Moved(
    found,
    operands,
    leaf,
    op_name,
    source,
    int(nbytes * found.site.executions),
    facts.spanned_axes(found),
  )


def _is_unexplained_gather(facts: StepFacts, one: Moved) -> bool:
  """Returns whether a parameter is gathered, and not for FSDP."""
  if one.found.kind != "all-gather":
    return False
  is_forward = "jvp(" in one.op_name or not facts.differentiates
  if one.leaf is not None:
    if not one.leaf.is_param:
      return one.leaf.slot_of is not None
    # FSDP splits parameters over the axes of the batch, and the model gathers
    # them where it uses them.
    fsdp = one.axes <= facts.batch_axes and is_forward
    return not fsdp and not _is_product(one)
  # The new parameters, or an average: known by the size alone.
  if is_forward or not one.op_name or _is_product(one):
    return False
  sizes = {leaf.size for leaf in facts.state if leaf.axes and leaf.size > 1}
  if not any(array.size in sizes for array in one.found.results):
    return False
  # What only goes out of the step is a question of the new state's sharding.
  assert facts.program is not None
  root = facts.program.entry.root
  readers = _readers(facts, one.found.instruction)
  return not all(reader is root for reader in readers)


def _readers(
  facts: StepFacts, collective: hlo.Instruction
) -> list[hlo.Instruction]:
  """Returns what computes with the result of a collective, behind its casts."""
  result = list(facts.values.of(collective))
  found = dataflow.readers(facts.values, result, stop=_SLICES)
  return [facts.values.owner[value] for value in found]


def _is_product(one: Moved) -> bool:
  in_model = "jvp(" in one.op_name
  return not in_model and one.op_name.rsplit("/", 1)[-1] in _PRODUCTS


def _is_cut_again(facts: StepFacts, one: Moved) -> bool:
  """Returns whether each device keeps a part of what it gathers."""
  if one.found.kind != "all-gather" or one.leaf is not None:
    return False
  readers = _readers(facts, one.found.instruction)
  # A loop cuts out one part in each turn: no device number goes into that.
  return bool(readers) and all(
    reader.opcode in _SLICES
    and dataflow.depends_on(
      facts.values,
      dataflow.operands(facts.values, reader)[1:],
      "partition-id",
    )
    for reader in readers
  )


def _moves_activations(facts: StepFacts, one: Moved) -> bool:
  """Returns whether examples are exchanged."""
  if one.leaf is not None or not one.axes or not one.axes <= facts.batch_axes:
    return False
  sizes = [array.size for array in one.found.results]
  if any(size in facts.state_sizes for size in sizes):
    return False
  if "transpose(" in one.op_name:
    return _gathers_examples(facts, one)
  is_forward = "jvp(" in one.op_name or not facts.differentiates
  if one.found.kind == "all-reduce":
    if _looks_up_rows(facts, one):
      return False
    # Of features that are split. A sum over examples, such as a covariance,
    # has them no more.
    return "jvp(" in one.op_name and any(
      facts.has_examples(array.dims, one.axes) for array in one.found.results
    )
  if one.found.kind not in _MOVING:
    return False
  # The borders of images that are split are permuted, over other axes.
  return is_forward or any(map(facts.is_from_batch, one.operands))


def _looks_up_rows(facts: StepFacts, one: Moved) -> bool:
  """Returns whether devices sum the rows that each finds in its own part.

  FSDP splits tables by rows. To gather a whole table would take more bytes.
  """
  # Of lookups in one collective: "model/(a/gather:b/gather)".
  if not one.op_name.rstrip(")").endswith("/gather"):
    return False
  rows = {
    leaf.shape[1:]
    for leaf in facts.params
    if len(leaf.shape) == 2 and one.axes <= leaf.axes_of_dim(0)
  }
  return all(tuple(array.dims[-1:]) in rows for array in one.found.results)


def _gathers_examples(facts: StepFacts, one: Moved) -> bool:
  """Returns whether the whole batch is gathered along its first dimension.

  In the backward pass nothing else counts: the products there that give a
  parameter's gradient may exchange what they sum.
  """
  dim = one.found.instruction.attribute(r"[^_]dimensions=\{(\d+)\}")
  if one.found.kind != "all-gather" or not dim or _is_product(one):
    return False
  return any(
    facts.has_examples(array.dims[int(dim) :][:1], one.axes)
    for array in one.found.results
  )


def _gathered(facts: StepFacts, moved: Iterable[Moved]) -> list[Finding]:
  known: dict[str, list[Moved]] = {}
  unknown = []
  for one in moved:
    if one.leaf is None:
      unknown.append(one)
    else:
      known.setdefault(one.leaf.path, []).append(one)
  found = _by_source(
    "gathered parameter",
    unknown,
    "arrays of the size of split parameters are gathered on every device "
    "({size}). Compute on each array by itself: flattening or concatenating "
    "them needs all of them whole.",
  )
  if known:
    paths = tuple(known)
    nbytes = sum(one.nbytes for group in known.values() for one in group)
    source = next((x.source for g in known.values() for x in g if x.source), "")
    axes = frozenset[str]().union(*(x.axes for g in known.values() for x in g))
    names = ", ".join(map(repr, sorted(axes)))
    text = (
      f"{findings.list_paths(paths)} gathered on every device over {names} "
      f"({_size(nbytes)}), which the rules do not explain. Look for an "
      "operation or a sharding constraint that needs it whole, or split it "
      "along another dimension."
    )
    found.append(Finding("gathered parameter", text, paths, source, nbytes))
  return found


def _by_source(
  kind: str, moved: Iterable[Moved], message: str
) -> list[Finding]:
  """Returns one finding for each line."""
  lines: dict[str, list[Moved]] = {}
  for one in moved:
    lines.setdefault(one.source, []).append(one)
  found = []
  for source, group in lines.items():
    nbytes = sum(one.nbytes for one in group)
    kinds = " and ".join(sorted({one.found.kind for one in group}))
    text = message.format(size=_size(nbytes), kinds=kinds)
    if not source:
      text += f" (In {_short(group[0].op_name)}.)"
    found.append(Finding(kind, text, source=source, nbytes=nbytes))
  return found


def _short(op_name: str) -> str:
  return re.sub(r"^jit\([^)]*\)/", "", op_name) or "the program"
