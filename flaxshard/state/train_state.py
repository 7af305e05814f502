"""TrainState: Flax's train state with a stack of wrappers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any, ClassVar

from flax import core
from flax import struct
from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
import optax

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import optimizer_update
from flaxshard.core import trees
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import values
from flaxshard.state import fields as fields_lib
from flaxshard.state import sharding as sharding_lib
from flaxshard.wrappers import base
from flaxshard.wrappers import stack

PyTree = Any


class TrainState(flax_train_state.TrainState):
  """Flax's `TrainState` with wrappers around loss, gradients and update.

  With no wrappers it is Flax's class, to the leaf. With some, it has one more
  field, `wrapper_states`: a dict of their states by name. Other collections
  (`batch_stats`) are fields of their own, as in Flax's ImageNet example.

  Attributes:
    step: int32 scalar, the number of applied updates; a skipped step does not
      count.
    apply_fn: Usually `model.apply`. Static.
    params: The parameters.
    tx: The optax optimizer. Static.
    opt_state: Exactly what `tx.init(params)` makes.
    wrappers: The wrappers, outermost first. Static.
    wrapper_states: Their states by name; `{}` without wrappers.
    per_replica: The collections that a replica has its own of, inside
      `Strategy.run`; outside they are `PerReplica`. Static.

  Example:
    >>> import flaxshard as fs
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1),
    ...     wrappers=[fs.LossScale(1024.0)])
    >>> loss, grads = state.value_and_grad(lambda p: p["w"].sum())
    >>> state = state.apply_gradients(grads=grads)
    >>> state.params["w"].round(4).tolist(), int(state.step)
    ([0.8999999761581421, 0.8999999761581421], 1)
  """

  wrappers: tuple[base.Wrapper, ...] = struct.field(
    pytree_node=False, default=(), kw_only=True
  )
  per_replica: tuple[tuple[str, Any], ...] = struct.field(
    pytree_node=False, default=(), kw_only=True
  )
  wrapper_states: ClassVar[Mapping[str, PyTree]] = core.FrozenDict()
  # The class as it was declared, where `create` added fields to it.
  _base_class: ClassVar[type | None] = None

  @classmethod
  def create(
    cls,
    *,
    apply_fn: Callable[..., Any] | None,
    params: PyTree,
    tx: optax.GradientTransformation,
    wrappers: Sequence[base.Wrapper] = (),
    strategy: sharding_lib.HasMesh | None = None,
    **collections: PyTree,
  ) -> TrainState:
    """Creates a state at step 0.

    Args:
      apply_fn: Usually `model.apply`.
      params: A tree of arrays.
      tx: The optax optimizer.
      wrappers: Wrappers such as `LossScale("dynamic")`, outermost first.
      strategy: A `Strategy`, to put the state on its mesh. Parameters and
        collections that are split over that mesh stay so, the others go to
        every device; the optimizer's slots lie as their parameters do, and the
        states of wrappers as `partition_specs` says.
      **collections: Further trees of arrays, each a field of its own, such as
        `batch_stats=variables["batch_stats"]`.

    Returns:
      A state whose every leaf is a strongly typed array; no two share a buffer.
      Parameters that are JAX arrays keep theirs: donating the state takes them.

    Raises:
      TypeError: `wrappers`, `strategy` or a leaf of `params` is of a wrong
        type.
      ValueError: The same wrapper twice, a collection with a name that the
        state has already, or an array that is split over another mesh.
    """
    wrappers = base.check(wrappers)
    mesh = None if strategy is None else sharding_lib.mesh_of(strategy)
    num_replicas = sharding_lib.check_replicas(mesh, wrappers)
    _check_collections(cls, collections)
    if not jax.tree.leaves(params) or jax.tree_util.all_leaves([params]):
      raise TypeError(
        f"params must be a tree of arrays, such as a dict, got {params!r}."
      )
    trees.check_arrays("params", params)
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
      raise TypeError(f"tx must be an optax GradientTransformation, got {tx!r}")
    own = fields_lib.of_class(cls)
    static = {
      k: v
      for k, v in collections.items()
      if k in own and not fields_lib.is_data(own[k])
    }
    given = {k: v for k, v in collections.items() if k not in static}
    given["params"] = params
    init = functools.partial(_init, tx, wrappers, num_replicas)
    if mesh is None:
      arrays = trees.own_buffers({**given, **init(given)})
    else:
      given = trees.own_buffers(given)
      arrays = sharding_lib.complete_fields(init, given, mesh, wrappers)
    return fields_lib.extend(cls, arrays)(
      apply_fn=apply_fn, tx=tx, wrappers=wrappers, **static, **arrays
    )

  def value_and_grad(
    self,
    loss_fn: Callable[..., Any],
    *args: Any,
    has_aux: bool = False,
  ) -> tuple[Any, PyTree]:
    """Differentiates `loss_fn(params, *args)` through the wrappers.

    Args:
      loss_fn: Returns a scalar loss, or `(loss, aux)` with `has_aux`.
      *args: Further arguments of `loss_fn`.
      has_aux: Whether `loss_fn` returns auxiliary output.

    Returns:
      `(loss, grads)` or `((loss, aux), grads)`; loss and gradients are
      unscaled. Leaves of `params` that are not floating-point have the gradient
      None.
    """
    params = stack.working_params(
      self.wrappers, self._own_states(), self.params
    )
    # Integer leaves would be refused; asking for it changes nothing else.
    allow_int = any(
      not jnp.issubdtype(jnp.result_type(p), jnp.inexact)
      for p in jax.tree.leaves(params)
    )
    if not self.wrappers:
      grad_fn = jax.value_and_grad(
        loss_fn, has_aux=has_aux, allow_int=allow_int
      )
      value, grads = grad_fn(params, *args)
    else:

      def scaled(params: PyTree, *args: Any) -> tuple[jax.Array, Any]:
        value = loss_fn(params, *args)
        if has_aux and not (isinstance(value, tuple) and len(value) == 2):
          raise TypeError(
            "loss_fn must return (loss, aux) with has_aux=True, "
            f"got {type(value).__name__}."
          )
        loss = value[0] if has_aux else value
        _check_loss(loss)
        # The loss goes out by the side: unscaling it could overflow.
        return self.scale_loss(loss), value

      grad_fn = jax.value_and_grad(scaled, has_aux=True, allow_int=allow_int)
      (_, value), grads = grad_fn(params, *args)
      grads = self.unscale_gradients(grads)
    return value, gradients.none_without_gradient(grads) if allow_int else grads

  def scale_loss(self, loss: jax.Array) -> jax.Array:
    """Returns the loss to differentiate, for a gradient taken by hand."""
    return stack.scale_loss(self.wrappers, self._own_states(), loss)

  def unscale_gradients(self, grads: PyTree) -> PyTree:
    """Undoes `scale_loss` on the gradients of a scaled loss."""
    return stack.unscale_gradients(self.wrappers, self._own_states(), grads)

  def _own_states(self) -> dict[str, PyTree]:
    """Returns the states of the wrappers as one replica has them."""
    if not self.wrappers or replica_context.get_replica_context() is not None:
      return dict(self.wrapper_states)
    return stack.drop_replica_axis(self.wrappers, self.wrapper_states)

  def apply_gradients(
    self,
    *,
    grads: PyTree,
    skip_gradients_aggregation: bool = False,
    **replaced: PyTree,
  ) -> TrainState:
    """Applies unscaled gradients through the wrappers.

    In a replica context gradients are averaged over the replicas first, unless
    a wrapper reduces them itself. So are replaced collections, but for those
    that each replica keeps for itself.

    Args:
      grads: Gradients like `params`. Where a leaf has none (None, `float0`, an
        integer), parameter and slots stay as they are.
      skip_gradients_aggregation: The gradients are the same on all replicas
        already: they are not reduced, by `CrossShard` neither.
      **replaced: New values of other fields of the state, such as
        `batch_stats`. They are held back with everything else when a wrapper
        skips the step, so they must keep structure, shapes and dtypes.

    Returns:
      The next state.

    Raises:
      ValueError: `grads` or a replaced field does not match the state; the
        message names the first path that differs.
      TypeError: A replaced name is not a field of the state.
    """
    grads = trees.like(
      "grads", grads, self.params, dtypes=False, none_is_leaf=True
    )
    grads = gradients.map_gradients(lambda g: g, grads)  # NumPy's into JAX's
    if replica_context.get_replica_context() is None:
      return self._apply(grads, replaced)
    replaced = {
      name: self._agreed(name, tree) if self._has_collection(name) else tree
      for name, tree in replaced.items()
    }
    if skip_gradients_aggregation:
      with replica_context.gradients_already_reduced(by_user=True):
        return self._apply(grads, replaced)
    if stack.reduces_gradients(self.wrappers):
      return self._apply(grads, replaced)
    # Before the wrappers: reduced gradients carry one replica's NaN to all.
    grads = replica_context.reduce_gradients("mean", grads)
    with replica_context.gradients_already_reduced():
      return self._apply(grads, replaced)

  def _has_collection(self, name: str) -> bool:
    return name in fields_lib.data_names(self)

  def _agreed(self, name: str, new: PyTree) -> PyTree:
    """Averages a collection, but for what each replica has its own of."""
    leaves, treedef = jax.tree.flatten(
      trees.like(name, new, getattr(self, name))
    )
    outside = dict(self.per_replica).get(name, treedef)
    agreed = jax.tree.map(
      lambda x: (
        x
        if values.is_per_replica(x)
        else stack.reduce_collection(self.wrappers, x)
      ),
      jax.tree.unflatten(outside, leaves),
      is_leaf=values.is_per_replica,
    )
    return jax.tree.unflatten(treedef, jax.tree.leaves(agreed))

  def _apply(self, grads: PyTree, replaced: dict[str, PyTree]) -> TrainState:
    """Applies gradients as they are."""
    if not self.wrappers:
      return optimizer_update.flax_update(self, grads, replaced)
    reserved = {"step", "params", "opt_state", "wrapper_states", "wrappers"}
    fields = fields_lib.of_class(type(self))
    for name in replaced:
      if name in reserved or name not in fields:
        allowed = sorted(set(fields_lib.data_names(self)) - reserved)
        raise TypeError(
          f"apply_gradients: {name!r} cannot be replaced; allowed: grads, "
          f"{', '.join(allowed)}.{checks.did_you_mean(name, allowed)}"
        )
    static = {
      k: v for k, v in replaced.items() if not fields_lib.is_data(fields[k])
    }
    collections = {k: v for k, v in replaced.items() if k not in static}
    for name, new in collections.items():
      new = trees.like(name, new, getattr(self, name))
      collections[name] = jax.tree.map(trees.strong, new)

    def innermost(target: base.Target, grads: PyTree) -> base.Target:
      state = self.replace(
        step=target.step, params=target.params, opt_state=target.opt_state
      )
      state = optimizer_update.flax_update(state, grads, {})
      return target._replace(
        step=state.step,
        params=state.params,
        opt_state=optimizer_update.keep_dtypes(
          state.opt_state, target.opt_state
        ),
        collections=collections,
      )

    target = stack.apply(
      self.wrappers,
      base.Target(
        jnp.asarray(self.step, jnp.int32),
        self.params,
        self.opt_state,
        {name: getattr(self, name) for name in collections},
        self._own_states(),
      ),
      gradients.none_without_gradient(grads),
      innermost,
    )
    states = target.wrapper_states
    if replica_context.get_replica_context() is None:
      states = stack.add_replica_axis(self.wrappers, states)
    return self.replace(
      step=target.step,
      params=target.params,
      opt_state=target.opt_state,
      wrapper_states=states,
      **target.collections,
      **static,
    )

  def metrics(self) -> dict[str, jax.Array]:
    """Returns the wrappers' metrics, for a training loop to log.

    A subclass or a model may have a field or collection of the name `metrics`;
    it hides this method.

    Returns:
      Scalar arrays by name: `loss_scale` (float32) and `skipped_steps` (int32)
      of `LossScale`, `commits` (int32) of `AGN`. Empty without wrappers.

    Example:
      >>> import flaxshard as fs
      >>> state = fs.TrainState.create(
      ...     apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1),
      ...     wrappers=[fs.LossScale("dynamic")])
      >>> {name: float(x) for name, x in state.metrics().items()}
      {'loss_scale': 32768.0, 'skipped_steps': 0.0}
    """
    return stack.metrics(self.wrappers, self.wrapper_states)

  def without_wrappers(self) -> TrainState:
    """Returns the state that a plain Flax program would have here.

    The same step, parameters, optimizer state and collections; no wrappers and
    no field for their states. Collections that each replica has its own of
    are averaged.
    """
    fields = fields_lib.of_class(type(self))
    dropped = ("wrappers", "wrapper_states", "per_replica")
    names = tuple(n for n in fields if n not in dropped)
    plain_class: Any = fields_lib.extend(self._base_class or type(self), names)
    return plain_class(
      **{
        name: values.mean_over_replicas(getattr(self, name))
        if fields_lib.is_data(fields[name])
        else getattr(self, name)
        for name in names
      }
    )

  def __reduce__(self) -> Any:
    """Pickles by the class as declared and the values of the fields."""
    values = {
      name: getattr(self, name) for name in fields_lib.of_class(type(self))
    }
    return fields_lib.rebuild, (self._base_class or type(self), values)

  def minimize(
    self, loss_fn: Callable[..., Any], *args: Any, has_aux: bool = False
  ) -> tuple[TrainState, Any]:
    """Takes the gradient of `loss_fn(params, *args)` and applies it.

    Args:
      loss_fn: As in `value_and_grad`.
      *args: Further arguments of `loss_fn`.
      has_aux: Whether `loss_fn` returns auxiliary output.

    Returns:
      `(state, loss)` or `(state, (loss, aux))`; the loss before the update.
    """
    value, grads = self.value_and_grad(loss_fn, *args, has_aux=has_aux)
    return self.apply_gradients(grads=grads), value


def _init(
  tx: optax.GradientTransformation,
  wrappers: tuple[base.Wrapper, ...],
  num_replicas: int,
  given: Mapping[str, PyTree],
) -> dict[str, PyTree]:
  """Returns the fields of a state that follow from those given."""
  params = given["params"]
  made: dict[str, PyTree] = dict(
    step=jnp.zeros((), jnp.int32),
    opt_state=tx.init(opt_state_lib.optimized_params(params)),
  )
  if wrappers:
    collections = {k: v for k, v in given.items() if k != "params"}
    made["wrapper_states"] = stack.init(
      wrappers, params, tx, collections, num_replicas
    )
  return made


def _check_loss(loss: Any) -> None:
  got = repr(loss)
  if hasattr(loss, "dtype") or isinstance(loss, (bool, int, float, complex)):
    shape, dtype = jnp.shape(loss), trees.dtype_of(loss)
    if not shape and jnp.issubdtype(dtype, jnp.inexact):
      return
    got = f"{dtype} of shape {shape}"
  raise TypeError(f"loss_fn must return a floating-point scalar, got {got}.")


def _check_collections(cls: type, collections: Mapping[str, PyTree]) -> None:
  arguments = ["apply_fn", "params", "tx", "wrappers", "strategy"]
  own = set(fields_lib.of_class(cls))
  for name, tree in collections.items():
    inherited = own & set(fields_lib.of_class(TrainState))
    if name in inherited or (name not in own and hasattr(cls, name)):
      raise ValueError(
        f"a collection cannot be named {name!r}: a TrainState has that already."
      )
    if name not in own:
      try:
        trees.check_arrays(name, tree)
      except TypeError as e:
        raise TypeError(
          f"create: {name!r} is no argument, and no tree of arrays: {e}"
          f"{checks.did_you_mean(name, arguments)}"
        ) from e
      if tree is None or name == "rules":
        raise TypeError(
          f"create: {name}={tree!r} is no argument; allowed: "
          f"{', '.join(arguments)}, and trees of arrays."
        )
