"""create_train_state: from a model to its TrainState, born where it lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import inspect
from typing import Any, NamedTuple

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import optax

from flaxshard.core import trees
from flaxshard.core.policy import Policy
from flaxshard.partitioning import rules as rules_lib
from flaxshard.partitioning import specs as specs_lib
from flaxshard.state import fields as fields_lib
from flaxshard.state import linen_module
from flaxshard.state import nnx_adapter
from flaxshard.state import sharding as sharding_lib
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import base

PyTree = Any


def create_train_state(
  model: Any,
  rng: Any,
  sample_input: Any,
  tx: optax.GradientTransformation,
  *,
  wrappers: Sequence[base.Wrapper] = (),
  strategy: sharding_lib.HasMesh | None = None,
  rules: rules_lib.Rules = None,
) -> TrainState:
  """Initializes a model and returns its `TrainState`.

  With a strategy every leaf lies on its mesh from the start: what initializes
  the model, the optimizer and the wrappers is compiled into one function whose
  results are split, so no process ever holds the parameters whole.

  Args:
    model: A Linen module; or an NNX module (which is initialized already: its
      parameters are split off, `rng` and `sample_input` are not used and may be
      None); or a function that makes an NNX module from `nnx.Rngs`
      (`sample_input` is not used).
    rng: A PRNG key, or a dict of keys by stream name, as `model.init` takes it.
    sample_input: One input, arrays or `jax.ShapeDtypeStruct`s; a tuple is a
      list of positional arguments.
    tx: The optax optimizer.
    wrappers: Wrappers such as `LossScale("dynamic")`, outermost first. Those
      that read a precision policy take it from `model.policy`, or from
      `model.dtype`.
    strategy: A `Strategy`, to put the state on its mesh. The optimizer's slots
      lie as their parameters do, the states of wrappers as `partition_specs`
      says, the other collections as their metadata says; the rest, as `step`,
      is on every device.
    rules: How the parameters are split over the mesh: None (their metadata,
      else replicated), `"fsdp"`, or a sequence of rules; see
      `flaxshard.partitioning.rules`. Needs a strategy.

  Returns:
    A state at step 0. `state.apply_fn(variables, *args)` applies the model;
    each collection that it has besides `params` is a field under its own name.

  Raises:
    TypeError: `model`, `wrappers`, `strategy` or a rule is of a wrong type.
    ValueError: The model has no parameters, or a collection with a name that
      the state has already; a rule that cannot be followed, or rules without a
      strategy.

  Example:
    >>> import flaxshard as fs, flax.linen as nn
    >>> state = fs.create_train_state(
    ...     nn.Dense(2), jax.random.key(0), jnp.ones((1, 3)), optax.adam(1e-3),
    ...     wrappers=[fs.LossScale("dynamic")])
    >>> sorted(state.params), sorted(state.wrapper_states)
    (['bias', 'kernel'], ['loss_scale'])
  """
  wrappers = base.check(wrappers)
  if strategy is None and rules is not None:
    raise ValueError(
      f"rules={rules!r} need a strategy, whose mesh they are about; got "
      "strategy=None."
    )
  mesh = None if strategy is None else sharding_lib.mesh_of(strategy)
  if mesh is None and _is_function(model):
    linen_module.check_rng(rng)
    model = nnx_adapter.construct(model, rng)
  if nnx_adapter.is_module(model):
    apply_fn, variables = nnx_adapter.split(model, boxed=mesh is not None)
    about = _about(model, apply_fn)
  else:
    init = _initializer(model, rng, sample_input)
    if mesh is not None:
      birth = _birth(init, tx, wrappers, mesh, rules)
      arrays = birth.make(*birth.args)
      return fields_lib.extend(TrainState, arrays)(**birth.static, **arrays)
    variables = jax.jit(init.initialize)(*init.args)
    about = init.about()
  _check_params(about.name, variables)
  if mesh is None:
    arrays = nn.meta.unbox(variables)
  else:
    specs = _specs(variables, mesh, rules)
    arrays = sharding_lib.put(specs_lib.unbox(variables), specs, mesh)
  return TrainState.create(
    apply_fn=about.apply_fn,
    tx=tx,
    wrappers=base.with_policy(wrappers, about.policy),
    strategy=strategy,
    **arrays,
  )


class _About(NamedTuple):
  """What the variables of a model are not."""

  name: str
  apply_fn: Any
  policy: Policy | None


class _Initializer(NamedTuple):
  """How a model is initialized."""

  initialize: Callable[..., dict[str, PyTree]]  # variables, in their boxes
  args: tuple[Any, ...]
  # The apply function, and what it is of, once `initialize` has been traced.
  about: Callable[[], _About]


class _Birth(NamedTuple):
  """What makes a state on a mesh."""

  make: Any  # jitted: the arrays of the state, by field
  args: tuple[Any, ...]
  static: dict[str, Any]  # the other fields


def _initializer(model: Any, rng: Any, sample_input: Any) -> _Initializer:
  if isinstance(model, nn.Module):
    initialize, args = linen_module.prepare(model, rng, sample_input)
    about = _about(model, model.apply)
    return _Initializer(initialize, args, lambda: about)
  if not _is_function(model):
    raise TypeError(
      "model must be an instance of flax.linen.Module or flax.nnx.Module, or a "
      f"function of nnx.Rngs that returns the latter, got {model!r}."
    )
  linen_module.check_rng(rng)
  traced: list[_About] = []

  def initialize_nnx(rng: Any) -> dict[str, PyTree]:
    # Where the variables lie is settled for all of them together.
    with nnx.use_eager_sharding(False):
      module = nnx_adapter.construct(model, rng)
    apply_fn, variables = nnx_adapter.split(module, boxed=True)
    traced.append(_about(module, apply_fn))
    return variables

  return _Initializer(initialize_nnx, (rng,), lambda: traced[0])


def _birth(
  init: _Initializer,
  tx: optax.GradientTransformation,
  wrappers: tuple[base.Wrapper, ...],
  mesh: jax.sharding.Mesh,
  rules: rules_lib.Rules,
) -> _Birth:
  variables = jax.eval_shape(init.initialize, *init.args)
  about = init.about()
  _check_params(about.name, variables)
  static = dict(
    apply_fn=about.apply_fn,
    tx=tx,
    wrappers=base.with_policy(wrappers, about.policy),
  )

  num_replicas = sharding_lib.check_replicas(mesh, static["wrappers"])

  def make(*args: Any) -> dict[str, PyTree]:
    arrays = specs_lib.unbox(init.initialize(*args))
    state = TrainState.create(**static, **arrays)
    fields = {n: getattr(state, n) for n in fields_lib.data_names(state)}
    if state.wrappers:  # they are of one replica yet
      own = base.drop_replica_axis(state.wrappers, state.wrapper_states)
      fields["wrapper_states"] = base.add_replica_axis(
        state.wrappers, own, num_replicas
      )
    return trees.own_buffers(fields)

  args = sharding_lib.put(
    init.args,
    rules_lib.resolve(None, mesh, init.args, argument="(rng, sample_input)"),
    mesh,
  )
  return _Birth(
    sharding_lib.jit(
      make,
      args,
      mesh,
      specs_lib.unbox(variables["params"]),
      _specs(variables, mesh, rules),
      static["wrappers"],
    ),
    args,
    static,
  )


def _specs(
  variables: Mapping[str, PyTree],
  mesh: jax.sharding.Mesh,
  rules: rules_lib.Rules,
) -> dict[str, PyTree]:
  """Returns the specs of the variables; the rules are about the parameters."""
  return {
    name: rules_lib.resolve(
      rules if name == "params" else None, mesh, tree, argument=name
    )
    for name, tree in variables.items()
  }


def _is_function(model: Any) -> bool:
  """Whether `model` may make an NNX module; a bare class is a lapse."""
  if isinstance(model, (type, nn.Module, nnx.Module)) or not callable(model):
    return False
  try:
    inspect.signature(model).bind(None)
  except (TypeError, ValueError):
    return False
  return True


def _check_params(model: str, variables: Mapping[str, PyTree]) -> None:
  if not jax.tree.leaves(variables.get("params", {})):
    raise ValueError(
      f"model={model} has no parameters: its collections are "
      f"{sorted(variables)}, 'params' must be one with arrays in it."
    )


def _about(module: Any, apply_fn: Any) -> _About:
  return _About(type(module).__name__, apply_fn, _policy_of(module))


def _policy_of(model: Any) -> Policy | None:
  """The model's own policy; float16 as the `dtype` of a module is one too."""
  policy = getattr(model, "policy", None)
  if isinstance(policy, Policy):
    return policy
  try:
    float16 = jnp.dtype(getattr(model, "dtype", None)) == jnp.float16
  except TypeError:  # a field of that name for something else
    float16 = False
  return Policy("mixed_float16") if float16 else None
