"""Initializes a model directly into a sharded TrainState."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.partitioning import compile_only
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import rules as rules_lib
from flaxshard.state import fields as fields_lib
from flaxshard.state import initialization
from flaxshard.state import lora as lora_lib
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import base
from flaxshard.wrappers import stack
from flaxshard.wrappers.loss_scale import LossScale

PyTree = Any


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
    >>> import flaxshard as fs, flax.linen as nn, jax.numpy as jnp
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
    model = initialization.construct_nnx(model, rng)
  init = initialization.trace(
    model, rng, sample_input, init_kwargs, mesh, rules, strict
  )
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
  if abstract:
    return state
  if (
    init.policy is not None
    and init.policy.compute_dtype == jnp.float16
    and not any(isinstance(w, LossScale) for w in wrappers)
  ):
    # Not for an abstract state, which may be restored to be evaluated alone.
    checks.warn(
      "model: it computes in float16, where small gradients become zero, and "
      "the loss is not scaled. Use wrappers=[LossScale('dynamic')], or "
      "bfloat16."
    )
  if mesh is not None and compile_only.is_compile_only(mesh):
    return state

  def create_fields(*args: Any) -> dict[str, PyTree]:
    given = init.initialize(*args)
    computed = fields_lib.computed(
      state.tx, state.wrappers, given, fields_lib.num_replicas(mesh)
    )
    # The train step donates the state, so no two outputs may share a buffer.
    return trees.unshare_buffers({**given, **computed})

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


def reinitialize(
  state: TrainState, replaced: Mapping[str, PyTree]
) -> TrainState:
  """Returns a state at step 0 with other parameters and collections.

  Optimizer slots and wrapper states are created anew: some hold copies of the
  parameters (a moving average, the local parameters of AGN).

  Args:
    state: A state of arrays, whose shardings the result has.
    replaced: The new values of `params` and of collections, by field.
  """
  sharding: Any = jax.tree.leaves(state.params)[0].sharding
  is_on_mesh = isinstance(sharding, jax.sharding.NamedSharding)
  fields = fields_lib.complete_fields(
    state.tx,
    state.wrappers,
    {**fields_lib.variables(state), **replaced},
    sharding.mesh if is_on_mesh else None,
  )
  return state.replace(**fields)
