"""Checks of the state: how it is split, donated, and returned."""

from __future__ import annotations

import collections
from collections.abc import Sequence
import dataclasses
import math
import re
from typing import Any

import jax

from flaxshard.analysis import findings
from flaxshard.analysis.findings import Finding
from flaxshard.analysis.step_arrays import Leaf
from flaxshard.analysis.step_facts import StepFacts
from flaxshard.core import trees
from flaxshard.partitioning import rules as rules_lib
from flaxshard.state import summary

PyTree = Any
_size = summary.format_bytes


def check_parameters(
  facts: StepFacts, params: PyTree, rules: rules_lib.Rules, min_bytes: int
) -> list[Finding]:
  """Finds parameters that are whole on every device against their rule.

  Without rules, a parameter is compared with the others: it should be split if
  the same parameter of another layer is, or if it is larger than all that are.

  Args:
    facts: The step.
    params: The parameters.
    rules: The rules that should split them; None if they are unknown.
    min_bytes: Smallest number of bytes to report.
  """
  if facts.mesh is None:
    return []
  if rules is not None:
    return _against_rules(facts, params, rules, min_bytes)
  split = [leaf for leaf in facts.params if leaf.axes]
  layers: collections.Counter[Any] = collections.Counter()
  for leaf in facts.params:
    layers[_without_numbers(leaf.path), leaf.shape] += 1 if leaf.axes else -1
  largest = max((x.size for x in split), default=0)
  axes = frozenset[str]().union(*(x.axes for x in split))
  parts = min((facts.mesh.shape[a] for a in axes), default=1)

  def is_suspect(leaf: Leaf) -> bool:
    if leaf.axes or leaf.nbytes < min_bytes or not split:
      return False
    # Most layers are split: two layers may well have different purposes.
    if layers[_without_numbers(leaf.path), leaf.shape] > 0:
      return True
    return leaf.size > largest and any(d % parts == 0 for d in leaf.shape)

  suspects = [leaf for leaf in facts.params if is_suspect(leaf)]
  return _group(
    "replicated parameter",
    suspects,
    "{paths} {are} whole on every device ({size}), although parameters like "
    "it, or smaller ones, are split. Add a rule that splits it, or pass rules= "
    "if it is meant so.",
  )


def check_slots(facts: StepFacts, min_bytes: int) -> list[Finding]:
  """Finds slots that are not split as their parameter is."""
  params = {x.path.removeprefix("params/"): x for x in facts.params}
  whole, misplaced = [], []
  for leaf in facts.state:
    param = params.get(leaf.slot_of or "")
    if param is None or leaf.shape != param.shape or not param.axes:
      continue
    if leaf.local_size > param.local_size:
      if leaf.nbytes >= min_bytes:
        whole.append(leaf)
    elif (
      leaf.local_size == param.local_size
      and leaf.nbytes >= min_bytes
      and not _same_sharding(leaf, param)
    ):
      misplaced.append(leaf)
  return [
    *_group(
      "replicated slot",
      whole,
      "{paths} {are} not split as the parameter is ({size} on each device). "
      "Initialize it with the sharding of the parameter: "
      "create_train_state(..., strategy=) does.",
    ),
    *_group(
      "misplaced slot",
      misplaced,
      "{paths} {are} split otherwise than the parameter ({size} on each "
      "device), so each update moves data. Initialize it with the sharding of "
      "the parameter.",
    ),
  ]


def check_new_state(facts: StepFacts) -> list[Finding]:
  """Finds arrays that a step returns with another sharding, dtype or shape.

  Of any size: a small one compiles the second step again, too.
  """
  if facts.outputs is None:
    return []
  changed: dict[tuple[str, str, str], list[Leaf]] = {}
  for before, after in zip(facts.state, facts.outputs, strict=True):
    if change := _describe_change(before, after):
      changed.setdefault(change, []).append(after)
  message = "{paths}: {old} goes in, {new} comes back, {effect}"
  return [
    finding
    for (old, new, effect), leaves in changed.items()
    for finding in _group(
      "changed state", leaves, message, old=old, new=new, effect=effect
    )
  ]


def check_donation(facts: StepFacts, min_bytes: int) -> list[Finding]:
  """Finds arrays of the state that the new state does not overwrite."""
  if facts.outputs is None or facts.program is None:
    return []
  aliased = {number for number, _ in facts.program.aliases.values()}
  kept, lost = [], []
  for before, after in zip(facts.state, facts.outputs, strict=True):
    if before.nbytes < min_bytes or before.parameter in aliased:
      continue
    # What comes back otherwise cannot overwrite it: `check_new_state` says so.
    if (before.shape, before.dtype) != (after.shape, after.dtype):
      continue
    if not before.donated:
      kept.append(before)
    elif before.parameter is not None:
      lost.append(before)
  # JAX may give the memory of one array to another: what came back otherwise
  # explains these.
  if check_new_state(facts):
    lost = []
  return [
    *_group(
      "donation",
      kept,
      "{paths} {are} not donated, so the old and the new state are in memory "
      "together ({size} more). Jit the step with donate_argnums=0, or the "
      "position of the state.",
    ),
    *_group(
      "donation",
      lost,
      "{paths} {are} donated but not overwritten ({size} more). Do not return "
      "the old value as well, and donate no array twice.",
    ),
  ]


