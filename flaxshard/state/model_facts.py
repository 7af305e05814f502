"""Static facts about a model: name, apply function and precision."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp

from flaxshard.core import tracing
from flaxshard.core.policy import Policy
from flaxshard.state import call_arguments

PyTree = Any

_HALF = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))


@dataclasses.dataclass(frozen=True)
class Model:
  """Static facts about a model: apply function and precision.

  Attributes:
    name: Name of the model's class, for messages.
    apply_fn: Applies the model: `apply_fn(variables, *args)`.
    policy: The precision policy that the model declares; None if it has none.
    computes_in: The 16-bit dtypes in which its forward pass computes; None if
      the forward pass was not traced.
  """

  name: str
  apply_fn: Any
  policy: Policy | None
  computes_in: frozenset[Any] | None

  @property
  def effective_policy(self) -> Policy | None:
    """The declared policy, or "mixed_float16" if the model computes so."""
    if self.computes_in and jnp.dtype(jnp.float16) in self.computes_in:
      return Policy("mixed_float16")
    return self.policy


def of_linen(model: nn.Module, program: Any) -> Model:
  """Returns the facts about a Linen module, from its initialization."""
  # The program of `init` contains the whole forward pass.
  return Model(
    type(model).__name__, model.apply, _policy_of(model), _dtypes_of(program)
  )


def of_nnx(
  module: nnx.Module,
  apply_fn: Any,
  variables: PyTree,
  sample_input: Any,
  kwargs: Mapping[str, Any] = {},
) -> Model:
  """Returns the facts about an NNX module, from a call with its arguments."""
  computes_in = None
  if sample_input is not None:
    inputs = call_arguments.positional(sample_input)

    # Only variables are traced: a module may branch on a flag.
    def forward(variables: PyTree) -> Any:
      args, by_name = jax.tree.map(zeros, (inputs, dict(kwargs)))
      return apply_fn(variables, *args, mutable=True, **by_name)

    try:
      computes_in = _dtypes_of(jax.make_jaxpr(forward)(variables))
    except Exception:
      # Initialization needs no input, so that one which does not fit is no
      # error here: the first step reports it.
      pass
  if computes_in is None:
    computes_in = _half_dtypes(module) or None
  return Model(type(module).__name__, apply_fn, _policy_of(module), computes_in)


def _dtypes_of(program: Any) -> frozenset[Any]:
  return frozenset(d for d in _HALF if tracing.computes_in(program, d))


def _policy_of(model: Any) -> Policy | None:
  """Returns the precision policy of a model, from its `policy` or `dtype`.

  A model with `dtype=jnp.float16` and no policy has "mixed_float16".
  """
  policy = getattr(model, "policy", None)
  if isinstance(policy, Policy):
    return policy
  return Policy("mixed_float16") if _dtype_of(model) == jnp.float16 else None


def _dtype_of(module: Any) -> Any:
  """Returns the `dtype` of a module, by the convention of Flax's layers."""
  dtype = getattr(module, "dtype", None)
  try:
    return None if dtype is None else jnp.dtype(dtype)
  except TypeError:
    return None  # The module uses the name `dtype` for something else.


def policy_of_nnx(module: Any) -> Policy | None:
  """Returns the precision policy of an NNX module.

  A module with `dtype=jnp.float16`, or with a module in it that has one, and
  with no policy has "mixed_float16".
  """
  policy = _policy_of(module)
  if policy is None and jnp.dtype(jnp.float16) in _half_dtypes(module):
    return Policy("mixed_float16")
  return policy


def _half_dtypes(module: Any) -> frozenset[Any]:
  """Returns the 16-bit dtypes of a module and of the modules in it."""
  modules: list[Any] = [m for _, m in nnx.iter_modules(module)]
  # Linen modules too, such as that of `nnx.bridge.ToNNX`.
  modules += [
    x for m in modules for x in vars(m).values() if isinstance(x, nn.Module)
  ]
  dtypes = (_dtype_of(m) for m in modules)
  return frozenset(d for d in dtypes if d in _HALF)


def zeros(x: Any) -> Any:
  """Returns zeros for a shape and dtype, and any other leaf as it is."""
  is_struct = isinstance(x, jax.ShapeDtypeStruct)
  return jnp.zeros(x.shape, x.dtype) if is_struct else x
