"""Traced programs: their equations, facts that flow through them, rewrites.

JAX has no public interpreter of jaxprs. `Forward` is one: it carries a fact
about each value from the inputs of a program to its outputs, through calls,
loops and conditionals. A subclass says what the other equations do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import functools
from typing import Any, Generic, TypeVar

from jax.extend import core

Fact = TypeVar("Fact")

# Primitives that run one program, with their own inputs and outputs. JAX 0.12
# calls `closed_call` `eval_jaxpr`.
CALLS = frozenset(
  "jit pjit closed_call eval_jaxpr remat remat2 checkpoint".split()
)
# These do so, too, and may have derivatives of their own.
CUSTOM_CALLS = frozenset(
  "core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr".split()
)
# Primitives that compute each output from the input in the same place alone.
_IDENTITIES = frozenset(("optimization_barrier", "pvary", "pcast"))
# Primitives that move or cast numbers, without computing any.
_MOVES = frozenset(
  "broadcast_in_dim concatenate convert_element_type copy copy_p "
  "device_put dynamic_slice dynamic_update_slice gather iota "
  "optimization_barrier pad reshape rev select_n sharding_constraint slice "
  "split squeeze stop_gradient transpose".split()
)


def open_program(program: Any) -> core.Jaxpr:
  """Returns the program of a `Jaxpr` or a `ClosedJaxpr` without constants."""
  # JAX 0.12 has one class for both.
  return program if isinstance(program, core.Jaxpr) else program.jaxpr


def equations(program: Any) -> Iterator[Any]:
  """Yields the equations of a program, and of the programs inside of them."""
  for eqn in open_program(program).eqns:
    yield eqn
    for inner in core.jaxprs_in_params(eqn.params):
      yield from equations(inner)


def called(eqn: Any) -> Any:
  """Returns the program that an equation of `CALLS` or a `scan` runs."""
  return eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"]


def split_scan(
  params: Any, inputs: list[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
  """Splits the inputs of a `scan` into constants, carry and scanned arrays."""
  if "num_consts" in params:
    first, last = params["num_consts"], params["num_carry"]
    last += first
    return inputs[:first], inputs[first:last], inputs[last:]
  # JAX 0.12 keeps the three lists in one structure.
  consts, carry, xs = map(list, params["ft_in"].update(inputs).unpack())
  return consts, carry, xs


def computes_in(program: Any, dtype: Any) -> bool:
  """Returns whether a program computes in a dtype.

  Args:
    program: A `jax.extend.core.Jaxpr` or `ClosedJaxpr`.
    dtype: The dtype. Casts to it and moves of such arrays do not count.

  Example:
    >>> import jax
    >>> half = lambda x: (x.astype("float16") * 2).astype("float32")
    >>> computes_in(jax.make_jaxpr(half)(1.0), "float16")
    True
    >>> computes_in(jax.make_jaxpr(half)(1.0), "bfloat16")
    False
  """

  def has_dtype(atoms: Iterable[Any]) -> bool:
    return any(getattr(x.aval, "dtype", None) == dtype for x in atoms)

  return any(
    has_dtype(eqn.invars) and has_dtype(eqn.outvars)
    for eqn in equations(program)
    # What an equation with programs computes, they compute.
    if eqn.primitive.name not in _MOVES
    and not any(True for _ in core.jaxprs_in_params(eqn.params))
  )


class Forward(Generic[Fact]):
  """Carries a fact about each value through a program, to its outputs.

  Attributes:
    constant: The fact of literals and constants of a program.
  """

  constant: Fact

  def join(self, facts: Iterable[Fact]) -> Fact:
    """Returns the fact of a value that is computed from several ones."""
    raise NotImplementedError

  def rule(self, eqn: Any, given: list[Fact]) -> list[Fact] | None:
    """Returns the facts of an equation's outputs; None: by the general rules.

    Args:
      eqn: The equation.
      given: The facts of its inputs.
    """
    raise NotImplementedError

  def unfollowed(self, eqn: Any, given: list[Fact]) -> Fact:
    """Returns the fact of all outputs of an equation without any rule."""
    return self.join(given)

  def run(self, program: Any, inputs: Sequence[Fact]) -> list[Fact]:
    """Returns the facts of a program's outputs.

    Args:
      program: A `Jaxpr` or a `ClosedJaxpr`.
      inputs: The facts of its inputs.
    """
    program = open_program(program)
    known = dict(zip(program.invars, inputs, strict=True))

    def look_up(atom: Any) -> Fact:
      # Literals have no hash.
      is_literal = isinstance(atom, core.Literal)
      return self.constant if is_literal else known.get(atom, self.constant)

    for eqn in program.eqns:
      given = list(map(look_up, eqn.invars))
      # JAX has no public class for the type of a mutable array.
      refs = [x for x in eqn.invars if hasattr(x.aval, "inner_aval")]
      if refs:
        # The equation may write any of its inputs to a mutable array.
        outputs = [self.unfollowed(eqn, given)] * len(eqn.outvars)
        known.update(dict.fromkeys(refs, self.unfollowed(eqn, given)))
      else:
        outputs = self.equation(eqn, given)
      known.update(zip(eqn.outvars, outputs, strict=True))
    return list(map(look_up, program.outvars))

  def equation(self, eqn: Any, given: list[Fact]) -> list[Fact]:
    """Returns the facts of an equation's outputs."""
    decided = self.rule(eqn, given)
    if decided is not None:
      return decided
    name, params = eqn.primitive.name, eqn.params
    if name in _IDENTITIES:
      return given
    if name == "cond":
      branches = [self.run(branch, given[1:]) for branch in params["branches"]]
      # Which branch is taken depends on the predicate.
      return [self.join([given[0], *x]) for x in zip(*branches, strict=True)]
    if name == "while":
      return self._while(params, given)
    if name == "scan":
      return self._scan(params, given)
    if name in CALLS or name in CUSTOM_CALLS or name == "shard_map":
      (body,) = core.jaxprs_in_params(params)
      return self.run(body, given)
    return [self.unfollowed(eqn, given)] * len(eqn.outvars)

  def _while(self, params: Any, given: list[Fact]) -> list[Fact]:
    first, second = params["cond_nconsts"], params["body_nconsts"]
    condition, body = given[:first], given[first : first + second]

    def step(carry: list[Fact]) -> list[Fact]:
      # The condition decides how often the body runs.
      (goes_on,) = self.run(params["cond_jaxpr"], condition + carry)
      new = self.run(params["body_jaxpr"], body + carry)
      return [self.join([x, goes_on]) for x in new]

    return self._fixed_point(step, given[first + second :])

  def _scan(self, params: Any, given: list[Fact]) -> list[Fact]:
    consts, carry, xs = split_scan(params, given)

    def step(carry: list[Fact]) -> list[Fact]:
      return self.run(params["jaxpr"], consts + carry + xs)

    carry = self._fixed_point(lambda carry: step(carry)[: len(carry)], carry)
    return carry + step(carry)[len(carry) :]

  def _fixed_point(
    self, step: Callable[[list[Fact]], list[Fact]], carry: list[Fact]
  ) -> list[Fact]:
    """Returns the facts of a loop's carry after any number of steps."""
    while True:
      new = [self.join([x, y]) for x, y in zip(carry, step(carry), strict=True)]
      if new == carry:
        return carry
      carry = new


def rewriter(fn: Callable[[Any, Callable[[Any], Any]], Any]) -> Any:
  """Returns a function that rewrites a `Jaxpr` or a `ClosedJaxpr`.

  A program that is called several times, such as a jitted layer, is rewritten
  once and stays one object: JAX lowers it once.

  Args:
    fn: Takes a `Jaxpr` and the returned function, for the programs inside of
      it. It returns the new `Jaxpr`.
  """

  @functools.cache
  def rewrite(program: Any) -> Any:
    return map_open(lambda opened: fn(opened, rewrite), program)

  return rewrite


def map_open(fn: Callable[[Any], Any], program: Any) -> Any:
  """Applies a function of `Jaxpr`s to a `Jaxpr` or a `ClosedJaxpr`."""
  if isinstance(program, core.Jaxpr):
    return fn(program)
  return program.replace(jaxpr=fn(program.jaxpr))


def map_inner(fn: Callable[[Any], Any], value: Any) -> Any:
  """Applies a function to the programs in a parameter of an equation."""
  if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
    return fn(value)
  if type(value) in (tuple, list):
    return type(value)(map_inner(fn, x) for x in value)
  return value
