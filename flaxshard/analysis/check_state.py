"""Checks of the state: how it is split, donated, and returned."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
import dataclasses
import re
from typing import Any

import jax

from flaxshard.analysis import findings
from flaxshard.analysis.findings import Finding
from flaxshard.analysis.step_facts import Leaf
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
    lambda leaf: leaf.nbytes,
    lambda paths, size: (
      f"{paths} {_is_are(paths)} whole on every device ({size}), although "
      "parameters like it are split. Add a rule that splits it, or pass "
      "rules= if it is meant so."
    ),
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
  advice = "Initialize it with the sharding of the parameter"
  return [
    *_group(
      "replicated slot",
      whole,
      lambda leaf: leaf.nbytes,
      lambda paths, size: (
        f"{paths} {_is_are(paths)} not split as the parameter is ({size} on "
        f"each device). {advice}: create_train_state(..., strategy=) does."
      ),
    ),
    *_group(
      "misplaced slot",
      misplaced,
      lambda leaf: leaf.nbytes,
      lambda paths, size: (
        f"{paths} {_is_are(paths)} split otherwise than the parameter ({size} "
        f"on each device), so each update moves data. {advice}."
      ),
    ),
  ]


def check_new_state(facts: StepFacts) -> list[Finding]:
  """Finds arrays that a step returns with another sharding, dtype or shape.

  Of any size: a small one compiles the second step again, too.
  """
  if facts.outputs is None:
    return []
  dtypes, shardings = [], []
  for before, after in zip(facts.state, facts.outputs, strict=True):
    if before.dtype != after.dtype or before.shape != after.shape:
      dtypes.append((before, after))
    elif not _same_sharding(before, after):
      shardings.append((before, after))
  found = []
  for (old, new), pairs in _group_pairs(dtypes, lambda x: str(x.dtype)):
    found.append(
      _changed(
        pairs,
        f"come back as {new} but went in as {old}",
        "so the second step compiles again and nothing can overwrite them. "
        "Cast them back in the step",
      )
    )
  for (old, new), pairs in _group_pairs(shardings, _spec):
    found.append(
      _changed(
        pairs,
        f"come back with the sharding {new} but went in with {old}",
        "so the second step compiles again. Pass out_shardings= to jax.jit, "
        "with the shardings of the state",
      )
    )
  return found


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
      lambda leaf: leaf.nbytes,
      lambda paths, size: (
        f"{paths} {_is_are(paths)} not donated, so the old and the new state "
        f"are in memory together ({size} more). Jit the step with "
        "donate_argnums=0, or the position of the state."
      ),
    ),
    *_group(
      "donation",
      lost,
      lambda leaf: leaf.nbytes,
      lambda paths, size: (
        f"{paths} {_is_are(paths)} donated but not overwritten ({size} more): "
        "the program returns or needs the old value as well."
      ),
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
  number = 1
  for name in idle:
    number *= facts.mesh.shape[name]
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
    lambda leaf: leaf.nbytes,
    lambda paths, size: (
      f"{paths} {_is_are(paths)} not split as the rules say ({size} on each "
      "device). Create the state with these rules: create_train_state(..., "
      "strategy=, rules=)."
    ),
  )


def _group(
  kind: str,
  leaves: Sequence[Leaf],
  cost: Callable[[Leaf], int],
  message: Callable[[str, str], str],
) -> list[Finding]:
  """Returns one finding for all leaves, the largest first; none for none."""
  if not leaves:
    return []
  ordered = sorted(leaves, key=cost, reverse=True)
  paths = tuple(leaf.path for leaf in ordered)
  nbytes = sum(map(cost, ordered))
  text = message(findings.list_paths(paths), _size(nbytes))
  return [Finding(kind, text, paths, nbytes=nbytes)]


def _group_pairs(
  pairs: Iterable[tuple[Leaf, Leaf]], key: Callable[[Leaf], str]
) -> list[tuple[tuple[str, str], list[tuple[Leaf, Leaf]]]]:
  groups: dict[tuple[str, str], list[tuple[Leaf, Leaf]]] = {}
  for before, after in pairs:
    groups.setdefault((key(before), key(after)), []).append((before, after))
  return list(groups.items())


def _changed(
  pairs: Sequence[tuple[Leaf, Leaf]], change: str, effect: str
) -> Finding:
  ordered = sorted(pairs, key=lambda pair: pair[1].nbytes, reverse=True)
  paths = tuple(before.path for before, _ in ordered)
  return Finding(
    "changed state",
    f"{findings.list_paths(paths)} {change}, {effect}.",
    paths,
    nbytes=sum(after.nbytes for _, after in ordered),
  )


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


def _is_are(paths: str) -> str:
  return "are" if "," in paths or " and " in paths else "is"
