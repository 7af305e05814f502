"""Initializes Linen and NNX models, concretely or as shapes only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import inspect
from typing import Any

from flax import linen as nn
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks
from flaxshard.partitioning import specs as specs_lib
from flaxshard.state import call_arguments
from flaxshard.state import model_facts
from flaxshard.state import nnx_adapter

PyTree = Any

_ARRAYS = (jax.Array, np.ndarray, np.generic)


@dataclasses.dataclass(frozen=True)
class Initializer:
  """A traceable initialization of a model; nothing is allocated yet.

  Attributes:
    initialize: Takes `args` and returns the variables, in the boxes of their
      partitioning metadata where they have any.
    args: Arrays, or `jax.ShapeDtypeStruct`s of them.
    variables: Shapes and dtypes of the variables, in the same boxes. The
      variables of an existing NNX module have a sharding too.
    model: Static facts about the model.
    args_are_variables: Whether `args` is `(variables,)` without boxes.
  """

  initialize: Callable[..., dict[str, PyTree]]
  args: tuple[Any, ...]
  variables: dict[str, PyTree]
  model: model_facts.Model
  args_are_variables: bool = False


def run(
  model: Any, rng: Any, sample_input: Any, init_kwargs: Mapping[str, Any] = {}
) -> tuple[model_facts.Model, dict[str, PyTree]]:
  """Initializes a model on the default device.

  Args:
    model: As in `create_train_state`, like the other three.
    rng: See there.
    sample_input: See there.
    init_kwargs: See there.

  Returns:
    Static facts about the model, and its variables in the boxes of their
    partitioning metadata, by collection.

  Raises:
    TypeError, ValueError: See `create_train_state`.
  """
  if isinstance(model, nn.Module):
    initialize, args = _linen_initializer(model, rng, sample_input, init_kwargs)
    # Under jit: otherwise each operation is compiled by itself.
    jitted = jax.jit(initialize)
    program = jitted.trace(*args).jaxpr  # traced once, also for the call
    variables = jitted(*args)
    _check_params(model, variables)
    return model_facts.of_linen(model, program), variables
  if not isinstance(model, nnx.Module):
    # Not under jit, so the function may use concrete values.
    model = _construct_nnx(model, rng)
  apply_fn, variables = nnx_adapter.split(model)
  facts = _nnx_facts(model, apply_fn, variables, sample_input, init_kwargs)
  return facts, variables


def trace(
  model: Any, rng: Any, sample_input: Any, init_kwargs: Mapping[str, Any] = {}
) -> Initializer:
  """Traces the initialization of a model; allocates and compiles nothing.

  Args:
    model: As in `create_train_state`, like the other three.
    rng: See there.
    sample_input: See there.
    init_kwargs: See there.

  Raises:
    TypeError, ValueError: See `create_train_state`.
  """
  if isinstance(model, nn.Module):
    initialize, args = _linen_initializer(model, rng, sample_input, init_kwargs)
    traced = jax.jit(initialize).trace(*args)
    _check_params(model, traced.out_info)
    facts = model_facts.of_linen(model, traced.jaxpr)
    return Initializer(initialize, args, traced.out_info, facts)

  if isinstance(model, nnx.Module):
    apply_fn, variables = nnx_adapter.split(model, boxed=True, copy=False)
    facts = _nnx_facts(model, apply_fn, variables, sample_input, init_kwargs)
    return Initializer(
      # Copies: donating the state must not delete the arrays of the module.
      lambda variables: jax.tree.map(jnp.copy, variables),
      (specs_lib.unbox(variables),),
      variables,
      facts,
      args_are_variables=True,
    )

  models: list[model_facts.Model] = []

  def initialize_nnx(rng: Any) -> dict[str, PyTree]:
    # NNX would shard each variable by its metadata alone, before `rules` do.
    with nnx.use_eager_sharding(False):
      module = _construct_nnx(model, rng)
    apply_fn, variables = nnx_adapter.split(module, boxed=True)
    models.append(
      _nnx_facts(module, apply_fn, variables, sample_input, init_kwargs)
    )
    return variables

  _check_function(model)
  _check_rng(rng)  # the error of `eval_shape` would not name the argument
  variables = jax.eval_shape(initialize_nnx, rng)
  return Initializer(initialize_nnx, (rng,), variables, models[0])


def _nnx_facts(
  module: nnx.Module,
  apply_fn: Any,
  variables: Mapping[str, PyTree],
  sample_input: Any,
  init_kwargs: Mapping[str, Any],
) -> model_facts.Model:
  """Checks an NNX module and its arguments; returns the facts about it."""
  _check_params(module, variables)
  call_arguments.check_nnx(module, sample_input, init_kwargs)
  unboxed = specs_lib.unbox(variables)
  return model_facts.of_nnx(
    module, apply_fn, unboxed, sample_input, init_kwargs
  )


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
  _check_rng(rng)
  inputs = call_arguments.positional(sample_input)
  init_kwargs = dict(init_kwargs)
  leaves, treedef = jax.tree.flatten((inputs, init_kwargs))
  if not jax.tree.leaves(inputs) and not init_kwargs:
    raise ValueError(
      f"sample_input must be one input of the model, got {sample_input!r}."
    )
  call_arguments.check_linen(model, inputs, init_kwargs)
  # Only arrays are traced: a model may branch on a flag such as train=True.
  arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, _ARRAYS)}

  # `rng` and `arrays` are arguments, not constants: jit would embed constants
  # in the program, and could not place them on the mesh.
  def initialize(rng: Any, arrays: dict[int, Any]) -> dict[str, PyTree]:
    given = [model_facts.zeros(arrays.get(i, x)) for i, x in enumerate(leaves)]
    args, kwargs = jax.tree.unflatten(treedef, given)
    try:
      variables = dict(model.init(rng, *args, **kwargs))
    except Exception as e:
      # Flax's message often says only how a layer failed, not on which input.
      if isinstance(sample_input, Mapping):
        first = next(iter(sample_input))
        raise TypeError(
          f"sample_input must be what {type(model).__name__} is called with, "
          f"got {checks.describe(sample_input)}, with which it fails "
          f"({type(e).__name__}). Pass the input of a batch, not the batch, "
          f"such as batch[{first!r}]."
        ) from e
      by_name = "".join(
        f", {name}={jax.tree.map(_describe, value)}"
        for name, value in init_kwargs.items()
      )
      e.add_note(
        f"{type(model).__name__} was called with sample_input="
        f"{jax.tree.map(_describe, sample_input)}{by_name}. A tuple is a list "
        "of positional arguments; further keyword arguments of "
        "create_train_state, such as train=False, are passed by name."
      )
      raise
    # A state of Flax's TrainState has both collections in its `params`.
    if OVERWRITE_WITH_GRADIENT in variables:
      scales = variables.pop(OVERWRITE_WITH_GRADIENT)
      params = {"params": variables["params"], OVERWRITE_WITH_GRADIENT: scales}
      variables["params"] = params
    return variables

  return initialize, (rng, arrays)


def _describe(leaf: Any) -> Any:
  """Returns dtype and shape of an array, and any other leaf as it is."""
  if isinstance(leaf, (*_ARRAYS, jax.ShapeDtypeStruct)):
    return f"{leaf.dtype}{list(leaf.shape)}"
  return leaf


def _construct_nnx(function: Any, rng: Any) -> nnx.Module:
  """Calls a function of `nnx.Rngs` that returns an NNX module."""
  _check_function(function)
  _check_rng(rng)
  rngs = nnx.Rngs(**rng) if isinstance(rng, Mapping) else nnx.Rngs(rng)
  module = function(rngs)
  if not isinstance(module, nnx.Module):
    raise TypeError(
      "model must be an instance of flax.linen.Module or flax.nnx.Module, or a "
      f"function that returns the latter, got {checks.describe(function)}, "
      f"which returned {checks.describe(module)}."
    )
  return module


def _check_function(model: Any) -> None:
  """Raises a TypeError unless `model` can be called with `nnx.Rngs`."""
  if isinstance(model, nnx.Optimizer):
    raise TypeError(
      f"model must be a module, got a {type(model).__name__}. For a TrainState "
      "pass the module, and the optax optimizer as tx. To keep NNX's train "
      "step, with wrappers, write flaxshard.nnx.Optimizer(model, tx, "
      "wrt=nnx.Param, wrappers=[...])."
    )
  # A module class is callable too, but here it is a forgotten `()`.
  if callable(model) and not isinstance(model, type):
    try:
      inspect.signature(model).bind(None)
      return
    except (TypeError, ValueError):
      pass  # it takes another number of arguments, or has no signature
  raise TypeError(
    "model must be an instance of flax.linen.Module or flax.nnx.Module, or a "
    "function of nnx.Rngs that returns the latter, got "
    f"{checks.describe(model)}."
  )


def _check_rng(rng: Any) -> None:
  """Raises a TypeError unless `rng` is a PRNG key or a dict of keys."""
  got = checks.describe(rng)
  message = (
    "rng must be a PRNG key, such as jax.random.key(0), or a dict of keys, got "
    f"{got}."
  )
  if not jax.tree.leaves(rng):
    raise TypeError(message)
  try:
    # Accepts typed keys and raw uint32 keys, as `model.init` does.
    jax.eval_shape(lambda rng: jax.tree.map(jax.random.key_data, rng), rng)
  except TypeError as e:
    raise TypeError(message) from e


def _check_params(model: Any, variables: Mapping[str, PyTree]) -> None:
  if not jax.tree.leaves(variables.get("params", {})):
    hint = ""
    if "arrays" in variables:
      hint = (
        " Arrays that are attributes are not trained: write nnx.Param(array); "
        "or select them with flaxshard.nnx.Optimizer(model, tx, wrt=lambda "
        "path, x: path[-1] == 'w')."
      )
    raise ValueError(
      f"model={type(model).__name__} has no parameters: its collections are "
      f"{sorted(variables)}, 'params' must be one with arrays in it.{hint}"
    )
