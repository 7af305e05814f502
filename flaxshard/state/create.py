"""Initializes a model directly into a sharded TrainState."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from flax import linen as nn
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxshard.core import checks
from flaxshard.core import jaxprs
from flaxshard.core.policy import Policy
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import rules as rules_lib
from flaxshard.state import fields as fields_lib
from flaxshard.state import lora as lora_lib
from flaxshard.state import nnx_adapter
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import base
from flaxshard.wrappers import stack
from flaxshard.wrappers.loss_scale import LossScale

PyTree = Any

_ARRAYS = (jax.Array, np.ndarray, np.generic)


def create_train_state(
  model: Any,
  rng: Any,
  sample_input: Any,
  tx: optax.GradientTransformation,
  *,
  wrappers: Sequence[base.Base] = (),
  strategy: fields_lib.HasMesh | None = None,
  rules: rules_lib.Rules = None,
  strict: bool = True,
  abstract: bool = False,
  lora: lora_lib.LoRA | None = None,
  sparse: Sequence[str] = (),
  sparse_semantics: str = "lazy",
  **init_kwargs: Any,
) -> TrainState:
  """Initializes a model and returns its `TrainState`.

  With a strategy, every leaf is created in its final sharding: the model, the
  optimizer and the wrappers are initialized by one compiled function with
  sharded outputs, so no process ever holds all parameters.

  With `abstract=True`, or with a strategy whose devices are for compiling alone
  (`Strategy("v5e:2x4")`), nothing is allocated or compiled. The state has a
  `jax.ShapeDtypeStruct` (shape, dtype, sharding) for every array. Pass it to
  `Checkpointer.restore` to resume with only one state in memory.

  Args:
    model: A Linen module, an NNX module, or a function that takes `nnx.Rngs`
      and returns an NNX module. An NNX module is initialized already: its
      arrays are copied, and `rng` may be None. For NNX `sample_input` is not
      read.
    rng: A PRNG key, or a dict of keys by stream name, as in `model.init`.
    sample_input: One input of the model: arrays or `jax.ShapeDtypeStruct`s. A
      tuple is a list of positional arguments.
    tx: The optax optimizer.
    wrappers: Wrappers such as `LossScale("dynamic")`, outermost first. Wrappers
      with a precision policy take it from `model.policy` or `model.dtype`.
    strategy: The `Strategy` whose mesh holds the state. Optimizer slots are
      sharded like their parameters, wrapper states by their `specs`, other
      collections by their metadata. Everything else is replicated.
    rules: How the parameters are split over the mesh: None (by their metadata,
      else replicated), `"fsdp"`, or a sequence of rules; see
      `flaxshard.partitioning.rules`. Needs a strategy.
    strict: Whether a logical name that has no rule is an error. With False its
      dimension is unsplit, as in `flax.linen.logical_to_mesh_sharding`.
    abstract: Whether to return shapes, dtypes and shardings for the arrays.
      Without a strategy, the sharding is that of the default device.
    lora: A `LoRA` trains low-rank factors of some parameters; the others are in
      the collection `frozen`. `rules` are about the model's own parameters.
    sparse: Regular expressions, found in paths such as `embed/embedding`:
      gradients and updates of these tables have the rows that a step used; see
      `flaxshard.sparse_rows`.
    sparse_semantics: What happens to the other rows: `"lazy"` leaves them and
      their slots as they are; see there.
    **init_kwargs: Keyword arguments of the model's call, such as `train=False`,
      and of `model.init`, such as `method`. Arrays and `jax.ShapeDtypeStruct`s
      among them are treated as those of `sample_input`, which may be `()`. NNX
      models take none: they are not called.

  Returns:
    A state at step 0. `state.apply_fn(variables, *args)` applies the model.
    Each collection other than `params` is a field under its own name.

  Raises:
    TypeError: `model`, `tx`, `wrappers`, `strategy` or a rule has a wrong type,
      or an NNX model is given arguments for a call.
    ValueError: The model has no parameters, a collection has the name of a
      TrainState field, a rule or `lora` cannot be applied, `rules` are given
      without a strategy, or a pattern of `sparse` matches no table.

  Example:
    >>> import flaxshard as fs, flax.linen as nn, jax, jax.numpy as jnp, optax
    >>> args = nn.Dense(2), jax.random.key(0), jnp.ones((1, 3)), optax.adam(0.1)
    >>> state = fs.create_train_state(*args, wrappers=[fs.LossScale("dynamic")])
    >>> sorted(state.params), sorted(state.wrapper_states)
    (['bias', 'kernel'], ['loss_scale'])
    >>> abstract_state = fs.create_train_state(*args, abstract=True)
    >>> abstract_state.params["kernel"].shape
    (3, 2)
  """
  wrappers = stack.check(wrappers)
  mesh = fields_lib.mesh_of(strategy, rules)
  if init_kwargs and not isinstance(model, nn.Module):
    # Otherwise a misspelt argument, such as `wrapers`, would be lost.
    raise TypeError(
      f"create_train_state: {', '.join(init_kwargs)} is no argument; only "
      "Linen modules are called, with arguments of their own."
    )
  if mesh is None and not abstract and not isinstance(model, nn.Module):
    # Not traced, so that a function of `nnx.Rngs` may use concrete values.
    model = _construct_nnx(model, rng)
  init = _trace(model, rng, sample_input, init_kwargs, mesh, rules, strict)
  if not jax.tree.leaves(init.variables.get("params", {})):
    raise ValueError(
      f"model={type(model).__name__} has no parameters: its collections are "
      f"{sorted(init.variables)}, 'params' must be one with arrays in it."
    )
  if lora is not None:
    init = lora_lib.add_factors(init, lora, rng)
  # Errors are raised here, before anything is compiled.
  state = TrainState.create(
    apply_fn=init.apply_fn,
    tx=tx,
    wrappers=stack.with_policy(wrappers, init.policy),
    strategy=strategy,
    sparse=sparse,
    sparse_semantics=sparse_semantics,
    **init.variables,
  )
  if abstract or mesh_lib.is_compile_only(mesh):
    return state
  # Not for an abstract state, which may be restored to be evaluated alone.
  warn_if_unscaled(init.policy, wrappers)

  def create_fields(*args: Any) -> dict[str, PyTree]:
    given = init.initialize(*args)
    return fields_lib.create(state.tx, state.wrappers, mesh, given)

  # Without a strategy the arrays are not committed to a device.
  args, shardings = init.args, None
  if mesh is not None:
    # jit refuses arguments that are committed to other devices.
    places = fields_lib.shardings_of(init.arg_specs, mesh)
    args = jax.tree.map(mesh_lib.put, args, places)
    # Each device computes its own part of the initial values only.
    shardings = jax.tree.map(
      lambda x: x.sharding, fields_lib.array_fields(state)
    )
  return state.replace(**jax.jit(create_fields, out_shardings=shardings)(*args))


# -- Initialization of Linen and NNX models, concretely or as shapes only.


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


def _trace(
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
    apply_fn, boxed = nnx_adapter.split(model)
    policy, args = policy_of(model), (rules_lib.unbox(boxed),)
    # Copies: donating the state must not delete the arrays of the module.
    initialize = lambda variables: jax.tree.map(jnp.copy, variables)
  else:
    static: list[Any] = []

    def initialize_nnx(rng: Any) -> dict[str, PyTree]:
      # NNX would shard each variable by its metadata alone, before `rules` do.
      with nnx.use_eager_sharding(False):
        module = _construct_nnx(model, rng)
      apply_fn, variables = nnx_adapter.split(module)
      static[:] = apply_fn, policy_of(module)
      return variables

    initialize, args = initialize_nnx, (rng,)
    boxed = jax.eval_shape(initialize, *args)
    apply_fn, policy = static

  # A constraint of a mesh in the context counts where there is no strategy.
  unbox = nn.meta.unbox if mesh is None else rules_lib.unbox
  variables, arg_specs = jax.eval_shape(unbox, boxed), None
  if mesh is not None:
    resolve = functools.partial(rules_lib.resolve, strict=strict)
    specs = {
      # The rules are about the parameters alone.
      name: resolve(rules if name == "params" else None, mesh, x, argument=name)
      for name, x in boxed.items()
    }
    shardings = fields_lib.shardings_of(specs, mesh)
    variables = jax.tree.map(mesh_lib.abstract_array, variables, shardings)
    arg_specs = (specs,)
    if not isinstance(model, nnx.Module):
      arg_specs = resolve(None, mesh, args, argument="(rng, sample_input)")
  return Initializer(
    lambda *args: unbox(initialize(*args)),
    args,
    variables,
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


def warn_if_unscaled(policy: Policy | None, wrappers: stack.Wrappers) -> None:
  """Warns if a model of that policy needs a `LossScale` and has none."""
  is_half = policy is not None and policy.compute_dtype == jnp.float16
  if is_half and not any(isinstance(w, LossScale) for w in wrappers):
    checks.warn(
      "model: it computes in float16, where small gradients become zero, and "
      "the loss is not scaled. Use wrappers=[LossScale('dynamic')], or "
      "bfloat16."
    )


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
    given = [
      jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
      for x in (arrays.get(i, x) for i, x in enumerate(leaves))
    ]
    args, kwargs = jax.tree.unflatten(treedef, given)
    variables = dict(model.init(rng, *args, **kwargs))
    # A state of Flax's TrainState has both collections in its `params`.
    if OVERWRITE_WITH_GRADIENT in variables:
      scales = variables.pop(OVERWRITE_WITH_GRADIENT)
      params = {"params": variables["params"], OVERWRITE_WITH_GRADIENT: scales}
      variables["params"] = params
    return variables

  return initialize, (rng, arrays)


def _construct_nnx(model: Any, rng: Any) -> nnx.Module:
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
