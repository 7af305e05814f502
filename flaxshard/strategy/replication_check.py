"""Which outputs of a traced program are the same on every replica.

A TrainState must come back the same from all replicas. Whether it does can be
read off the program: what follows from a replica's own data differs, until a
collective over all replicas makes it agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import enum
from typing import Any

from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib


class Replication(enum.IntEnum):
  """Whether a value is the same on every replica.

  What is computed from several values has the greatest of theirs: a ring of
  exchanges adds what differs to what is not known, and may make it agree.
  """

  REPLICATED = 0
  DIFFERS = 1
  UNKNOWN = 2


_REDUCTIONS = ("psum", "pmax", "pmin", "all_gather", "pbroadcast")
_EXCHANGES = ("ppermute", "all_to_all", "reduce_scatter", "ragged_all_to_all")
_CALLBACKS = ("pure_callback", "io_callback")
_CALLS = (
  "jit",
  "pjit",
  "closed_call",
  "core_call",
  "remat",
  "remat2",
  "checkpoint",
  "custom_jvp_call",
  "custom_vjp_call",
  "custom_vjp_call_jaxpr",
  "shard_map",
)


def check(jaxpr: Any, differ: Sequence[bool], paths: Sequence[str]) -> None:
  """Raises a ValueError where what must be the same on all replicas is not.

  Args:
    jaxpr: A `Jaxpr`, or a `ClosedJaxpr`. Its first outputs must be the same.
    differ: Of each input, whether it is a replica's own.
    paths: Where those outputs are in what `fn` returned.
  """
  given = [Replication.DIFFERS if x else Replication.REPLICATED for x in differ]
  found = outputs(jaxpr, given)[: len(paths)]
  bad = [
    path
    for path, one in zip(paths, found, strict=True)
    if one == Replication.DIFFERS
  ]
  if bad:
    raise ValueError(
      "run: a TrainState must come back the same from every replica, but these "
      f"follow from a replica's own data: {', '.join(bad[:8])}"
      f"{', ...' if len(bad) > 8 else ''}. state.apply_gradients averages "
      "gradients and the collections it is handed; otherwise use "
      "get_replica_context().all_reduce('mean', ...)."
    )


def outputs(jaxpr: Any, inputs: Sequence[Replication]) -> list[Replication]:
  """Returns what holds for the outputs of a jaxpr.

  What the analysis does not know is UNKNOWN, never DIFFERS.

  Args:
    jaxpr: A `Jaxpr`, or a `ClosedJaxpr`.
    inputs: What holds for its inputs.
  """
  jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
  known = dict(zip(jaxpr.invars, inputs, strict=True))

  def read(atom: Any) -> Replication:
    # Literals and constants are in the program, which all replicas share.
    return (
      Replication.REPLICATED
      if hasattr(atom, "val")
      else known.get(atom, Replication.REPLICATED)
    )

  for eqn in jaxpr.eqns:
    given = [read(x) for x in eqn.invars]
    for var, value in zip(eqn.outvars, _equation(eqn, given), strict=True):
      known[var] = value
  return [read(x) for x in jaxpr.outvars]


def _equation(eqn: Any, given: list[Replication]) -> list[Replication]:
  name, params = eqn.primitive.name, eqn.params
  worst = max(given, default=Replication.REPLICATED)
  count = len(eqn.outvars)
  axes = params.get("axes", params.get("axis_name", ()))
  over_replicas = mesh_lib.REPLICA in specs_lib.axes_of(axes)
  if name == "axis_index":
    return [
      Replication.DIFFERS if over_replicas else Replication.REPLICATED
    ] * count
  unknown = [Replication.UNKNOWN if worst else Replication.REPLICATED] * count
  if over_replicas and name.startswith(_REDUCTIONS):
    if params.get("axis_index_groups") is None:
      return [Replication.REPLICATED] * count
    return unknown
  if name in _CALLBACKS or (over_replicas and name.startswith(_EXCHANGES)):
    return unknown
  if name == "cond":
    branches = [outputs(b, given[1:]) for b in params["branches"]]
    return [max(given[0], *each) for each in zip(*branches, strict=True)]
  if name == "while":
    return _while(params, given)
  if name == "scan":
    return _scan(params, given, count)
  bodies = [
    value
    for value in params.values()
    if hasattr(getattr(value, "jaxpr", value), "eqns")
  ]
  if name in _CALLS and len(bodies) == 1:
    body = getattr(bodies[0], "jaxpr", bodies[0])
    if len(body.invars) == len(given) and len(body.outvars) == count:
      return outputs(body, given)
  if bodies or name in _CALLS:
    return unknown
  return [worst] * count


def _while(params: Any, given: list[Replication]) -> list[Replication]:
  first, second = params["cond_nconsts"], params["body_nconsts"]
  condition, body = given[:first], given[first : first + second]

  def step(carry: list[Replication]) -> list[Replication]:
    (goes_on,) = outputs(params["cond_jaxpr"], condition + carry)
    return [
      max(x, goes_on) for x in outputs(params["body_jaxpr"], body + carry)
    ]

  return _fixed_point(step, given[first + second :])


def _scan(
  params: Any, given: list[Replication], count: int
) -> list[Replication]:
  if "num_consts" in params:
    first, last = params["num_consts"], params["num_carry"]
    last += first
    consts, carry, xs = given[:first], given[first:last], given[last:]
  elif hasattr(params.get("ft_in"), "unpack"):  # JAX 0.12
    consts, carry, xs = map(list, params["ft_in"].update(given).unpack())
  else:
    return [
      Replication.UNKNOWN if any(given) else Replication.REPLICATED
    ] * count

  def step(carry: list[Replication]) -> list[Replication]:
    return outputs(params["jaxpr"], consts + carry + xs)[: len(carry)]

  carry = _fixed_point(step, carry)
  return carry + outputs(params["jaxpr"], consts + carry + xs)[len(carry) :]


def _fixed_point(
  step: Callable[[list[Replication]], list[Replication]],
  carry: list[Replication],
) -> list[Replication]:
  while True:
    new = [max(x, y) for x, y in zip(carry, step(carry), strict=True)]
    if new == carry:
      return carry
    carry = new
