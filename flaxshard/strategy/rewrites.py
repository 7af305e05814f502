"""Changes of the traced program of `Strategy.run`, for the TPU compiler.

Both leave the values of a program as they are.

`sum_before_widening` sums bfloat16 gradients over the replicas in bfloat16. If
a model computes in bfloat16 with float32 parameters, the last operation on a
gradient is the conversion from bfloat16 to float32. `apply_gradients` sums what
it is given, so the sum would be of float32: twice the bytes, on the links and
in memory. Under `jax.jit` over the global batch, XLA sums first and converts
then. Here it is the same, by the exchange of

    sum(convert(g))  for  convert(sum(g))

where the sum is one of `apply_gradients` and `g` is bfloat16. float16 stays as
it is, because its sum may overflow. So does every gradient that the program
computes in float32 from what it converted: a clipped one, one that a loop adds
up, or the result of `jax.lax.optimization_barrier`.

`forget_mesh` takes the mesh out of the types of values. In a `jax.shard_map`
that is manual over some mesh axes only, the type of each value names the mesh,
and JAX lowers each operation with a sharding constraint that leaves all
dimensions open. Such a constraint fixes no sharding, but it keeps XLA from
copying constants. The TPU compiler merges equal constants before XLA chooses
shardings: Adam's decay rate, as an array, becomes one array for all parameters
of one shape, with one sharding. If two of these parameters are split along
different dimensions, as in tensor parallelism, their gradients and slots are
exchanged between the devices at every step. Without the constraints, XLA gives
each use of a constant a sharding of its own, as under `jax.jit`.

Seen with JAX 0.10.2 and libtpu 0.0.42. JAX adds the constraints in
`lower_with_sharding_in_types` of `jax/_src/interpreters/mlir.py`, in JAX 0.12
too. Those remain that JAX adds when it lowers a `scan` or random numbers, as it
traces these again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

from flaxshard.core import jaxprs
from flaxshard.replicas import context as replica_context

# The primitives that lower the jaxprs among their parameters as plain code.
_INLINED = jaxprs.CALLS | jaxprs.CUSTOM_CALLS | {"scan", "while", "cond"}
_NO_MESH = jax.sharding.AbstractMesh((), ())

Rewrite = Callable[[Any], Any]


def _rewriter(fn: Callable[[Any, Rewrite], Any]) -> Rewrite:
  """Returns a function that rewrites the programs in a value.

  A program that is called several times, such as a jitted layer, is rewritten
  once and stays one object: JAX lowers it once.

  Args:
    fn: Takes a `Jaxpr` and the returned function, for the parameters of its
      equations. It returns the new `Jaxpr`.

  Returns:
    A function of a program, or of a parameter of an equation, which may hold
    programs.
  """

  @functools.cache
  def rewrite_program(program: Any) -> Any:
    new = fn(jaxprs.open_program(program), rewrite)
    # In JAX 0.12 every program has constants, and loses them with new inputs.
    if hasattr(program, "consts"):
      new = core.ClosedJaxpr(new, program.consts)
    return new

  def rewrite(value: Any) -> Any:
    if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
      return rewrite_program(value)
    if type(value) in (tuple, list):
      return type(value)(map(rewrite, value))
    return value

  return rewrite


# -- Sums of gradients.


def sum_before_widening(program: Any) -> Any:
  """Returns a program that sums bfloat16 gradients before it converts them.

  Args:
    program: A `Jaxpr`, or a `ClosedJaxpr`.

  Returns:
    A program with the same inputs and outputs.
  """
  return _rewriter(_exchange_sums)(program)


def _exchange_sums(program: Any, rewrite: Rewrite) -> Any:
  sources: jaxprs.Sources = {}
  marks = {
    eqn.outvars[0]: eqn.invars[0]
    for eqn in program.eqns
    if eqn.primitive.name == "name"
    and eqn.params["name"] == replica_context.GRADIENTS
  }
  eqns = []
  for eqn in program.eqns:
    params = {k: rewrite(v) for k, v in eqn.params.items()}
    new = [eqn.replace(params=params)]
    if eqn.primitive.name == "psum":
      # Literals have no hash, but only variables have a mark.
      found = [
        jaxprs.dtype_before_cast(program, marks[x], sources, loops=True)
        for x in eqn.invars
        if isinstance(x, core.Var) and x in marks
      ]
      if found == [jnp.bfloat16]:
        new = _sum_in_bfloat16(eqn)
    eqns += new
  return program.replace(eqns=eqns)


def _sum_in_bfloat16(eqn: Any) -> list[Any]:
  """Returns equations that compute a sum of one array in bfloat16."""
  (x,), (total,) = eqn.invars, eqn.outvars
  # XLA leaves out the first conversion, together with that of the gradient.
  narrow, narrow_total = (
    core.Var(v.aval.update(dtype=jnp.dtype(jnp.bfloat16))) for v in (x, total)
  )
  return [
    _convert(x, narrow),
    eqn.replace(invars=[narrow], outvars=[narrow_total]),
    _convert(narrow_total, total),
  ]


def _convert(x: Any, result: Any) -> Any:
  """Returns an equation that converts one variable to another one."""
  convert = lambda x: x.astype(result.aval.dtype)
  (eqn,) = jax.make_jaxpr(convert)(jnp.zeros((), x.aval.dtype)).eqns
  return eqn.replace(invars=[x], outvars=[result])


# -- Types of values.


def forget_mesh(program: Any) -> Any:
  """Returns a program without open sharding constraints in `jax.shard_map`.

  Args:
    program: A `ClosedJaxpr`. Of its equations, the body of each `jax.shard_map`
      becomes one call of a `jax.jit`, whose values have types without a mesh.
      The body must have no axes of type `Explicit`.

  Returns:
    A program with the same inputs and outputs. Constraints that the program
    asks for are kept.
  """
  convert = _rewriter(_without_mesh)

  def convert_bodies(opened: Any, _: Rewrite) -> Any:
    eqns = []
    for eqn in opened.eqns:
      if eqn.primitive.name == "shard_map":
        body = eqn.params["jaxpr"]
        body = _call(body, convert(body))
        eqn = eqn.replace(params=eqn.params | {"jaxpr": body})
      eqns.append(eqn)
    return opened.replace(eqns=eqns)

  return _rewriter(convert_bodies)(program)


def _call(body: Any, without_mesh: Any) -> Any:
  """Returns a `Jaxpr` like `body`, that calls one whose types have no mesh.

  The inner one is not traced again when the outer one is evaluated: JAX would
  put the mesh back into the types.
  """
  # An equation of `jax.jit`, with as many inputs and outputs.
  function = jax.jit(lambda *_: [jnp.zeros(())] * len(body.outvars))
  (eqn,) = jax.make_jaxpr(function)(*[0.0] * len(body.invars)).eqns
  outvars = [core.Var(atom.aval) for atom in body.outvars]
  closed = core.ClosedJaxpr(without_mesh, ())
  eqn = eqn.replace(
    invars=list(body.invars),
    outvars=outvars,
    params=eqn.params | {"jaxpr": closed, "name": "replica"},
    effects=body.effects,
  )
  return body.replace(eqns=[eqn], outvars=outvars)


def _without_mesh(program: Any, rewrite: Rewrite) -> Any:
  """Returns a `Jaxpr` whose values have types without a mesh."""
  new_variables: dict[Any, Any] = {}

  def convert_atom(atom: Any) -> Any:
    # Mutable arrays and tokens are of other types.
    if type(atom.aval) is not jax.core.ShapedArray:
      return atom
    spec = jax.P(*[None] * atom.aval.ndim)
    sharding = jax.sharding.NamedSharding(_NO_MESH, spec)
    aval = atom.aval.update(sharding=sharding)
    if isinstance(atom, core.Literal):
      return core.Literal(atom.val, aval)
    return new_variables.setdefault(atom, core.Var(aval))

  def convert(atoms: Sequence[Any]) -> list[Any]:
    return list(map(convert_atom, atoms))

  eqns = []
  for eqn in program.eqns:
    params = eqn.params
    if eqn.primitive.name in _INLINED:
      params = {k: rewrite(v) for k, v in params.items()}
    eqns.append(
      eqn.replace(
        invars=convert(eqn.invars), outvars=convert(eqn.outvars), params=params
      )
    )
  return program.replace(
    constvars=convert(program.constvars),
    invars=convert(program.invars),
    outvars=convert(program.outvars),
    eqns=eqns,
  )
