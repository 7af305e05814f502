"""Checks that matrix products use the 16 bits that the policy says.

The traced step decides, not the compiled one: on TPU a float32 product has
16-bit passes by default, while its operands are float32 in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import math
from typing import Any

from jax.extend import core
import jax.numpy as jnp

from flaxshard.analysis.findings import Finding
from flaxshard.compiled import sources
from flaxshard.core.policy import Policy
from flaxshard.state import summary

_size = summary.format_bytes
_PRODUCTS = ("dot_general", "conv_general_dilated")
# A product with a smaller share of the work does not matter.
_MIN_SHARE = 0.01


@dataclasses.dataclass(frozen=True)
class _Product:
  """A matrix product or convolution of the forward pass.

  Attributes:
    bits: Bits of its widest operand.
    flops: Its work, in all executions.
    nbytes: Bytes of its operands.
    source: The user's line, or "".
    place: "forward", "backward", or "other": in a step that differentiates,
      what an optimizer or a check of gradients computes.
  """

  bits: int
  flops: float
  nbytes: int
  source: str
  place: str


def check_precision(
  jaxpr: Any, policy: Policy | None, min_bytes: int
) -> list[Finding]:
  """Finds float32 products in a model that computes with 16 bits.

  Args:
    jaxpr: The traced step.
    policy: The policy of the model. None: the precision of most of the work.
      The last products, such as those of a head, may then be float32.
    min_bytes: Smallest number of bytes of the operands to report.
  """
  products = list(_products(jaxpr, 1.0))
  if all(x.place == "other" for x in products):
    products = [dataclasses.replace(x, place="forward") for x in products]
  forward = [x for x in products if x.place == "forward"]
  halves = sum(x.flops for x in forward if x.bits == 16)
  total = sum(x.flops for x in forward)
  if policy is None:
    if not total or halves < total / 2:
      return []
    last = max(i for i, x in enumerate(forward) if x.bits == 16)
    forward = forward[: last + 1]
  elif jnp.dtype(policy.compute_dtype).itemsize != 2:
    return []
  lines: dict[str, list[_Product]] = {}
  for x in forward:
    if x.bits == 32 and x.flops >= _MIN_SHARE * total:
      lines.setdefault(x.source, []).append(x)
  return [
    Finding(
      "float32",
      "a matrix product or convolution has float32 operands "
      f"({_size(nbytes)}), while the model computes with 16 bits. Give the "
      "layer its dtype=, or cast what promotes the operands, such as a float32 "
      "constant.",
      source=source,
      nbytes=nbytes,
    )
    for source, group in lines.items()
    if (nbytes := sum(x.nbytes for x in group)) >= min_bytes
  ]


def _products(jaxpr: Any, executions: float) -> Iterator[_Product]:
  for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    if eqn.primitive.name in _PRODUCTS:
      yield _describe(eqn, executions)
    turns = executions
    if eqn.primitive.name == "scan":
      turns *= eqn.params["length"]
    for value in eqn.params.values():
      inner = value if isinstance(value, (tuple, list)) else (value,)
      for one in inner:
        if isinstance(one, (core.Jaxpr, core.ClosedJaxpr)):
          yield from _products(one, turns)


def _describe(eqn: Any, executions: float) -> _Product:
  operands = [x.aval for x in eqn.invars[:2]]
  floats = [x.dtype for x in operands if jnp.issubdtype(x.dtype, jnp.floating)]
  # A product of integers is neither.
  bits = max((8 * d.itemsize for d in floats), default=0)
  out = math.prod(eqn.outvars[0].aval.shape)
  if eqn.primitive.name == "dot_general":
    (contracting, _), _ = eqn.params["dimension_numbers"]
    inner = math.prod(operands[0].shape[d] for d in contracting)
  else:
    kernel = operands[1].shape
    features = eqn.params["dimension_numbers"].rhs_spec[0]
    inner = math.prod(kernel) // max(kernel[features], 1)
  return _Product(
    bits,
    2.0 * out * inner * executions,
    sum(x.size * x.dtype.itemsize for x in operands),
    sources.equation_line(eqn),
    _place(str(eqn.source_info.name_stack)),
  )


def _place(name_stack: str) -> str:
  if "transpose(" in name_stack:
    return "backward"
  return "forward" if "jvp(" in name_stack else "other"
