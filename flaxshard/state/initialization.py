"""Initializes Linen and NNX models, concretely or as shapes only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

from flax import linen as nn
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks
from flaxshard.core import jaxprs
from flaxshard.core.policy import Policy
from flaxshard.partitioning import compile_only
from flaxshard.partitioning import rules as rules_lib
from flaxshard.state import fields as fields_lib
from flaxshard.state import nnx_adapter

PyTree = Any

_ARRAYS = (jax.Array, np.ndarray, np.generic)


@dataclasses.dataclass(frozen=True)
class Initializer:
  """A traced initialization of a model; nothing is allocated yet.

  Attributes:
    initialize: Takes `args` and returns the variables by collection.
    args: Arrays, or `jax.ShapeDtypeStruct`s of them.
    variables: Shapes and dtypes of the variables. On a mesh, and if they are
      those of an existing NNX module, they have a sharding too.
    apply_fn: Applies the model: `apply_fn(variables, *args)`.
    policy: The precision policy that the model declares, or "mixed_float16" if
      it computes in float16; None if neither.
    arg_specs: PartitionSpecs of `args`; None without a mesh.
  """

  initialize: Callable[..., dict[str, PyTree]]
  args: tuple[Any, ...]
  variables: dict[str, PyTree]
  apply_fn: Callable[..., Any]
  policy: Policy | None
  arg_specs: PyTree = None


def trace(
  model: Any,
  rng: Any,
  sample_input: Any,
  init_kwargs: Mapping[str, Any],
  mesh: jax.sharding.Mesh | None,
  rules: rules_lib.Rules,
  strict: bool,
) -> Initializer:
  """Traces the initialization of a model; allocates and compiles nothing.

  Args:
    model: As in `create_train_state`.
    rng: See there.
    sample_input: See there.
    init_kwargs: See there.
    mesh: The mesh of the strategy; None is the default device.
    rules: How the parameters are split over the mesh.
    strict: Whether a logical name that has no rule is an error.
  """
  # The variables are in the boxes of their partitioning metadata, if any.
  initialize: Callable[..., dict[str, PyTree]]
  args: tuple[Any, ...]
  apply_fn: Callable[..., Any]
  if isinstance(model, nn.Module):
    linen, args = _linen_initializer(model, rng, sample_input, init_kwargs)
    # Under jit, so that it is traced once.
    jitted = jax.jit(linen)
    traced = jitted.trace(*args)
    initialize, apply_fn, policy = jitted, model.apply, policy_of(model)
    boxed = traced.out_info
    # The program of `init` contains the whole forward pass.
    if jaxprs.computes_in(traced.jaxpr, jnp.float16):
      policy = Policy("mixed_float16")
  elif isinstance(model, nnx.Module):
    apply_fn, boxed = nnx_adapter.split(model, boxed=True, copy=False)
    policy, args = policy_of(model), (rules_lib.unbox(boxed),)
    # Copies: donating the state must not delete the arrays of the module.
    initialize = lambda variables: jax.tree.map(jnp.copy, variables)
  else:
    static: list[Any] = []

    def initialize_nnx(rng: Any) -> dict[str, PyTree]:
      # NNX would shard each variable by its metadata alone, before `rules` do.
      with nnx.use_eager_sharding(False):
        module = construct_nnx(model, rng)
      apply_fn, variables = nnx_adapter.split(module, boxed=True)
      static[:] = apply_fn, policy_of(module)
      return variables

    initialize, args = initialize_nnx, (rng,)
    boxed = jax.eval_shape(initialize, *args)
    apply_fn, policy = static

  if mesh is None:
    # A constraint of a mesh in the context counts where there is no strategy.
    unboxed = lambda *args: nn.meta.unbox(initialize(*args))
    shapes = jax.eval_shape(unboxed, *args)
    return Initializer(unboxed, args, shapes, apply_fn, policy)
  resolve = functools.partial(rules_lib.resolve, strict=strict)
  specs = {
    # The rules are about the parameters alone.
    name: resolve(rules if name == "params" else None, mesh, x, argument=name)
    for name, x in boxed.items()
  }
  arg_specs: PyTree = (specs,)
  if not isinstance(model, nnx.Module):
    arg_specs = resolve(None, mesh, args, argument="(rng, sample_input)")
  return Initializer(
    lambda *args: rules_lib.unbox(initialize(*args)),
    args,
    jax.tree.map(
      compile_only.abstract_array,
      rules_lib.unbox(boxed),
      fields_lib.shardings_of(specs, mesh),
    ),
    apply_fn,
    policy,
    arg_specs,
  )


def policy_of(model: Any) -> Policy | None:
  """Returns the precision policy of a module, or None.

  It is its attribute `policy`. Without one, a module with `dtype=jnp.float16`
  has "mixed_float16", and so has an NNX module with such a module in it.
  """
  policy = getattr(model, "policy", None)
  if isinstance(policy, Policy):
    return policy
  modules: list[Any] = [model]
  if not isinstance(model, nn.Module):
    modules = [m for _, m in nnx.iter_modules(model)]
    # Linen modules too, such as that of `nnx.bridge.ToNNX`.
    modules += [
      x for m in modules for x in vars(m).values() if isinstance(x, nn.Module)
    ]
  return Policy("mixed_float16") if any(map(_is_float16, modules)) else None


def _is_float16(module: Any) -> bool:
  """Returns whether the `dtype` of a layer, as Flax names it, is float16."""
  dtype = getattr(module, "dtype", None)
  try:
    return dtype is not None and jnp.dtype(dtype) == jnp.float16
  except TypeError:
    return False  # The module uses the name `dtype` for something else.


def _linen_initializer(
  model: nn.Module,
  rng: Any,
  sample_input: Any,
  init_kwargs: Mapping[str, Any],
) -> tuple[Callable[..., dict[str, PyTree]], tuple[Any, dict[int, Any]]]:
  """Returns a traceable function that initializes `model`, and its arguments.

  The overwrite-with-gradient collection of Flax's fp8 modules becomes a part of
  the parameters, where `flax.training.train_state.TrainState` expects it.
  """
  # `type(...) is`: a NamedTuple is one argument.
  is_tuple = type(sample_input) is tuple
  inputs = sample_input if is_tuple else (sample_input,)
  leaves, treedef = jax.tree.flatten((inputs, dict(init_kwargs)))
  # Only arrays are traced: a model may branch on a flag such as train=True.
  arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, _ARRAYS)}

  # `rng` and `arrays` are arguments, not constants: jit would embed constants
  # in the program, and could not place them on the mesh.
  def initialize(rng: Any, arrays: dict[int, Any]) -> dict[str, PyTree]:
    given = [_zeros(arrays.get(i, x)) for i, x in enumerate(leaves)]
    args, kwargs = jax.tree.unflatten(treedef, given)
    variables = dict(model.init(rng, *args, **kwargs))
    # A state of Flax's TrainState has both collections in its `params`.
    if OVERWRITE_WITH_GRADIENT in variables:
      scales = variables.pop(OVERWRITE_WITH_GRADIENT)
      params = {"params": variables["params"], OVERWRITE_WITH_GRADIENT: scales}
      variables["params"] = params
    return variables

  return initialize, (rng, arrays)


def _zeros(x: Any) -> Any:
  """Returns zeros for a shape and dtype, and any other leaf as it is."""
  is_struct = isinstance(x, jax.ShapeDtypeStruct)
  return jnp.zeros(x.shape, x.dtype) if is_struct else x


def construct_nnx(model: Any, rng: Any) -> nnx.Module:
  """Returns an NNX module, or the one that a function of `nnx.Rngs` returns."""
  module = model
  if callable(model) and not isinstance(model, nnx.Module):
    rngs = nnx.Rngs(**rng) if isinstance(rng, Mapping) else nnx.Rngs(rng)
    module = model(rngs)
  if not isinstance(module, nnx.Module):
    raise TypeError(
      "model must be a Linen module, an NNX module, or a function of nnx.Rngs "
      f"that returns one, got {checks.describe(model)}."
    )
  return module
