"""The check that a traced program gives every replica the same TrainState.

`Strategy.run` returns one TrainState for all replicas, so its leaves must not
differ between them. JAX does not check that: `jax.shard_map` trusts
`out_specs=P()`, and every device keeps its own array. `check_vma=True` would
refuse any loop that carries a constant. This module follows each value through
the jaxpr instead, before anything is compiled.

For each value it computes which replicas are known to hold the same one. An
operation on several values can only tell more replicas apart. Only collectives
make replicas agree, by the documentation of each in `jax.lax`. A primitive that
the check cannot follow tells all replicas apart: unknown is an error, never
accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax.extend import core

from flaxshard.core import jaxprs
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import rows
from flaxshard.strategy import arguments
from flaxshard.wrappers import stack

# These run one program, with their own inputs and outputs.
_CALLS = jaxprs.CALLS | jaxprs.CUSTOM_CALLS | {"shard_map"}
# These compute each output from the input in the same place alone.
_IDENTITIES = frozenset(("optimization_barrier", "pvary", "pcast"))
# These combine the values of all replicas, or of the replicas of a group, and
# give each of them the same result. The `_invariant` variants are what JAX
# traces in a nested `jax.shard_map` with `check_vma=True`.
_REDUCTIONS = frozenset(
  "psum pmax pmin all_gather pbroadcast "
  "psum_invariant all_gather_invariant".split()
)
_SUMS = frozenset(("psum", "psum_invariant"))
# The check cannot look into these. They are trusted to return the same results
# for the same inputs, as the documentation of `pure_callback` demands.
_OPAQUE = frozenset(
  "pure_callback ffi_call pallas_call custom_partitioning "
  "call_hi_primitive".split()
)
# The results of these may differ between devices even for the same inputs.
_IMPURE = frozenset(("io_callback", "infeed", "rng_uniform"))
# Their inputs after the first are indices.
_INDEXED = frozenset(("gather", "dynamic_slice"))

# Marks of what a value was computed from, for the warnings of `mistakes`.
SUMMED = "a sum of the replicas' values"
KEY = "a PRNG key of the replica"
NUMBER = "the number of the replica, or a part that it has chosen"
_MARKS = frozenset((SUMMED, KEY, NUMBER))


class Fact(NamedTuple):
  """Which replicas are known to hold the same value, and what it comes from.

  Attributes:
    classes: One number for each replica, counted from 0 in order of appearance.
      Replicas with the same number hold the same value.
    history: `SUMMED`, `KEY` and `NUMBER`, as far as they apply, and names of
      the primitives after which the values may differ. Without such a name they
      are the same, or only a replica's own data makes them differ.
  """

  classes: tuple[Hashable, ...]
  history: frozenset[str] = frozenset()

  @property
  def is_replicated(self) -> bool:
    """Whether all replicas are known to hold the same value."""
    return not any(self.classes)

  @property
  def causes(self) -> list[str]:
    """The primitives after which the values may differ."""
    return sorted(self.history - _MARKS)


@functools.cache
def join(*facts: Fact, after: str | None = None) -> Fact:
  """Returns the fact of a function of several values.

  Replicas hold the same result if they hold the same values of all inputs.

  Args:
    *facts: The facts of the inputs. Their `classes` may be any hashable values,
      equal for replicas that hold the same.
    after: A mark, or the name of a primitive, for the history of the result.
  """
  classes, history = zip(*facts, strict=True)
  numbers: dict[Hashable, int] = {}
  joined = tuple(
    numbers.setdefault(x, len(numbers)) for x in zip(*classes, strict=True)
  )
  known = frozenset().union(*history, () if after is None else (after,))
  return Fact(joined, known if any(joined) else known & _MARKS)


class SameStateCheck:
  """Follows which replicas hold the same values through programs.

  Attributes:
    constant: The fact of a value that all replicas share.
    own: The fact of a value that each replica has for itself.
    gradients: The facts of what `apply_gradients` was about to reduce, once for
      each time that the check met it.
  """

  def __init__(self, num_replicas: int):
    self.constant = Fact((0,) * num_replicas)
    self.own = Fact(tuple(range(num_replicas)))
    self.gradients: list[Fact] = []

  def fact_of(self, leaf: arguments.Leaf) -> Fact:
    """Returns which replicas share an argument, or must share a result."""
    if leaf.spec != jax.P():
      return self.own
    # All replicas are one group, unless wrappers keep groups of them apart.
    classes = list(self.constant.classes)
    for number, group in enumerate(stack.groups_of(leaf.wrappers or ()) or ()):
      for i in group:
        classes[i] = number
    return join(Fact(tuple(classes)))

  def run(self, program: Any, inputs: Sequence[Fact]) -> list[Fact]:
    """Returns the facts of a program's outputs.

    Args:
      program: A `Jaxpr` or a `ClosedJaxpr`.
      inputs: The facts of its inputs.
    """
    program = jaxprs.open_program(program)
    # By id, because literals have no hash. All others are constants.
    known = dict(zip(map(id, program.invars), inputs, strict=True))
    for eqn in program.eqns:
      given = [known.get(id(x), self.constant) for x in eqn.invars]
      # JAX has no public class for the type of a mutable array.
      refs = [x for x in eqn.invars if hasattr(x.aval, "inner_aval")]
      written = [*refs, *eqn.outvars]
      if refs:
        # The equation may write any of its inputs to a mutable array.
        outputs = [self._unfollowed(eqn, given)] * len(written)
      else:
        outputs = self._equation(eqn, given)
      known.update(zip(map(id, written), outputs, strict=True))
    return [known.get(id(x), self.constant) for x in program.outvars]

  def _equation(self, eqn: Any, given: list[Fact]) -> list[Fact]:
    """Returns the facts of an equation's outputs."""
    # An asynchronous collective is two primitives. The second one, `*_done`, is
    # a function of the result of the first one.
    name, params = eqn.primitive.name.removesuffix("_start"), eqn.params
    if name in _IDENTITIES:
      return given
    if name in _CALLS:
      (body,) = core.jaxprs_in_params(params)
      return self.run(body, given)
    if name == "cond":
      branches = [self.run(branch, given[1:]) for branch in params["branches"]]
      # Which branch is taken depends on the predicate.
      outputs = zip(*branches, strict=True)
      return [join(given[0], *x) for x in outputs]
    if name == "while":
      return self._while(params, given)
    if name == "scan":
      consts, carry, xs = jaxprs.split_scan(params, given)
      step = lambda carry: self.run(params["jaxpr"], consts + carry + xs)
      return self._loop(step, carry)
    if name == "name":
      return [self._named(params["name"], given[0])]
    axes = mesh_lib.axes_of(params.get("axes", params.get("axis_name")))
    if mesh_lib.REPLICA not in axes:
      return [self._unfollowed(eqn, given)] * len(eqn.outvars)
    if name == "axis_index":
      return [join(self.own, after=NUMBER)]
    return [self._collective(name, params, axes, x) for x in given]

  def _while(self, params: Any, given: list[Fact]) -> list[Fact]:
    first, second = params["cond_nconsts"], params["body_nconsts"]
    condition, body = given[:first], given[first : first + second]

    def step(carry: list[Fact]) -> list[Fact]:
      # The condition decides how often the body runs.
      (goes_on,) = self.run(params["cond_jaxpr"], condition + carry)
      new = self.run(params["body_jaxpr"], body + carry)
      return [join(x, goes_on) for x in new]

    return self._loop(step, given[first + second :])

  def _loop(
    self, step: Callable[[list[Fact]], list[Fact]], carry: list[Fact]
  ) -> list[Fact]:
    """Returns the facts of a loop's results after any number of steps.

    Args:
      step: Takes the facts of the carry. It returns those of the new carry, and
        then those of what the loop collects.
      carry: The facts of the first carry.
    """
    while True:
      out = step(carry)
      new = [join(*x) for x in zip(carry, out, strict=False)]
      if new == carry:
        return carry + out[len(carry) :]
      carry = new

  def _named(self, name: str, x: Fact) -> Fact:
    """Returns the fact of a value that has a name in the program."""
    if name == replica_context.ASSUMED_REPLICATED:
      return self.constant
    if name == replica_context.REPLICA_OF_KEY:
      return x._replace(history=frozenset({KEY}))
    # The rows of a sum are gathered. Other gathers are no sums.
    if name == rows.SUMMED and not x.is_replicated:
      return join(x, after=SUMMED)
    if name == replica_context.GRADIENTS:
      self.gradients.append(x)
    return x

  def _collective(
    self, name: str, params: Any, axes: tuple[str, ...], x: Fact
  ) -> Fact:
    """Returns the fact of a collective's result for one operand."""
    if name in _SUMS and not x.is_replicated:
      x = join(x, after=SUMMED)
    groups = params.get("axis_index_groups")
    # all_to_all and reduce_scatter give each replica another part, even of a
    # replicated operand. What a collective without a rule does is not known.
    values: Iterable[Hashable] = self.own.classes
    if name in _REDUCTIONS and not groups:
      values = self.constant.classes
    # The numbers in groups and permutations are those of replicas only if no
    # other axis is flattened with the replica axis.
    elif axes == (mesh_lib.REPLICA,):
      if name in _REDUCTIONS:
        members = {i: group for group in groups for i in group}
        # Groups whose members hold the same values, in the same order, have
        # the same result. In another order a sum may round differently.
        values = [tuple(x.classes[j] for j in members[i]) for i in values]
        name += " over axis_index_groups"
      elif name == "ppermute":
        # A replica to which no other one sends receives zeros.
        source = {to: x.classes[start] for start, to in params["perm"]}
        values = map(source.get, values)
    return join(Fact(tuple(values), x.history), after=name)

  def _unfollowed(self, eqn: Any, given: list[Fact]) -> Fact:
    """Returns the output of an equation as a function of all its inputs."""
    name, found = eqn.primitive.name, join(self.constant, *given)
    # A collective in the body of a kernel, or one that this check has no rule
    # for, makes the result more than a function of the inputs.
    if name in _IMPURE or _names_replicas(eqn):
      return join(self.own, found, after=name)
    if name in _OPAQUE:
      return join(found, after=name)
    if name in _INDEXED and any(x.history & {KEY, NUMBER} for x in given[1:]):
      return join(found, after=NUMBER)
    return found


def _names_replicas(eqn: Any) -> bool:
  """Returns whether an equation, or a program in it, names the replica axis."""
  params = dict(eqn.params)
  if eqn.primitive.name == "call_hi_primitive":
    # JAX 0.12 keeps the jaxprs of `custom_root` as attributes of an object.
    for value in eqn.params.values():
      params |= vars(value)
  params.pop("name", None)
  return any(
    # By type first: a NumPy array in a tuple would compare element by element.
    isinstance(x, str) and x == mesh_lib.REPLICA
    for value in params.values()
    for x in (value if isinstance(value, tuple) else (value,))
  ) or any(
    _names_replicas(inner)
    for program in core.jaxprs_in_params(params)
    for inner in program.eqns
  )
