"""Checks that a traced program gives every replica the same TrainState.

`Strategy.run` returns one TrainState for all replicas, so its leaves must not
differ between them. JAX does not check that: `jax.shard_map` trusts
`out_specs=P()`, and every device keeps its own array. This module follows each
value through the jaxpr instead, before anything is compiled.

For each value it computes which replicas are known to hold the same one. An
operation on several values can only tell more replicas apart. Only collectives
make replicas agree, by the rules in `replication`. A primitive that the check
cannot follow tells all replicas apart: unknown is an error, never accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import dataclasses
from typing import Any

from jax.extend import core

from flaxshard.core import programs
from flaxshard.core import tracing
from flaxshard.replicas import context as replica_context
from flaxshard.strategy import replication
from flaxshard.strategy.replication import Replication

# These call one jaxpr with their own inputs and outputs.
_CALLS = tracing.CALLS | tracing.CUSTOM_CALLS | {"shard_map"}
# These compute each output from the input in the same place alone.
_IDENTITIES = frozenset(("optimization_barrier", "pvary", "pcast"))
# The check cannot look into these. They are trusted to return the same results
# for the same inputs, as the documentation of `pure_callback` demands.
_OPAQUE = frozenset(
  "pure_callback ffi_call pallas_call custom_partitioning "
  "call_hi_primitive".split()
)
# The results of these may differ between devices even for the same inputs.
_IMPURE = frozenset(("io_callback", "infeed", "rng_uniform"))

_MAX_LISTED = 8


# Decides on an equation before the rules of this module: from the equation and
# the `Replication` of its inputs, that of its outputs, or None.
Rule = Callable[[Any, list[Replication]], list[Replication] | None] | None


def check(
  outputs: Sequence[Replication],
  paths: Sequence[str],
  groups: Sequence[replication.Groups],
) -> None:
  """Raises if replicas may differ in an output that they must share.

  Args:
    outputs: The `Replication` of each output that is checked.
    paths: The path of each of them in what `fn` returned.
    groups: For each of them, the groups of replicas within which it must be the
      same: one group of all replicas, unless a wrapper keeps groups apart.

  Raises:
    ValueError: An output may differ; the message names its path, the primitives
      that make it differ, and the remedy.
  """
  own_data, unknown = [], []
  for path, found, within in zip(paths, outputs, groups, strict=True):
    if found.same_within(within):
      continue
    if found.causes:
      unknown.append(f"{path} ({', '.join(sorted(found.causes))})")
    else:
      own_data.append(path)
  problems = []
  if own_data:
    problems.append(f"follow from a replica's own data: {abbreviate(own_data)}")
  if unknown:
    problems.append(f"may differ after these primitives: {abbreviate(unknown)}")
  if problems:
    raise ValueError(
      "run: a TrainState must come back the same from every replica, but these "
      f"leaves {'; these '.join(problems)}. state.apply_gradients averages "
      "gradients and the collections it is handed; otherwise use "
      "get_replica_context().all_reduce('mean', ...). If you know that a value "
      "is the same on all replicas, bit for bit, mark it with "
      "get_replica_context().assume_replicated(...)."
    )


def propagate(
  jaxpr: Any,
  inputs: Sequence[Replication],
  num_replicas: int,
  rule: Rule = None,
) -> list[Replication]:
  """Returns the `Replication` of each output of a jaxpr.

  Args:
    jaxpr: A `Jaxpr`, or a `ClosedJaxpr`.
    inputs: The `Replication` of each input.
    num_replicas: The number of replicas.
    rule: Decides on equations before the rules of this module.
  """
  return _Propagation(num_replicas, rule).run(jaxpr, list(inputs))


class _Propagation:
  """Follows values through jaxprs, for one number of replicas."""

  def __init__(self, num_replicas: int, rule: Rule):
    self.num_replicas = num_replicas
    self.rule = rule
    # One object for all such values: `replication.join` compares by identity.
    self.replicated = replication.replicated(num_replicas)

  def run(self, jaxpr: Any, inputs: list[Replication]) -> list[Replication]:
    """Returns the `Replication` of each output of a jaxpr."""
    jaxpr = programs.open_program(jaxpr)
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def look_up(atom: Any) -> Replication:
      # Literals and constants stand in the program, which all replicas share.
      if isinstance(atom, core.Literal):
        return self.replicated
      return known.get(atom, self.replicated)

    for eqn in jaxpr.eqns:
      given = [look_up(atom) for atom in eqn.invars]
      refs = [atom for atom in eqn.invars if _is_ref(atom)]
      if refs:
        # The equation may write any of its inputs to a mutable array.
        found = self.unfollowed(eqn, given)
        known |= dict.fromkeys(refs, found)
        outputs = [found] * len(eqn.outvars)
      else:
        outputs = self.equation(eqn, given)
      known |= zip(eqn.outvars, outputs, strict=True)
    return [look_up(atom) for atom in jaxpr.outvars]

  def equation(self, eqn: Any, given: list[Replication]) -> list[Replication]:
    """Returns the `Replication` of each output of an equation."""
    decided = None if self.rule is None else self.rule(eqn, given)
    if decided is not None:
      return decided
    # An asynchronous collective is two primitives. The second one, `*_done`, is
    # a function of the result of the first one.
    name = eqn.primitive.name.removesuffix("_start")
    params = eqn.params
    if name == "name":
      marked = params["name"] == replica_context.ASSUMED_REPLICATED
      return [self.replicated] if marked else given
    if name in _IDENTITIES:
      return given
    if name == "cond":
      branches = [self.run(branch, given[1:]) for branch in params["branches"]]
      return [
        self.join([given[0], *outputs])
        for outputs in zip(*branches, strict=True)
      ]
    if name == "while":
      return self.while_loop(params, given)
    if name == "scan":
      return self.scan(params, given)
    if name == "custom_linear_solve":
      return self.linear_solve(params, given)
    if name in _CALLS:
      (body,) = core.jaxprs_in_params(params)
      return self.run(body, given)
    over = params.get("axes", params.get("axis_name"))
    if replication.names_replicas(over):
      if name == "axis_index":
        return [replication.per_replica(self.num_replicas)]
      return [replication.apply_collective(name, params, x) for x in given]
    return [self.unfollowed(eqn, given)] * len(eqn.outvars)

  def unfollowed(self, eqn: Any, given: list[Replication]) -> Replication:
    """Returns the output of an equation as a function of all its inputs."""
    name = eqn.primitive.name
    # A collective in the body of a kernel, or one that this check has no rule
    # for, makes the result more than a function of the inputs.
    if name in _IMPURE or _mentions_replicas(eqn):
      return replication.per_replica(self.num_replicas, name)
    found = self.join(given)
    if name in _OPAQUE and not found.is_replicated:
      return dataclasses.replace(found, causes=found.causes | {name})
    return found

  def while_loop(
    self, params: Any, given: list[Replication]
  ) -> list[Replication]:
    """Returns the `Replication` of what a `while` loop carries at its end."""
    first, second = params["cond_nconsts"], params["body_nconsts"]
    condition, body = given[:first], given[first : first + second]

    def step(carry: list[Replication]) -> list[Replication]:
      # Replicas that leave the loop at different times differ in its results.
      (goes_on,) = self.run(params["cond_jaxpr"], condition + carry)
      new = self.run(params["body_jaxpr"], body + carry)
      return [self.join([x, goes_on]) for x in new]

    return self.fixed_point(step, given[first + second :])

  def scan(self, params: Any, given: list[Replication]) -> list[Replication]:
    """Returns the `Replication` of the carry and of the stacked outputs."""
    consts, carry, xs = tracing.split_scan(params, given)

    def step(carry: list[Replication]) -> list[Replication]:
      return self.run(params["jaxpr"], consts + carry + xs)[: len(carry)]

    carry = self.fixed_point(step, carry)
    outputs = self.run(params["jaxpr"], consts + carry + xs)
    return carry + outputs[len(carry) :]

  def linear_solve(
    self, params: Any, given: list[Replication]
  ) -> list[Replication]:
    """Follows the solver of `jax.lax.custom_linear_solve`."""
    sizes, solve = params["const_lengths"], params["jaxprs"].solve
    # The inputs are the constants of four functions, then the right-hand side.
    start = sizes.matvec + sizes.vecmat
    consts = given[start : start + sizes.solve]
    return self.run(solve, consts + given[sum(sizes) :])

  def fixed_point(
    self,
    step: Callable[[list[Replication]], list[Replication]],
    carry: list[Replication],
  ) -> list[Replication]:
    """Returns the `Replication` of a loop's carry after any number of steps."""
    while True:
      new = [self.join([x, y]) for x, y in zip(carry, step(carry), strict=True)]
      if new == carry:
        return carry
      carry = new

  def join(self, given: Iterable[Replication]) -> Replication:
    """Returns the `Replication` of a function of several values."""
    return replication.join([self.replicated, *given], self.num_replicas)


def _is_ref(atom: Any) -> bool:
  """Returns whether an input of an equation is a mutable array."""
  # JAX has no public class for the type of a mutable array.
  return hasattr(atom.aval, "inner_aval")


def _mentions_replicas(eqn: Any) -> bool:
  """Returns whether an equation, or a jaxpr in it, names the replica axis."""
  params = dict(eqn.params)
  if eqn.primitive.name == "call_hi_primitive":
    # JAX 0.12 keeps the jaxprs of `custom_root` as attributes of an object.
    for value in eqn.params.values():
      params |= vars(value)
  named = any(
    replication.names_replicas(value)
    for key, value in params.items()
    if key != "name" and isinstance(value, (str, tuple))
  )
  return named or any(
    _mentions_replicas(inner)
    for program in core.jaxprs_in_params(params)
    for inner in program.eqns
  )


def abbreviate(items: list[str]) -> str:
  """Returns some of the items as a list."""
  more = ", ..." if len(items) > _MAX_LISTED else ""
  return ", ".join(items[:_MAX_LISTED]) + more
