"""Assertions for tests of training steps.

They read the compiled program and run nothing: a test can compile for TPUs that
the machine does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import jax

from flaxshard.core import checks
from flaxshard.plans.traffic import Collective
from flaxshard.plans.traffic import collectives

__all__ = ["Traffic", "assert_traffic"]


@dataclasses.dataclass(frozen=True)
class Traffic:
  """Collectives that a program is expected to have.

  Attributes:
    axes: A mesh axis or several, along which the devices exchange data. The
      order does not matter, and axes of one device are left out.
    nbytes: Bytes of all of them together, per device and call; None means any
      number. Bytes are those of the operands, of the results for an
      all-gather, times the executions.
    in_conditional: Whether they stand in a branch that need not run; None means
      either.
  """

  axes: str | Sequence[str]
  nbytes: int | None = None
  in_conditional: bool | None = None


_Expected = str | Sequence[str] | Traffic | Sequence[Traffic]


def assert_traffic(
  compiled: Any,
  mesh: jax.sharding.Mesh,
  expected: Mapping[str, _Expected],
  *,
  tolerance: float = 0.0,
  max_bytes: int | None = None,
  ignore_below: int = 0,
) -> None:
  """Asserts that a program has the expected collectives and no others.

  Args:
    compiled: A compiled program, `jax.jit(step).lower(state, batch).compile()`,
      or a lowered one, which is compiled.
    mesh: The mesh of the program.
    expected: From the kind of a collective, such as "all-reduce", to the mesh
      axis or axes that it may span, or to a `Traffic` or a list of them. Each
      entry must occur. A collective that fits several counts for the first one
      with `in_conditional`, if there is one. An empty mapping expects no
      collective at all.
    tolerance: How far the bytes may differ from `Traffic.nbytes`, as a fraction
      of these.
    max_bytes: The most bytes that all collectives together may have, per device
      and call; None means any number.
    ignore_below: Collectives with fewer bytes per execution, such as the mean
      of a loss, are ignored.

  Raises:
    AssertionError: A collective is not expected, an expected one does not
      occur, or the bytes differ. The message names kind, axes, bytes and source
      line of each.
    ValueError: The mesh has no such axis, or another number of devices than
      the program.

  Example:
    >>> import flaxshard as fs, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> x = jax.ShapeDtypeStruct(
    ...     (8,), np.float32, sharding=jax.NamedSharding(mesh, P("data")))
    >>> compiled = jax.jit(lambda x: 2 * x).lower(x).compile()
    >>> fs.testing.assert_traffic(compiled, mesh, {})
  """
  entries = _entries(expected, mesh)
  if isinstance(compiled, jax.stages.Lowered):
    compiled = compiled.compile()
  found = [
    one
    for one in collectives(compiled, mesh)
    # Groups of one device exchange nothing.
    if one.group_size > 1 and one.payload_bytes >= ignore_below
  ]
  matched: list[list[Collective]] = [[] for _ in entries]
  problems = []
  for one in found:
    fits = [
      i
      for i, (kind, traffic) in enumerate(entries)
      if kind == one.kind and frozenset(traffic.axes) == frozenset(one.axes)
      if traffic.in_conditional in (None, one.in_conditional)
    ]
    if fits:
      # max returns the first of equals.
      best = max(fits, key=lambda i: entries[i][1].in_conditional is not None)
      matched[best].append(one)
    else:
      problems.append(f"unexpected: {one}")
  for (kind, traffic), fitting in zip(entries, matched, strict=True):
    name, nbytes = f"{kind} over {', '.join(traffic.axes)}", traffic.nbytes
    if not fitting:
      problems.append(f"missing: {name}")
    elif nbytes is not None and (
      abs(_bytes(fitting) - nbytes) > tolerance * nbytes
    ):
      problems += _listed(f"{name}: ", fitting, f"expected {nbytes:,}")
  if max_bytes is not None and _bytes(found) > max_bytes:
    more = f"more than max_bytes {max_bytes:,}"
    problems += _listed("all collectives have ", found, more)
  if problems:
    raise AssertionError("\n".join(["assert_traffic:", *problems]))


def _entries(
  expected: Mapping[str, _Expected], mesh: jax.sharding.Mesh
) -> list[tuple[str, Traffic]]:
  """Returns pairs of a kind and what is expected of it."""
  entries = []
  for kind, given in expected.items():
    if isinstance(given, Traffic):
      given = [given]
    traffic = [x for x in given if isinstance(x, Traffic)]
    if not traffic or len(traffic) < len(given):
      traffic = [Traffic(given)]  # type: ignore[arg-type]
    for one in traffic:
      axes = [one.axes] if isinstance(one.axes, str) else one.axes
      for axis in axes:
        checks.one_of(f"expected[{kind!r}]: axes", axis, mesh.axis_names)
      # No collective spans an axis of one device.
      spanned = tuple(axis for axis in axes if mesh.shape[axis] > 1)
      entries.append((kind, dataclasses.replace(one, axes=spanned)))
  return entries


def _listed(name: str, found: Sequence[Collective], wanted: str) -> list[str]:
  """Returns lines with the bytes of collectives, and each of them."""
  head = f"{name}{_bytes(found):,.0f} bytes, {wanted}:"
  return [head, *(f"  {one}" for one in found)]


def _bytes(found: Sequence[Collective]) -> float:
  return sum(one.payload_bytes * one.executions for one in found)