def check_axes(facts: StepFacts, min_bytes: int) -> list[Finding]:
  """Finds mesh axes whose devices all compute the same."""
  if facts.mesh is None or facts.program is None or not facts.batch:
    return []
  used = frozenset[str]().union(
    *(leaf.axes for leaf in (*facts.state, *facts.batch))
  )
  idle = [n for n, k in facts.mesh.shape.items() if k > 1 and n not in used]
  # A step may split its batch inside.
  for found in facts.collectives:
    spanned = facts.spanned_axes(found)
    idle = [name for name in idle if name not in spanned]
  largest = max(facts.batch, key=lambda leaf: leaf.nbytes)
  if not idle or largest.nbytes < min_bytes or not largest.shape:
    return []
  number = math.prod(facts.mesh.shape[name] for name in idle)
  axes = ", ".join(map(repr, idle))
  return [
    Finding(
      "repeated work",
      f"nothing is split over the mesh axis {axes}: {number} devices compute "
      "the same. Split the batch over it, as strategy.shard_batch(batch) does.",
      nbytes=largest.nbytes,
    )
  ]


def _against_rules(
  facts: StepFacts, params: PyTree, rules: rules_lib.Rules, min_bytes: int
) -> list[Finding]:
  mesh = facts.mesh
  assert mesh is not None
  specs = rules_lib.resolve(rules, mesh, params)
  expected = trees.leaves_by_path(
    jax.tree.map(
      lambda spec: jax.sharding.NamedSharding(mesh, spec),
      specs,
      is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec),
    )
  )
  suspects = []
  for leaf, sharding in zip(facts.params, expected.values(), strict=True):
    ruled = dataclasses.replace(leaf, sharding=sharding)
    if leaf.nbytes - ruled.nbytes >= min_bytes:
      suspects.append(leaf)
  return _group(
    "replicated parameter",
    suspects,
    "{paths} {are} not split as the rules say ({size} on each device). Create "
    "the state with these rules: create_train_state(..., strategy=, rules=).",
  )


def _describe_change(before: Leaf, after: Leaf) -> tuple[str, str, str] | None:
  """Returns what an array was, what it came back as, and what that means."""
  again = "so the second step compiles again"
  lost = f"{again} and nothing can overwrite the old array"
  if before.shape != after.shape:
    old, new = (f"the shape {list(x.shape)}" for x in (before, after))
    return old, new, f"{lost}. Return arrays of the same shapes."
  if before.dtype != after.dtype:
    effect = f"{lost}. Cast it back in the step."
    return str(before.dtype), str(after.dtype), effect
  if not _same_sharding(before, after):
    old, new = (f"the sharding {_spec(x)}" for x in (before, after))
    advice = "Pass out_shardings= to jax.jit, with the shardings of the state."
    return old, new, f"{again}. {advice}"
  if before.is_weak != after.is_weak:
    kinds = ("a strong type", "a weak type")
    advice = "Create it with a dtype, as in jnp.asarray(1.0, jnp.float32)."
    return kinds[before.is_weak], kinds[after.is_weak], f"{again}. {advice}"
  return None


def _group(
  kind: str, leaves: Sequence[Leaf], message: str, **words: str
) -> list[Finding]:
  """Returns one finding for all leaves, the largest first; none for none.

  Args:
    kind: Its kind.
    leaves: The arrays that it concerns.
    message: Its text, with `{paths}`, `{are}`, `{size}` and what `words` has.
    **words: Further words of the text.
  """
  if not leaves:
    return []
  ordered = sorted(leaves, key=lambda leaf: leaf.nbytes, reverse=True)
  paths = tuple(leaf.path for leaf in ordered)
  nbytes = sum(leaf.nbytes for leaf in ordered)
  text = message.format(
    paths=findings.list_paths(paths),
    are="are" if len(paths) > 1 else "is",
    size=_size(nbytes),
    **words,
  )
  return [Finding(kind, text, paths, nbytes=nbytes)]


def _same_sharding(a: Leaf, b: Leaf) -> bool:
  if a.sharding is None or b.sharding is None:
    return True
  # PRNG keys: is_equivalent_to counts the dimensions of the array of keys.
  return bool(a.sharding.is_equivalent_to(b.sharding, len(a.shape)))


def _spec(leaf: Leaf) -> str:
  if isinstance(leaf.sharding, jax.sharding.NamedSharding):
    return f"P({', '.join(map(repr, leaf.sharding.spec))})"
  return str(leaf.sharding)


def _without_numbers(path: str) -> str:
  return re.sub(r"\d+", "#", path)
