"""Classifies the arguments and outputs of a program: parameters, slots, others.

JAX writes the path of each argument's leaf into the program, such as
`state.params['Dense_0']['kernel']`. Outputs have no names in the program: an
output that reuses a donated argument's memory is what that argument is, and
`Compiled.out_tree` has the paths of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import re
from typing import Any

import jax

from flaxshard.compiled import hlo

_KEY = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|([^\]]*))\]|\.?([^.\[\]]+)")


@dataclasses.dataclass(frozen=True)
class Leaf:
  """The category of one array of the arguments or outputs.

  Attributes:
    category: "parameter" (also AGN's local copy of one), "optimizer state",
      "state" (another array of the tree that has the parameters), "data" (of a
      tree without parameters), or "unknown".
    parameter: Path of the parameter, such as `Dense_0/kernel`, or of the one
      that a slot or another array of the state belongs to; "" if none.
  """

  category: str
  parameter: str = ""


def split_path(path: str) -> tuple[str, ...]:
  """Returns the keys of a path that JAX wrote.

  Example:
    >>> split_path("state.params['Dense_0']['kernel']")
    ('state', 'params', 'Dense_0', 'kernel')
  """
  return tuple(
    next(group for group in match.groups() if group is not None)
    for match in _KEY.finditer(path)
  )


_UNKNOWN = Leaf("unknown")


def classify(paths: Sequence[str]) -> list[Leaf]:
  """Returns what the leaves with these paths are.

  Args:
    paths: Paths of all leaves; "" where it is unknown. Without parameters
      among them, all are unknown: there is no state to tell data from.

  Example:
    >>> classify(["s.params['w']", "s.opt_state[0].mu['w']", "batch['x']"])[1]
    Leaf(category='optimizer state', parameter='w')
  """
  keys = [split_path(path) for path in paths]
  parameters = {
    k[k.index("params") + 1 :]
    for k in keys
    if "params" in k and "opt_state" not in k
  }
  # The trees that have parameters: the first key, or all for a bare tree.
  states = {k[0] for k in keys if "params" in k}
  if not parameters:
    return [_UNKNOWN] * len(paths)
  return [_leaf(k, parameters, states) for k in keys]


def _leaf(
  keys: tuple[str, ...],
  parameters: set[tuple[str, ...]],
  states: set[str],
) -> Leaf:
  if not keys:
    return _UNKNOWN
  ends = (keys[start:] for start in range(len(keys)))
  parameter = "/".join(next((end for end in ends if end in parameters), ()))
  if "opt_state" in keys:
    return Leaf("optimizer state", parameter)
  if "params" in keys or "local_params" in keys:
    return Leaf("parameter", parameter)
  if keys[0] in states:
    return Leaf("state", parameter)
  return Leaf("data")


def argument_leaves(program: hlo.Program) -> dict[int, Leaf]:
  """Returns what each parameter of the entry computation is, by number.

  An argument without a telling name is what the output in its memory is.
  """
  leaves = _named_arguments(program)
  outputs = _named_outputs(program)
  for output, (number, _) in program.aliases.items():
    if outputs and leaves.get(number, _UNKNOWN) == _UNKNOWN:
      leaves[number] = outputs[output[0] if output else 0]
  return leaves


def output_leaves(program: hlo.Program) -> list[Leaf]:
  """Returns what each array of the result is."""
  leaves = _named_outputs(program)
  if leaves:
    return leaves
  arguments = _named_arguments(program)
  leaves = [_UNKNOWN] * _num_outputs(program)
  for output, (number, _) in program.aliases.items():
    leaves[output[0] if output else 0] = arguments.get(number, _UNKNOWN)
  if any(leaf.category == "parameter" for leaf in leaves):
    # The state is donated: the rest are the step's other results.
    leaves = [Leaf("data") if x == _UNKNOWN else x for x in leaves]
  return leaves


def _num_outputs(program: hlo.Program) -> int:
  root = program.entry.root
  return len(root.arrays) if root is not None else 0


def _named_arguments(program: hlo.Program) -> dict[int, Leaf]:
  parameters = program.entry.parameters
  leaves = classify([p.op_name for p in parameters])
  return {
    int(p.literal): leaf for p, leaf in zip(parameters, leaves, strict=True)
  }


def _named_outputs(program: hlo.Program) -> list[Leaf]:
  """Returns what the outputs are by their paths; empty if those are unknown."""
  paths = _output_paths(program.out_tree, _num_outputs(program))
  return classify(paths) if paths else []


def _output_paths(out_tree: Any, count: int) -> list[str] | None:
  """Returns the paths of a tree's leaves; None if they cannot be told."""
  if out_tree is None or out_tree.num_leaves != count:
    return None
  try:
    tree = jax.tree.unflatten(out_tree, range(count))
  except (TypeError, ValueError, AttributeError):
    # A node that checks its children rejects numbers in place of arrays.
    return None
  found = jax.tree_util.tree_leaves_with_path(tree)
  return [jax.tree_util.keystr(path) for path, _ in found]
