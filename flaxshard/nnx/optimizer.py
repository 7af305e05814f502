"""`Optimizer`: NNX's optimizer with wrappers around loss and update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any, TypeVar

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from flaxshard.core import checks
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.nnx import calls
from flaxshard.nnx import placement
from flaxshard.nnx import variables as variables_lib
from flaxshard.nnx.pure_loss import PureLoss
from flaxshard.partitioning import rules as rules_lib
from flaxshard.replicas import context as replica_context
from flaxshard.sparse import optimizer as sparse_optimizer
from flaxshard.state import fields as fields_lib
from flaxshard.state import model_facts
from flaxshard.state import sharding as sharding_lib
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import base
from flaxshard.wrappers import stack
from flaxshard.wrappers.loss_scale import LossScale

PyTree = Any
M = TypeVar("M", bound=nnx.Module)

_MISSING: Any = object()


class WrapperState(nnx.Variable):
  """An array of a wrapper's state, such as the scale of `LossScale`.

  `nnx.state(optimizer, nnx.Not(WrapperState))` is what NNX's own optimizer
  saves.
  """


class Optimizer(nnx.Optimizer[M]):
  """NNX's `Optimizer` with wrappers around loss, gradients and update.

  Without wrappers it has the state of `nnx.Optimizer`. With wrappers it has one
  more attribute with variables, `wrapper_states`. A train step calls
  `value_and_grad` in place of `nnx.value_and_grad`, and then `update`. The same
  step runs eagerly and inside `nnx.jit`, `nnx.scan` and `nnx.fori_loop`. With
  a strategy, one program of `nnx.jit` computes on the whole batch.

  If a wrapper skips a step, as `LossScale` does after an overflow, the
  optimizer and the whole module stay as they were before `value_and_grad`:
  parameters, batch statistics, counts of random streams.

  Attributes:
    step: `nnx.OptState`, uint32, the number of applied updates. A skipped step
      does not count.
    tx: The optax optimizer.
    opt_state: The optimizer's state.
    wrt: The filter that selects the parameters.
    wrappers: The wrappers, outermost first.
    wrapper_states: The wrappers' states by name, of `WrapperState` variables;
      `{}` without wrappers.

  Example:
    >>> import flaxshard as fs
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> optimizer = fs.nnx.Optimizer(
    ...     model, optax.sgd(0.1), wrt=nnx.Param,
    ...     wrappers=[fs.LossScale("dynamic")])
    >>> @nnx.jit
    ... def train_step(model, optimizer, x):
    ...   loss_fn = lambda model, x: (model(x) ** 2).mean()
    ...   loss, grads = optimizer.value_and_grad(loss_fn)(model, x)
    ...   optimizer.update(model, grads)
    ...   return loss
    >>> float(train_step(model, optimizer, jnp.zeros((4, 2))))
    0.0
    >>> int(optimizer.step[...]), isinstance(optimizer, nnx.Optimizer)
    (1, True)
  """

  def __init__(
    self,
    model: M,
    tx: optax.GradientTransformation,
    *,
    wrt: Any = _MISSING,
    wrappers: Sequence[base.Wrapper] = (),
    strategy: sharding_lib.HasMesh | None = None,
    rules: rules_lib.Rules = None,
    graph: bool | None = None,
  ):
    """Creates the optimizer's state and that of the wrappers.

    Args:
      model: An NNX module. With a strategy its arrays are put on the mesh.
      tx: The optax optimizer.
      wrt: The filter that selects the parameters, such as `nnx.Param` or
        `nnx.LoRAParam`. Other parameters are not trained.
      wrappers: Wrappers such as `LossScale("dynamic")`, outermost first.
        Wrappers with a precision policy take it from `model.policy`, or from
        the `dtype` of the module and of the modules in it.
      strategy: The `Strategy` whose mesh holds the module and the optimizer.
        Optimizer slots are sharded like their parameters. Inside `nnx.jit` the
        arrays get their shardings without a copy on one device.
      rules: How the parameters are split over the mesh: None (by their
        metadata, else as they are), `"fsdp"`, or a sequence of rules; see
        `flaxshard.partitioning.rules`. Needs a strategy.
      graph: As in `nnx.Optimizer`.

    Raises:
      TypeError: `wrt` is missing, or an argument has a wrong type.
      ValueError: `wrt` selects no variable, a wrapper is given twice, a rule
        cannot be applied, `rules` are given without a strategy, or a wrapper
        needs `Strategy.run` because the strategy has several replicas.
    """
    _check_module(model)
    if wrt is _MISSING:
      raise TypeError(
        "Optimizer: wrt is missing. Write wrt=nnx.Param to train all "
        "parameters; before Flax 0.11 this was the default."
      )
    if not callable(getattr(tx, "update", None)):
      raise TypeError(
        f"tx must be an optax optimizer, got {checks.describe(tx)}."
      )
    wrappers = base.check(wrappers)
    _check_no_host_commits(wrappers)
    selected, others = nnx.state(model, wrt, ..., graph=graph)
    if not jax.tree.leaves(selected):
      kinds = sorted(variables_lib.kinds(others))
      raise ValueError(
        f"wrt={variables_lib.describe(wrt)} selects no variable of "
        f"{type(model).__name__}, which has {', '.join(kinds) or 'none'}."
      )
    if strategy is None and rules is not None:
      raise ValueError(
        f"rules={rules!r} need a strategy, whose mesh they split parameters "
        "over; got strategy=None."
      )
    mesh = None if strategy is None else sharding_lib.mesh_of(strategy)
    num_replicas = sharding_lib.count_replicas(mesh, wrappers)
    if num_replicas > 1:
      _check_no_replicas(wrappers, num_replicas)
    param_specs = None
    if mesh is not None:
      param_specs = placement.place_module(model, mesh, wrt, rules)
    wrappers = stack.with_policy(wrappers, model_facts.policy_of_nnx(model))

    init = functools.partial(opt_state_lib.init, tx) if wrappers else tx.init
    # Only for its `init`: a skipped step needs the structure of later states.
    completed = optax.GradientTransformation(init, tx.update)
    super().__init__(model, completed, wrt=wrt, graph=graph)
    self.tx = tx
    self.wrappers = nnx.static(wrappers)
    params, others = self._split(model)
    self._calls = nnx.static(calls.Calls(calls.shapes_of(params)))
    states = stack.init(
      wrappers, params, tx, {"variables": others}, num_replicas
    )
    # Only arrays of their own: they would be donated twice.
    self.wrapper_states = nnx.data(
      jax.tree.map(lambda x: WrapperState(jnp.copy(x)), states)
    )
    if mesh is not None:
      placement.place_optimizer(self, params, param_specs, mesh)

  # -- A train step.

  def value_and_grad(
    self,
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    gate_gradients: str = "none",
  ) -> Callable[..., tuple[Any, Any]]:
    """Differentiates a loss through the wrappers.

    Use it in place of `nnx.value_and_grad`, which knows nothing of loss
    scaling. What the loss changes in the module, and in other NNX objects among
    its arguments, is changed there too.

    Args:
      loss_fn: `loss_fn(model, *args, **kwargs)` returns a floating-point
        scalar, the loss, or `(loss, aux)` if `has_aux`.
      has_aux: Whether `loss_fn` returns auxiliary output.
      gate_gradients: "none", "op" or "graph": which gradients must be there
        before one of them is used; see `TrainState.value_and_grad`.

    Returns:
      A function of the arguments of `loss_fn` that returns `(loss, grads)`, or
      `((loss, aux), grads)`, both unscaled. `grads` is a state of the variables
      that `wrt` selects. With `LossScale` they are float32 or wider.

    Raises:
      TypeError: `loss_fn` is no function; or, in a call, it does not return a
        floating-point scalar, or no pair with `has_aux`.
    """
    if not callable(loss_fn):
      raise TypeError(
        "value_and_grad: loss_fn must be a function, got "
        f"{checks.describe(loss_fn)}. Write optimizer.value_and_grad(loss_fn)"
        "(model, batch)."
      )

    @functools.wraps(loss_fn)
    def value_and_grad(
      model: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
      if not isinstance(model, nnx.Pytree):
        raise TypeError(
          "value_and_grad: the first argument of loss_fn must be the module, "
          f"got {checks.describe(model)}."
        )
      before = variables_lib.leaves(model, self.wrt)
      pure = PureLoss(loss_fn, model, self.wrt, args, kwargs, has_aux)
      self._check_params(pure.params)
      with pure:
        state = self._train_state(pure.params)
        (loss, (arrays, changed)), grads = state.value_and_grad(
          pure, has_aux=True, gate_gradients=gate_gradients
        )
        aux = pure.update_objects(arrays, changed)
      self._calls.note_gradients(
        self, model, before, variables_lib.leaves(model, self.wrt)
      )
      return (loss, aux) if has_aux else loss, pure.gradients(grads)

    return value_and_grad

  def scale_loss(self, loss: jax.Array) -> jax.Array:
    """Scales a loss, for a step that does not use `value_and_grad`.

    Args:
      loss: A floating-point scalar.

    Returns:
      The loss to differentiate. Pass its gradients to `unscale_gradients`.
    """
    return stack.scale_loss(self.wrappers, self._local_states(), loss)

  def unscale_gradients(self, grads: PyTree) -> PyTree:
    """Undoes `scale_loss` on the gradients of a scaled loss.

    Args:
      grads: Gradients as `nnx.grad` returns them.

    Returns:
      The gradients of the loss itself, for `update`.
    """
    leaves, treedef = jax.tree.flatten(grads)
    unscaled = stack.unscale_gradients(
      self.wrappers, self._local_states(), leaves
    )
    self._calls.note_unscaled()
    return jax.tree.unflatten(treedef, unscaled)

  # NNX too takes `grads` by name, though its type does not say so.
  def update(  # type: ignore[override]
    self, model: M, grads: Any = _MISSING, **kwargs: Any
  ) -> Any:
    """Applies unscaled gradients through the wrappers.

    Args:
      model: The module.
      grads: The gradients that `value_and_grad` returns.
      **kwargs: Extra arguments of the optimizer's update, such as the `value`
        of `optax.contrib.reduce_on_plateau`.

    Returns:
      Without wrappers the updates of the optimizer, as `nnx.Optimizer` does.
      With wrappers the changes of the parameters; zeros in a skipped step.

    Raises:
      TypeError: `grads` is missing, or `model` is not a module.
      ValueError: The gradients or the parameters of the module have another
        structure than those of the optimizer, or nothing has scaled the loss.
    """
    if grads is _MISSING or not isinstance(model, nnx.Pytree):
      raise TypeError(
        "update takes the module and the gradients: optimizer.update(model, "
        f"grads); got {checks.describe(model)}"
        + (" alone." if grads is _MISSING else " as the module.")
      )
    if type(grads) is tuple:
      raise ValueError(
        f"grads must be a state of gradients, got a tuple of {len(grads)}; "
        "value_and_grad returns (loss, grads): pass its second element."
      )
    params, _ = self._split(model)
    self._check_params(params)
    selected = nnx.as_pure(nnx.state(grads, self.wrt, graph=self.graph))
    variables_lib.check_gradients(selected, params, self.wrt)
    in_replica = replica_context.get_replica_context() is not None
    if not self.wrappers and not in_replica:
      return super().update(model, grads, **kwargs)

    current = variables_lib.leaves(model, self.wrt)
    changes = self._calls.take_changes(self, model, current)
    if changes is None and self._goes_around_loss():
      self._calls.check_differentiated()
      if current:
        self._calls.warn_of_changes()
    old, new = changes or ({}, {})
    state = self._train_state(params, changed=old)
    result = state.apply_gradients(
      grads=selected, changed=new, **nnx.as_pure(kwargs)
    )
    nnx.update(model, result.params)
    variables_lib.set_leaves(model, self.wrt, result.changed)
    self.step[...] = jnp.asarray(result.step, self.step[...].dtype)
    variables_lib.assign(self.opt_state, result.opt_state)
    variables_lib.assign(self.wrapper_states, result.wrapper_states)
    return jax.tree.map(lambda n, o: n - o, result.params, params)

  def get_slot_names(self, model: Any) -> list[str]:
    """Returns the names of the arrays that exist for each parameter.

    Args:
      model: The module.

    Returns:
      The names, sorted; see `TrainState.get_slot_names`.
    """
    params, _ = self._split(model)
    return self._train_state(params).get_slot_names()

  def get_slot(self, model: Any, path: str, name: str) -> jax.Array | None:
    """Returns the array that the optimizer or a wrapper keeps for a parameter.

    Args:
      model: The module.
      path: The path of the parameter, such as `"linear/kernel"`.
      name: One of `get_slot_names(model)`; see `TrainState.get_slot`.

    Returns:
      The array; None if this parameter has no such slot and another one has.

    Raises:
      ValueError: No parameter has this path, or none has a slot of this name.

    Example:
      >>> import flaxshard as fs, optax
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = fs.nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
      >>> optimizer.get_slot_names(model)
      ['m', 'v']
      >>> optimizer.get_slot(model, "bias", "m").tolist()
      [0.0]
    """
    params, _ = self._split(model)
    return self._train_state(params).get_slot(path, name)

  def eval_params(self, model: Any) -> PyTree:
    """Returns the parameters to evaluate and to export.

    They are the average of `EMA` if the optimizer has that wrapper, else those
    of the module. With the `"catch_up"` semantics of `flaxshard.sparse_rows`
    these have the weight decay of all steps.

    Args:
      model: The module.

    Returns:
      A tree for `nnx.update`.

    Example:
      >>> import flaxshard as fs, optax
      >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
      >>> optimizer = fs.nnx.Optimizer(
      ...     model, optax.sgd(0.1), wrt=nnx.Param, wrappers=[fs.EMA(0.9)])
      >>> average = nnx.clone(model)
      >>> nnx.update(average, optimizer.eval_params(model))
    """
    params, _ = self._split(model)
    params = sparse_optimizer.eval_params(
      self.tx, params, nnx.as_pure(self.opt_state)
    )
    return stack.eval_params(self.wrappers, self._local_states(), params)

  def metrics(self) -> dict[str, jax.Array]:
    """Returns the wrappers' metrics, for a training loop to log.

    Returns:
      Scalar arrays by name: `loss_scale` (float32) and `skipped_steps` (int32)
      with `LossScale`, `commits` (int32) with `AGN`; `{}` without wrappers.
    """
    return stack.metrics(self.wrappers, nnx.as_pure(self.wrapper_states))

  def _split(self, model: Any) -> tuple[PyTree, PyTree]:
    """Returns the parameters and the other arrays of a module."""
    _check_module(model)
    params, others = nnx.state(model, self.wrt, ..., graph=self.graph)
    return nnx.as_pure(params), nnx.as_pure(others)

  def _local_states(self) -> dict[str, PyTree]:
    return stack.local_states(self.wrappers, nnx.as_pure(self.wrapper_states))

  def _train_state(self, params: PyTree, **collections: PyTree) -> TrainState:
    """Returns the TrainState that takes the step."""
    names = [*collections, *(["wrapper_states"] if self.wrappers else [])]
    cls = fields_lib.extend(TrainState, names)
    if self.wrappers:
      collections["wrapper_states"] = nnx.as_pure(self.wrapper_states)
    return cls(
      step=self.step[...].astype(jnp.int32),
      apply_fn=None,
      params=params,
      tx=self.tx,
      opt_state=nnx.as_pure(self.opt_state),
      wrappers=self.wrappers,
      **collections,
    )

  def _goes_around_loss(self) -> bool:
    """Returns whether a wrapper must see the loss before the gradients."""
    states = nnx.as_pure(self.wrapper_states)
    return any(
      base.overrides(w, "scale_loss") or base.overrides(w, "working_params")
      for w in self.wrappers
      # "auto" that found nothing to scale.
      if not isinstance(w, LossScale) or states[base.name_of(w)]
    )

  def _check_params(self, params: PyTree) -> None:
    """Raises a ValueError if a module is not the one of this optimizer."""
    self._calls.check_params(params, self.wrt)


def _check_module(model: Any) -> None:
  if not isinstance(model, nnx.Pytree):
    raise TypeError(
      f"model must be an NNX module, got {checks.describe(model)}."
    )


def _check_no_host_commits(wrappers: tuple[base.Wrapper, ...]) -> None:
  """Raises a ValueError if a wrapper's commits need a TrainState."""
  for w in wrappers:
    if base.adapt(w).commits_on_host:
      raise ValueError(
        f"wrappers: {type(w).__name__}(transport='host') needs a TrainState, "
        "whose center flaxshard.Worker updates between steps. Make one with "
        "create_train_state(model, ...), which takes NNX modules too."
      )


def _check_no_replicas(
  wrappers: tuple[base.Wrapper, ...], num_replicas: int
) -> None:
  """Raises a ValueError if a wrapper acts on the gradients of each replica."""
  for w in wrappers:
    adapted = base.adapt(w)
    if (
      adapted.local_updates
      or adapted.reduces_gradients
      or adapted.defers_reduction
    ):
      raise ValueError(
        f"wrappers: {type(w).__name__} needs the gradients of each of the "
        f"{num_replicas} replicas. Under nnx.jit there is one gradient, the "
        "mean over the whole batch, and Strategy.run takes no NNX objects. "
        "Leave the wrapper out, or make a TrainState with "
        "create_train_state(model, ...) and call Strategy.run."
      )
