"""Takes the mesh out of the types of values, inside of a `jax.shard_map`.

In a `jax.shard_map` that is manual over some mesh axes only, the type of each
value names the mesh, and JAX lowers each operation with a sharding constraint
that leaves all dimensions open. Such a constraint fixes no sharding, but it
keeps XLA from copying constants. The TPU compiler merges equal constants before
XLA chooses shardings: Adam's decay rate, as an array, becomes one array for all
parameters of one shape, with one sharding. If two of these parameters are split
along different dimensions, as in tensor parallelism, their gradients and slots
are exchanged between the devices at every step. Without the constraints, XLA
gives each use of a constant a sharding of its own, as under `jax.jit`.

Seen with JAX 0.10.2 and libtpu 0.0.42. JAX adds the constraints in
`lower_with_sharding_in_types` of `jax/_src/interpreters/mlir.py`, in JAX 0.12
too. Those remain that JAX adds when it lowers a `scan` or random numbers, as it
traces these again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from flaxshard.core import jaxprs

# The primitives that lower the jaxprs among their parameters as plain code.
_INLINED = jaxprs.CALLS | jaxprs.CUSTOM_CALLS | {"scan", "while", "cond"}
_NO_MESH = jax.sharding.AbstractMesh((), ())


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
  convert = jaxprs.rewriter(_without_mesh)

  def convert_bodies(opened: Any) -> Any:
    eqns = []
    for eqn in opened.eqns:
      if eqn.primitive.name == "shard_map":
        body = eqn.params["jaxpr"]
        body = _call(body, convert(body))
        eqn = eqn.replace(params=eqn.params | {"jaxpr": body})
      eqns.append(eqn)
    return opened.replace(eqns=eqns)

  return jaxprs.map_open(convert_bodies, program)


def _call(body: Any, without_mesh: Any) -> Any:
  """Returns a `Jaxpr` like `body`, that calls one whose types have no mesh.

  The inner one is not traced again when the outer one is evaluated: JAX would
  put the mesh back into the types.
  """
  # An equation of `jax.jit`, with as many inputs and outputs.
  function = jax.jit(lambda *_: [jax.numpy.zeros(())] * len(body.outvars))
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


def _without_mesh(program: Any, inner: Callable[[Any], Any]) -> Any:
  """Returns a `Jaxpr` whose values have types without a mesh.

  Args:
    program: The `Jaxpr`.
    inner: Does the same in a program of one of its equations.
  """
  new_variables: dict[Any, Any] = {}

  def convert_atom(atom: Any) -> Any:
    # Mutable arrays and tokens are of other types.
    if type(atom.aval) is not jax.core.ShapedArray:
      return atom
    spec = jax.sharding.PartitionSpec(*[None] * atom.aval.ndim)
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
      params = {k: jaxprs.map_inner(inner, v) for k, v in params.items()}
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
