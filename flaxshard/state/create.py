"""Initializes a model directly into a sharded TrainState."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

from flaxshard.core import checks
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.core.policy import Policy
from flaxshard.partitioning import compile_only
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import rules as rules_lib
from flaxshard.partitioning import specs as specs_lib
from flaxshard.sparse import optimizer as sparse_optimizer
from flaxshard.state import fields as fields_lib
from flaxshard.state import initialization
from flaxshard.state import lora as lora_lib
from flaxshard.state import sharding as sharding_lib
from flaxshard.state.train_state import check_collections
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import base
from flaxshard.wrappers import stack
from flaxshard.wrappers.loss_scale import LossScale

PyTree = Any
P = jax.sharding.PartitionSpec


def create_train_state(
  model: Any,
  rng: Any,
  sample_input: Any,
  tx: optax.GradientTransformation,
  *,
  wrappers: Sequence[base.Base] = (),
  strategy: sharding_lib.HasMesh | None = None,
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
  opt_state_lib.check_tx(tx)
  tx = sparse_optimizer.wrap(tx, sparse, sparse_semantics)
  mesh = sharding_lib.mesh_of(strategy, rules)
  if init_kwargs and not isinstance(model, nn.Module):
    # Otherwise a misspelt argument, such as `wrapers`, would be lost.
    raise TypeError(
      f"create_train_state: {', '.join(init_kwargs)} is no argument; only "
      "Linen modules are called, with arguments of their own."
    )
  if mesh is None and not abstract and not isinstance(model, nn.Module):
    # Not traced, so that a function of `nnx.Rngs` may use concrete values.
    model = initialization.construct_nnx(model, rng)
  plan = plan_creation(
    model,
    rng,
    sample_input,
    tx,
    wrappers=wrappers,
    mesh=mesh,
    rules=rules,
    strict=strict,
    lora=lora,
    init_kwargs=init_kwargs,
  )
  if not abstract:
    for message in plan.notes:
      checks.warn(message)
  # Without the notes: the state may be restored to be evaluated alone.
  if abstract or (mesh is not None and compile_only.is_compile_only(mesh)):
    return plan.abstract_state()
  return plan.create_state()


@dataclasses.dataclass(frozen=True)
class CreationPlan:
  """A traced creation of a train state; nothing is allocated or compiled yet.

  Attributes:
    create_fields: Takes `args` and returns the array fields of the state.
    args: Arrays, or `jax.ShapeDtypeStruct`s of them.
    arg_shardings: Shardings of `args`; None leaves them where they are.
    static_fields: The other fields of the state.
    abstract_fields: Shape, dtype and sharding of what `create_fields` returns.
    notes: What `create_train_state` warns of.
  """

  create_fields: Callable[..., dict[str, PyTree]]
  args: tuple[Any, ...]
  arg_shardings: PyTree
  static_fields: Mapping[str, Any]
  abstract_fields: Mapping[str, PyTree]
  notes: Sequence[str] = ()

  def abstract_state(self) -> TrainState:
    """Returns the state with a `jax.ShapeDtypeStruct` for every array."""
    return self._assemble(self.abstract_fields)

  def create_state(self) -> TrainState:
    """Compiles and runs `create_fields`; returns the state."""
    jitted, args = self.jit()
    return self._assemble(jitted(*args))

  def jit(self) -> tuple[Any, tuple[Any, ...]]:
    """Returns `create_fields` under `jax.jit`, and its arguments placed."""
    args = self.args
    # Without a strategy the arrays are not committed to a device.
    shardings = None
    if self.arg_shardings is not None:
      # jit refuses arguments that are committed to other devices.
      args = jax.tree.map(mesh_lib.put, args, self.arg_shardings)
      # Each device computes its own part of the initial values only.
      shardings = sharding_lib.shardings_like(self.abstract_fields)
    return jax.jit(self.create_fields, out_shardings=shardings), args

  def _assemble(self, fields: Mapping[str, PyTree]) -> TrainState:
    cls = fields_lib.extend(TrainState, fields)
    return cls(**self.static_fields, **fields)


def plan_creation(
  model: Any,
  rng: Any,
  sample_input: Any,
  tx: optax.GradientTransformation,
  *,
  wrappers: tuple[base.Base, ...] = (),
  mesh: jax.sharding.Mesh | None = None,
  rules: rules_lib.Rules = None,
  strict: bool = True,
  lora: lora_lib.LoRA | None = None,
  init_kwargs: Mapping[str, Any] = {},
) -> CreationPlan:
  """Traces the creation of a train state.

  Args:
    model: As in `create_train_state`, like the following four.
    rng: See there.
    sample_input: See there.
    tx: See there.
    wrappers: See there.
    mesh: The mesh of the strategy; None is the default device.
    rules: How the parameters are split over the mesh.
    strict: Whether a logical name that has no rule is an error.
    lora: The factors that are trained in place of the parameters, if any.
    init_kwargs: Keyword arguments of the model's call and `init`.
  """
  init = initialization.trace(model, rng, sample_input, init_kwargs)
  # Errors in the rules are raised here, before anything is compiled.
  specs: dict[str, PyTree] = {}
  args = init.args
  arg_specs: PyTree = None
  if mesh is not None:
    for name, tree in init.variables.items():
      # The rules are about the parameters alone.
      tree_rules = rules if name == "params" else None
      specs[name] = rules_lib.resolve(
        tree_rules, mesh, tree, argument=name, strict=strict
      )
    arg_specs = ({**specs},)
    if not init.args_are_variables:
      arg_specs = rules_lib.resolve(
        None, mesh, init.args, argument="(rng, sample_input)", strict=strict
      )
  apply_fn, split = init.apply_fn, None
  if lora is not None:
    if lora_lib.FROZEN in init.variables:
      raise ValueError(
        f"lora: the model has a collection {lora_lib.FROZEN!r} already, in "
        "which the frozen parameters would be."
      )
    split = lora_lib.plan_split(lora, specs_lib.unbox(init.variables["params"]))
    if specs:
      specs["params"], specs[lora_lib.FROZEN] = split.split_specs(
        specs["params"]
      )
    apply_fn = lora_lib.Apply(apply_fn, lora.alpha / lora.rank)
    args = (*args, lora_lib.factor_key(rng))
    if arg_specs is not None:
      arg_specs = (*arg_specs, P())
  check_collections(
    TrainState, {k: v for k, v in init.variables.items() if k != "params"}
  )
  wrappers = stack.with_policy(wrappers, init.policy)
  num_replicas = sharding_lib.count_replicas(mesh, wrappers)
  # A constraint of a mesh in the context counts where there is no strategy.
  unbox = nn.meta.unbox if mesh is None else specs_lib.unbox

  def create_fields(*args: Any) -> dict[str, PyTree]:
    if split is None:
      arrays = unbox(init.initialize(*args))
    else:
      *init_args, key = args
      arrays = unbox(init.initialize(*init_args))
      arrays["params"], arrays[lora_lib.FROZEN] = split.split_arrays(
        arrays["params"], key
      )
    computed = fields_lib.computed(tx, wrappers, arrays, num_replicas)
    # The train step donates the state, so no two outputs may share a buffer.
    return trees.unshare_buffers({**arrays, **computed})

  abstract_fields = sharding_lib.abstract_fields(
    jax.eval_shape(create_fields, *args), specs, wrappers, mesh
  )
  return CreationPlan(
    create_fields,
    args,
    None if mesh is None else sharding_lib.shardings_of(arg_specs, mesh),
    dict(
      apply_fn=apply_fn,
      tx=sparse_optimizer.with_parts(tx, abstract_fields["params"]),
      wrappers=wrappers,
    ),
    abstract_fields,
    _precision_notes(init.policy, wrappers),
  )


def _precision_notes(
  policy: Policy | None, wrappers: Sequence[base.Base]
) -> list[str]:
  """Returns a warning about a float16 model whose loss is not scaled."""
  scaled = any(isinstance(w, LossScale) for w in wrappers)
  if policy is None or policy.compute_dtype != jnp.float16 or scaled:
    return []
  return [
    "model: it computes in float16, where small gradients become zero, and the "
    "loss is not scaled. Use wrappers=[LossScale('dynamic')], or bfloat16."
  ]


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
  given = fields_lib.variables(state) | dict(replaced)
  old = {
    name: tree
    for name, tree in fields_lib.array_fields(state).items()
    if name not in given
  }

  def create_fields(given: Mapping[str, PyTree]) -> dict[str, PyTree]:
    new = fields_lib.computed(state.tx, state.wrappers, given)
    # Of one replica: each per-replica leaf has one row.
    new = jax.tree.map(lambda x, old: jnp.broadcast_to(x, old.shape), new, old)
    # The train step donates the state, so no two outputs may share a buffer.
    return trees.unshare_buffers(new)

  jitted = jax.jit(
    create_fields, out_shardings=sharding_lib.shardings_like(old)
  )
  return state.replace(**replaced, **jitted(given))
