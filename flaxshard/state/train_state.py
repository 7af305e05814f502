"""TrainState: Flax's train state with wrappers around the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import inspect
from typing import Any, ClassVar, Self, TYPE_CHECKING

from flax import core
from flax import struct
from flax.training import train_state as flax_train_state
import jax
import optax

from flaxshard.core import checks
from flaxshard.core import extra_arguments
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.sparse import optimizer as sparse_optimizer
from flaxshard.state import describe
from flaxshard.state import fields as fields_lib
from flaxshard.state import tf_surface
from flaxshard.wrappers import base
from flaxshard.wrappers import stack
from flaxshard.wrappers import step as step_lib

PyTree = Any

# Methods that a field or a collection of the same name may hide. Flax's
# examples have a field `metrics`.
_HIDEABLE = frozenset(("metrics", "variables"))

# Fields that only the update itself changes, and those without arrays.
_RESERVED = frozenset(
  ("step", "params", "opt_state", "wrapper_states", "wrappers")
)
_STATIC = frozenset(("apply_fn", "tx", "own_paths"))


class TrainState(flax_train_state.TrainState):
  """Flax's `TrainState` with wrappers around loss, gradients and update.

  Without wrappers it has the fields and the leaves of Flax's class. With
  wrappers it has one more field, `wrapper_states`. Other collections of a
  model, such as `batch_stats`, are fields of their own, as in Flax's ImageNet
  example.

  A train step calls `value_and_grad` and then `apply_gradients`, or `minimize`,
  which does both. The same step runs eagerly, under `jax.jit`, and inside
  `Strategy.run`.

  Attributes:
    step: int32 scalar, the number of applied updates. A skipped step does not
      count.
    apply_fn: Usually `model.apply`. Static.
    params: The parameters.
    tx: The optax optimizer. Static.
    opt_state: The optimizer's state, with the structure of `tx.init(params)`.
    wrappers: The wrappers, outermost first. Static.
    wrapper_states: The wrappers' states by name; `{}` without wrappers.
    own_paths: Set inside `Strategy.run`, else empty: the paths in the state of
      what is a `PerReplica` outside of `run`. Static.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1),
    ...     wrappers=[fs.LossScale(1024.0)])
    >>> loss, grads = state.value_and_grad(lambda p: p["w"].sum())
    >>> state = state.apply_gradients(grads=grads)
    >>> state.params["w"].round(4).tolist(), int(state.step)
    ([0.8999999761581421, 0.8999999761581421], 1)
  """

  wrappers: tuple[base.Base, ...] = struct.field(
    pytree_node=False, default=(), kw_only=True
  )
  # Inside Strategy.run a PerReplica is a plain value, so nothing else shows
  # that it must not be averaged, and must be a PerReplica again outside.
  own_paths: frozenset[tuple[str, ...]] = struct.field(
    pytree_node=False, default=frozenset(), kw_only=True, repr=False
  )
  # Not a field: a state without wrappers must have the leaves of Flax's class.
  wrapper_states: ClassVar[Mapping[str, PyTree]] = core.FrozenDict()
  # The declared class, if `create` added fields to it.
  _base_class: ClassVar[type | None] = None

  def __init_subclass__(cls, **kwargs: Any) -> None:
    # Flax's examples declare a field `metrics`. Without this, dataclasses would
    # take the inherited method `metrics` as the default of that field.
    declared = inspect.get_annotations(cls).keys() - vars(cls).keys()
    for name in declared & _HIDEABLE:
      setattr(cls, name, dataclasses.field())
    # Otherwise the dataclass of each subclass gets a repr with all values.
    super().__init_subclass__(**{"repr": False, **kwargs})

  if TYPE_CHECKING:
    # Collections are fields that only `create` knows.
    def __getattr__(self, name: str) -> Any: ...

  def __repr__(self) -> str:
    """Returns shapes, dtypes and bytes of all trees, about a page."""
    return describe.summarize(self)

  @classmethod
  def create(
    cls,
    *,
    apply_fn: Callable[..., Any] | None,
    params: PyTree,
    tx: optax.GradientTransformation,
    wrappers: Sequence[base.Base] = (),
    strategy: fields_lib.HasMesh | None = None,
    sparse: Sequence[str] = (),
    sparse_semantics: str = "lazy",
    **collections: PyTree,
  ) -> Self:
    """Creates a state at step 0.

    Args:
      apply_fn: Usually `model.apply`.
      params: A tree of arrays. With `jax.ShapeDtypeStruct`s nothing is
        allocated: the state has one for every array.
      tx: The optax optimizer.
      wrappers: Wrappers such as `LossScale("dynamic")`, outermost first.
      strategy: A `Strategy`, to put the state on its mesh. Parameters and
        collections that are sharded over that mesh keep their sharding; others
        are replicated. Optimizer slots are sharded like their parameters, and
        the wrappers' states as their `specs` say.
      sparse: Regular expressions, found in paths such as `embed/embedding`:
        gradients and updates of these tables have the rows that a step used;
        see `flaxshard.sparse_rows`.
      sparse_semantics: What happens to the other rows; see there.
      **collections: Further trees of arrays, each a field of its own, such as
        `batch_stats=variables["batch_stats"]`.

    Returns:
      A state in which every leaf is a strongly typed array, so that the second
      step does not recompile. Without a strategy it does, once, if the
      parameters are committed to a device, by `jax.device_put` or Orbax. No two
      leaves share a buffer. Parameters that are JAX arrays keep their buffers:
      donating the state deletes them.

    Raises:
      TypeError: `wrappers`, `strategy`, `tx` or a leaf of `params` has a wrong
        type.
      ValueError: A wrapper is given twice, a collection has the name of another
        attribute of the state, an array is sharded over another mesh, or a
        pattern of `sparse` matches no table.

    Example:
      >>> import flaxshard as fs, jax.numpy as jnp, optax
      >>> state = fs.TrainState.create(
      ...     apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1),
      ...     batch_stats={"mean": jnp.zeros(2)})
      >>> int(state.step), state.batch_stats["mean"].tolist()
      (0, [0.0, 0.0])
    """
    wrappers = stack.check(wrappers)
    mesh = fields_lib.mesh_of(strategy)
    static, given = _split_fields(cls, collections)
    given["params"] = params
    opt_state_lib.check_tx(tx)
    if sparse or sparse_semantics != "lazy":
      tx = sparse_optimizer.wrap(tx, sparse, sparse_semantics)
    if mesh is not None:
      stack.check_replicas(wrappers, fields_lib.num_replicas(mesh))
    arrays = fields_lib.complete(tx, wrappers, given, mesh)
    if mesh is not None:
      tx = sparse_optimizer.with_shardings(tx, arrays["params"])
    own = dict(apply_fn=apply_fn, tx=tx, wrappers=wrappers)
    return fields_lib.build(cls, own | static | arrays)

  # -- A train step.

  def value_and_grad(
    self,
    loss_fn: Callable[..., Any],
    *args: Any,
    has_aux: bool = False,
    var_list: Sequence[Any] | None = None,
    grad_loss: Any = None,
    gate_gradients: str = "none",
  ) -> tuple[Any, PyTree]:
    """Differentiates `loss_fn(params, *args)` through the wrappers.

    Use it in place of `jax.value_and_grad`, which knows nothing of loss scaling
    or of a replica's local parameters.

    Return what `loss_fn` computes as `aux`, rather than storing it: JAX raises
    an `UnexpectedTracerError` when a stored value is used later, if it depends
    on the parameters.

    Args:
      loss_fn: Returns a floating-point scalar, the loss, or a pair
        `(loss, aux)` if `has_aux`.
      *args: Further arguments of `loss_fn`.
      has_aux: Whether `loss_fn` returns auxiliary output.
      var_list: The parameters to differentiate: a sequence of paths such as
        `"Dense_0/kernel"` and of regular expressions that are searched in the
        paths. A string that is a path selects that parameter alone. None means
        all parameters.
      grad_loss: The cotangent of the loss, an array of its shape: the gradients
        are those of `(loss * grad_loss).sum()`. With it `loss_fn` may return an
        array of any shape.
      gate_gradients: When a gradient may be used, for example by the update of
        its parameter. "none": as soon as it is computed. "op" and "graph":
        after all gradients.
        See docs/guides/tensorflow.md for memory and reproducibility.

    Returns:
      `(loss, grads)` or `((loss, aux), grads)`, both unscaled. `grads` is a
      tree like `params`, with None for integer and boolean parameters, for
      those that `flaxshard.freeze` freezes, and for those not in `var_list`.
      With `LossScale` gradients are float32 or wider.

    Raises:
      TypeError: `loss_fn` is no function; it does not return a floating-point
        scalar, or no pair with `has_aux`; `grad_loss` is no array.
      ValueError: An element of `var_list` selects no parameter, all selected
        ones are frozen or integers, `grad_loss` has another shape than the
        loss, or `gate_gradients` is unknown.

    Example:
      >>> import flaxshard as fs, jax.numpy as jnp, optax
      >>> state = fs.TrainState.create(
      ...     apply_fn=None, params={"w": jnp.ones(())}, tx=optax.sgd(0.1))
      >>> loss, grads = state.value_and_grad(lambda p, x: p["w"] * x, 3.0)
      >>> float(loss), float(grads["w"])
      (3.0, 3.0)
    """
    selected = None
    if var_list is not None:
      selected = tf_surface.select(var_list, self.params)
    return step_lib.value_and_grad(
      self.tx,
      self.wrappers,
      self.wrapper_states,
      self.params,
      loss_fn,
      args,
      has_aux=has_aux,
      selected=selected,
      grad_loss=grad_loss,
      gate_gradients=gate_gradients,
    )

  def scale_loss(self, loss: jax.Array) -> jax.Array:
    """Scales a loss, for a step that does not use `value_and_grad`.

    Args:
      loss: A floating-point scalar.

    Returns:
      The loss to differentiate. Pass its gradients to `unscale_gradients`.

    Raises:
      ValueError: The call is in the loss of `value_and_grad`, which scales it.

    Example:
      >>> import flaxshard as fs, jax, jax.numpy as jnp, optax
      >>> state = fs.TrainState.create(
      ...     apply_fn=None, params={"w": jnp.ones(())}, tx=optax.sgd(0.1),
      ...     wrappers=[fs.LossScale(8.0)])
      >>> grads = jax.grad(lambda p: state.scale_loss(3 * p["w"]))(state.params)
      >>> float(grads["w"]), float(state.unscale_gradients(grads)["w"])
      (24.0, 3.0)
    """
    return step_lib.scale_loss(self.wrappers, self.wrapper_states, loss)

  def unscale_gradients(self, grads: PyTree) -> PyTree:
    """Undoes `scale_loss` on the gradients of a scaled loss.

    Args:
      grads: Gradients like `params`, of the result of `scale_loss`.

    Returns:
      The gradients of the loss itself, for `apply_gradients`.

    Raises:
      ValueError: `LossScale` has unscaled them, as those of `value_and_grad`.
    """
    return step_lib.unscale_gradients(
      self.tx,
      self.wrappers,
      stack.local_states(self.wrappers, self.wrapper_states),
      grads,
    )

  def compute_gradients(
    self,
    loss_fn: Callable[..., Any],
    *args: Any,
    has_aux: bool = False,
    var_list: Sequence[Any] | None = None,
    **options: Any,
  ) -> Any:
    """Returns the gradients as a list of (gradient, path) pairs.

    It is `value_and_grad`, with the same arguments and errors, in the form of
    TensorFlow's `compute_gradients`, whose pairs have a variable in place of
    its path. The loss is not returned.

    Returns:
      A pair for each parameter in `var_list`, in the order of `params`. The
      gradient is None for a parameter that has none, because it is frozen or an
      integer. With `has_aux`, `(pairs, aux)`.

    Example:
      >>> import flaxshard as fs, jax.numpy as jnp, optax
      >>> state = fs.TrainState.create(
      ...     apply_fn=None, params={"a": jnp.ones(()), "b": jnp.ones(())},
      ...     tx=optax.sgd(0.5))
      >>> pairs = state.compute_gradients(lambda p: 2 * p["a"] + 3 * p["b"])
      >>> [(float(g), path) for g, path in pairs]
      [(2.0, 'a'), (3.0, 'b')]
      >>> state = state.apply_gradients((-g, path) for g, path in pairs[:1])
      >>> {name: float(p) for name, p in state.params.items()}
      {'a': 2.0, 'b': 1.0}
    """
    value, grads = self.value_and_grad(
      loss_fn, *args, has_aux=has_aux, var_list=var_list, **options
    )
    selected = tf_surface.select(var_list, self.params)
    pairs = tf_surface.pairs_of(grads, selected)
    return (pairs, value[1]) if has_aux else pairs

  def apply_gradients(
    self,
    *positional: Any,
    grads: PyTree = tf_surface.MISSING,
    skip_gradients_aggregation: bool = False,
    aggregation: str | None = None,
    **replaced: PyTree,
  ) -> Self:
    """Applies unscaled gradients through the wrappers.

    Inside `Strategy.run` gradients are first averaged over the replicas, unless
    a wrapper reduces them itself. New values of collections are averaged too,
    except for leaves that are per replica. On TPU and GPU, float32 gradients
    that were converted from bfloat16, those of a model that computes in
    bfloat16, are summed in bfloat16, as XLA does for a global batch. To sum
    them in float32, give `jax.lax.optimization_barrier(grads)` as `grads`.

    Extra arguments of the optimizer's update, such as the `value` of
    `optax.contrib.reduce_on_plateau`, are given here too: loss and gradients as
    `value_and_grad` returns them. Inside `Strategy.run` `value` and `grad` are
    averaged over the replicas; the local steps of `AGN` take those of their
    replica. A line search, which uses `value_fn`, needs one replica. Other
    extra arguments must be the same on all replicas.

    Args:
      *positional: (gradient, path) pairs in place of `grads`, as TensorFlow
        takes them. A tree of gradients is given by name.
      grads: Gradients like `params`, such as `value_and_grad` returns. Where a
        leaf is no gradient (None, `float0`, an integer), the parameter and its
        optimizer slots stay as they are. Or (gradient, path) pairs, such as
        `compute_gradients` returns: parameters without a pair stay too.
      skip_gradients_aggregation: True if the gradients are the same on all
        replicas already. They are not reduced then, not even by `CrossShard`.
      aggregation: How gradients are reduced over the replicas inside
        `Strategy.run`: "mean" or "sum". None means the mean, unless a wrapper
        reduces them itself.
      **replaced: New values of other fields of the state, such as
        `batch_stats`. A wrapper that skips the step keeps the old values, so
        structure, shapes and dtypes must not change. Names that are no fields
        are extra arguments of the optimizer.

    Returns:
      The next state.

    Raises:
      ValueError: `grads` or a replaced field does not match the state; the
        message names the first path that differs. Or no parameter has a
        gradient, a path is unknown or given twice, or `aggregation` contradicts
        a wrapper or `skip_gradients_aggregation`.
      TypeError: A name is neither a field of the state nor an extra argument
        of the optimizer, or the optimizer needs another extra argument.

    Example:
      >>> import flaxshard as fs, jax.numpy as jnp, optax
      >>> state = fs.TrainState.create(
      ...     apply_fn=None, params={"w": jnp.ones(())}, tx=optax.sgd(0.25))
      >>> state = state.apply_gradients(grads={"w": jnp.float32(2)})
      >>> float(state.params["w"]), int(state.step)
      (0.5, 1)
    """
    if positional or not isinstance(grads, Mapping):
      grads = tf_surface.gradients_argument(positional, grads, self.params)
    collections: dict[str, PyTree] = {}
    static: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    if replaced:
      fields = fields_lib.fields_by_name(type(self))
      for name, value in replaced.items():
        if name in _RESERVED or name not in fields:
          extra[name] = value
        elif fields_lib.is_array_field(fields[name]):
          collections[name] = value
        else:
          static[name] = value
      extra_arguments.check(
        self.tx,
        extra,
        replaceable=fields.keys() - _RESERVED - _STATIC,
        reserved=_RESERVED,
      )
    reduction = None if skip_gradients_aggregation else "mean"
    if aggregation is not None:
      reduction = tf_surface.check_aggregation(
        aggregation, skip_gradients_aggregation, self.wrappers, extra
      )
    target = base.Target(
      step=self.step,  # type: ignore[arg-type]
      params=self.params,
      opt_state=self.opt_state,
      collections={name: getattr(self, name) for name in collections},
      wrapper_states=dict(self.wrapper_states),
      new_collections=collections,
    )
    new = step_lib.update(
      self.tx,
      self.wrappers,
      target,
      grads,
      extra,
      reduction=reduction,
      own_paths=self.own_paths,
    )
    if self.wrappers:
      static["wrapper_states"] = new.wrapper_states
    return self.replace(
      step=new.step,
      params=new.params,
      opt_state=new.opt_state,
      **new.collections,
      **static,
    )

  def minimize(
    self,
    loss_fn: Callable[..., Any],
    *args: Any,
    has_aux: bool = False,
    var_list: Sequence[Any] | None = None,
    grad_loss: Any = None,
    aggregation: str | None = None,
    gate_gradients: str = "none",
  ) -> tuple[Self, Any]:
    """Takes one step: `value_and_grad`, then `apply_gradients`.

    The arguments are those of `value_and_grad`, and the `aggregation` of
    `apply_gradients`. Parameters that are not in `var_list` keep their values
    and their optimizer slots. An optimizer that uses them gets `value`, `grad`
    and `value_fn`, as `optax.lbfgs` does.

    Returns:
      `(state, loss)` or `(state, (loss, aux))`; the loss before the update.

    Raises:
      TypeError, ValueError: As `value_and_grad` and `apply_gradients` do; or
        `var_list` is given, and the optimizer uses `value_fn`.

    Example:
      >>> import flaxshard as fs, jax.numpy as jnp, optax
      >>> state = fs.TrainState.create(
      ...     apply_fn=None, params={"w": jnp.ones(()), "b": jnp.ones(())},
      ...     tx=optax.sgd(0.25))
      >>> state, loss = state.minimize(
      ...     lambda p: p["w"] ** 2 + p["b"], var_list=["w"])
      >>> float(loss), {name: float(p) for name, p in state.params.items()}
      (2.0, {'b': 1.0, 'w': 0.5})
    """
    value, grads = self.value_and_grad(
      loss_fn,
      *args,
      has_aux=has_aux,
      var_list=var_list,
      grad_loss=grad_loss,
      gate_gradients=gate_gradients,
    )
    used = extra_arguments.objective_of(self.tx)
    used -= fields_lib.fields_by_name(type(self)).keys()
    if var_list is not None and "value_fn" in used:
      # Undoing its step for some parameters leaves a point it has not seen.
      raise ValueError(
        "minimize: var_list needs an optimizer that updates each parameter by "
        "itself; this one uses value_fn, as line searches do. Freeze the other "
        "parameters: flaxshard.freeze(tx, patterns)."
      )

    def objective(value: Any) -> Any:
      loss = value[0] if has_aux else value
      return step_lib.weigh_loss(loss, grad_loss)

    extra = dict(
      value=objective(value),
      grad=grads,
      value_fn=lambda params: objective(loss_fn(params, *args)),
    )
    new = self.apply_gradients(
      grads=grads,
      aggregation=aggregation,
      **{name: extra[name] for name in used},
    )
    return new, value

  # -- Slots.

  def get_slot_names(self) -> list[str]:
    """Returns the names of the arrays that exist for each parameter.

    A name is TensorFlow's where `tf.train` has the same slot: `m` and `v` of
    Adam, `momentum`, `rms` and `mg` of RMSProp, `accumulator` of Adagrad,
    `accum` and `accum_update` of Adadelta. Else it is the field of the
    optimizer's state, as `v_row` of Adafactor. If a parameter has two slots of
    one name, their paths in `opt_state` are the names: `0/momentum` and
    `1/momentum`. Slots of a wrapper begin with its name: `agn/grad_accum`.

    Returns:
      The names, sorted. Not every parameter has every slot.

    Example:
      >>> import flaxshard as fs, jax.numpy as jnp, optax
      >>> state = fs.TrainState.create(
      ...     apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.adam(0.1))
      >>> state.get_slot_names()
      ['m', 'v']
    """
    return tf_surface.get_slot_names(self)

  def get_slot(self, parameter: str, name: str) -> jax.Array | None:
    """Returns the array that the optimizer or a wrapper keeps for a parameter.

    Args:
      parameter: The path of the parameter, such as `"Dense_0/kernel"`.
      name: One of `get_slot_names()`, or optax's name of the field, or its path
        in `opt_state`: `"m"`, `"mu"` or `"0/mu"`.

    Returns:
      The array, with the shape of the parameter in most optimizers. Slots that
      a wrapper keeps per replica have the replica axis in front, as in
      `wrapper_states`. None if this parameter has no such slot and another one
      has, as with `freeze` and `optax.partition`.

    Raises:
      ValueError: No parameter has a slot of this name, where TensorFlow returns
        None; the parameter does not exist; or several slots have the name.

    Example:
      >>> import flaxshard as fs, jax.numpy as jnp, optax
      >>> state = fs.TrainState.create(
      ...     apply_fn=None, params={"w": jnp.ones(2)},
      ...     tx=optax.sgd(0.1, momentum=0.9))
      >>> state, _ = state.minimize(lambda p: 3 * p["w"].sum())
      >>> state.get_slot("w", "momentum").tolist()
      [3.0, 3.0]
    """
    return tf_surface.get_slot(self, parameter, name)

  def variables(self) -> dict[str, jax.Array]:
    """Returns all arrays of the optimizer and the wrappers, by path.

    A field or a collection named `variables` hides this method.

    Returns:
      Slots, step counts and other state, without `step` and `params`. A path is
      that in the state.

    Example:
      >>> import flaxshard as fs, jax.numpy as jnp, optax
      >>> state = fs.TrainState.create(
      ...     apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.adam(0.1))
      >>> list(state.variables())
      ['opt_state/0/count', 'opt_state/0/mu/w', 'opt_state/0/nu/w']
    """
    tree = {
      "opt_state": self.opt_state,
      "wrapper_states": dict(self.wrapper_states),
    }
    return dict(zip(trees.names(tree), jax.tree.leaves(tree), strict=True))

  # -- The wrappers' parameters and metrics, and the state without wrappers.

  @property
  def eval_params(self) -> PyTree:
    """The parameters to evaluate and to export.

    They are the average of `EMA` if the state has that wrapper, else `params`.

    Example:
      >>> import flaxshard as fs, jax.numpy as jnp, optax
      >>> state = fs.TrainState.create(
      ...     apply_fn=None, params={"w": jnp.ones(())}, tx=optax.sgd(1.0),
      ...     wrappers=[fs.EMA(0.5, debias=False)])
      >>> state, _ = state.minimize(lambda p: p["w"])
      >>> float(state.params["w"]), float(state.eval_params["w"])
      (0.0, 0.5)
    """
    return stack.params(self.wrappers, self.wrapper_states, self.params, "eval")

  def metrics(self) -> dict[str, jax.Array]:
    """Returns the wrappers' metrics, for a training loop to log.

    A field or a collection named `metrics` hides this method.

    Returns:
      Scalar arrays by name: `loss_scale` (float32) and `skipped_steps` (int32)
      with `LossScale`, `commits` (int32) with `AGN`; `{}` without wrappers.

    Example:
      >>> import flaxshard as fs, jax.numpy as jnp, optax
      >>> state = fs.TrainState.create(
      ...     apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1),
      ...     wrappers=[fs.LossScale("dynamic")])
      >>> {name: float(x) for name, x in state.metrics().items()}
      {'loss_scale': 32768.0, 'skipped_steps': 0.0}
    """
    return stack.metrics(self.wrappers, self.wrapper_states)

  def without_wrappers(self) -> TrainState:
    """Returns the state of a plain Flax program at this point.

    Returns:
      A state with the same step, parameters, optimizer state and collections,
      without wrappers and their states. A `PerReplica` in them is averaged;
      one of integers, booleans or PRNG keys is that of replica 0.
      What a wrapper has not committed, as the local steps of `AGN` since the
      last commit, is not part of it: a UserWarning says so.

    Example:
      >>> import flaxshard as fs, jax.numpy as jnp, optax
      >>> state = fs.TrainState.create(
      ...     apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1),
      ...     wrappers=[fs.LossScale("dynamic")])
      >>> state.without_wrappers().wrappers
      ()
    """
    for note in stack.pending(self.wrappers, self.wrapper_states):
      checks.warn(note)
    return fields_lib.plain_state(self)

  def __reduce__(self) -> Any:
    """Pickles the declared class and the values of the fields."""
    # pickle finds a class by its name, and an extended class has none.
    fields = {
      name: getattr(self, name)
      for name in fields_lib.fields_by_name(type(self))
    }
    return fields_lib.build, (self._base_class or type(self), fields)


def _split_fields(
  cls: type, values: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, PyTree]]:
  """Divides further fields of a new state into static ones and collections.

  Raises:
    ValueError: One has the name of another attribute of the state.
    TypeError: One that `cls` does not declare is no tree of arrays.
  """
  fields = fields_lib.fields_by_name(cls)
  taken = (fields.keys() & fields_lib.fields_by_name(TrainState)) | (
    set(dir(cls)) - fields.keys() - _HIDEABLE
  )
  static: dict[str, Any] = {}
  collections: dict[str, PyTree] = {}
  for name, value in values.items():
    if name in taken:
      raise ValueError(
        f"a collection cannot be named {name!r}: a TrainState has an attribute "
        "of that name."
      )
    if name not in fields:
      # A misspelt argument, such as `wrapers`, would be a collection.
      trees.check_arrays(name, value)
    is_static = name in fields and not fields_lib.is_array_field(fields[name])
    (static if is_static else collections)[name] = value
  return static, collections
