"""Counts the operations of a step's matrix products, as it is written.

The count is that of "model FLOPs utilization": matrix products and convolutions
of the forward and the backward pass, without those that rematerialization
repeats, and independent of the compiler. Source: A. Chowdhery et al., PaLM,
appendix B, https://arxiv.org/abs/2204.02311
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import math
from typing import Any

# The name that JAX gives to what `jax.checkpoint` computes a second time.
_REPEATED = "rematted_computation"


@dataclasses.dataclass(frozen=True)
class Flops:
  """Operations of matrix products; an addition and a product are two.

  Attributes:
    model: Without those that rematerialization repeats.
    repeated: Those that rematerialization repeats.
    exact: False if there is a loop whose number of turns is not in the program,
      or a kernel whose operations are unknown. A loop counts as one turn, a
      kernel as none.
  """

  model: float = 0.0
  repeated: float = 0.0
  exact: bool = True

  def __add__(self, other: Flops) -> Flops:
    return Flops(
      self.model + other.model,
      self.repeated + other.repeated,
      self.exact and other.exact,
    )

  def __mul__(self, factor: float) -> Flops:
    return Flops(self.model * factor, self.repeated * factor, self.exact)


def count_flops(jaxpr: Any) -> Flops:
  """Counts the operations of all devices together.

  Args:
    jaxpr: A traced program: `jax.jit(step).trace(*args).jaxpr`, or the result
      of `jax.make_jaxpr(step)(*args)`. Of a conditional, the branch with the
      most operations counts.

  Example:
    >>> import jax
    >>> x = jax.ShapeDtypeStruct((8, 4), "float32")
    >>> y = jax.ShapeDtypeStruct((4, 16), "float32")
    >>> count_flops(jax.jit(lambda x, y: x @ y).trace(x, y).jaxpr).model
    1024.0
  """
  return _count(jaxpr, False)


def _count(jaxpr: Any, is_repeated: bool) -> Flops:
  jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
  total = Flops()
  for equation in jaxpr.eqns:
    repeated = is_repeated or _REPEATED in str(equation.source_info.name_stack)
    total += _count_equation(equation, repeated)
  return total


def _count_equation(equation: Any, repeated: bool) -> Flops:
  name, params = equation.primitive.name, equation.params
  if name in ("dot_general", "conv_general_dilated"):
    count = _dot if name == "dot_general" else _convolution
    flops = float(count(equation))
    return Flops(0.0, flops) if repeated else Flops(flops)
  inner = [_count(jaxpr, repeated) for jaxpr in _inner_jaxprs(params)]
  if name == "cond":
    return max(inner, key=lambda f: f.model, default=Flops())
  total = sum(inner, Flops())
  if name == "scan":
    return total * params["length"]
  if name == "while" and total.model + total.repeated:
    return dataclasses.replace(total, exact=False)
  if name == "shard_map":
    # The inner program has the shapes of one device of the manual axes.
    sizes = dict(params["mesh"].shape)
    return total * math.prod(
      sizes[axis] for axis in params.get("manual_axes", sizes)
    )
  if name == "pallas_call":
    return Flops(exact=False)
  return total


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
  # Of functions with their own derivative only the function itself counts: the
  # derivative stands in the backward pass.
  for value in params.values():
    for item in value if isinstance(value, (tuple, list)) else (value,):
      if hasattr(getattr(item, "jaxpr", item), "eqns"):
        yield item


def _dot(equation: Any) -> int:
  (contracted, _), _ = equation.params["dimension_numbers"]
  left = equation.invars[0].aval.shape
  length = math.prod(left[d] for d in contracted)
  return 2 * length * math.prod(equation.outvars[0].aval.shape)


def _convolution(equation: Any) -> int:
  """Counts as if no output position saw padding or the zeros of a dilation.

  The gradient of a strided convolution is one with a dilated input: most
  products have a zero, and are left out.
  """
  params = equation.params
  numbers = params["dimension_numbers"]
  kernel = equation.invars[1].aval.shape
  result = equation.outvars[0].aval.shape
  size = math.prod(result) * math.prod(
    length
    for d, length in enumerate(kernel)
    if d != numbers.rhs_spec[0]  # all but the output features
  )
  return round(2 * size / math.prod(params["lhs_dilation"]))
