"""`Optimizer`: NNX's optimizer with wrappers around loss and update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any, TypeVar

from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp
import optax

from flaxshard.core import extra_arguments
from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.nnx import variables as variables_lib
from flaxshard.partitioning import rules as rules_lib
from flaxshard.state import create
from flaxshard.state import fields as fields_lib
from flaxshard.state import nnx_adapter
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import base
from flaxshard.wrappers import stack
from flaxshard.wrappers import step as step_lib

PyTree = Any
M = TypeVar("M", bound=nnx.Module)


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
    before: With wrappers, and between `value_and_grad` and `update`: what the
      loss has changed in the module, as it was, of `WrapperState` variables.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax
    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> optimizer = fs.nnx.Optimizer(
    ...     model, optax.sgd(0.1), wrt=nnx.Param,
    ...     wrappers=[fs.LossScale("dynamic")])
    >>> @nnx.jit
    ... def train_step(model, optimizer, x):
    ...   loss_fn = lambda model, x: (model(x) ** 2).mean()
    ...   loss, grads = optimizer.value_and_grad(loss_fn, model, x)
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
    wrt: Any,
    wrappers: Sequence[base.Base] = (),
    strategy: fields_lib.HasMesh | None = None,
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
      TypeError: An argument has a wrong type.
      ValueError: `wrt` selects no variable, a wrapper is given twice, a rule
        cannot be applied, `rules` are given without a strategy, or a wrapper
        needs `Strategy.run` because the strategy has several replicas.
    """
    opt_state_lib.check_tx(tx)
    wrappers = stack.check(wrappers)
    if not jax.tree.leaves(nnx.state(model, wrt, graph=graph)):
      raise ValueError(
        f"wrt={wrt!r} selects no variable of {type(model).__name__}."
      )
    mesh = fields_lib.mesh_of(strategy, rules)
    num_replicas = fields_lib.num_replicas(mesh)
    _check_wrappers(wrappers, num_replicas)
    param_specs = None
    if mesh is not None:
      stack.check_replicas(wrappers, num_replicas)
      param_specs = variables_lib.place_module(model, mesh, wrt, rules)
    policy = create.policy_of(model)
    create.warn_if_unscaled(policy, wrappers)
    wrappers = stack.with_policy(wrappers, policy)

    super().__init__(model, tx, wrt=wrt, graph=graph)
    self.wrappers = nnx.static(wrappers)
    params = self._params(model)
    states = stack.init(wrappers, params, tx, num_replicas=num_replicas)
    # Only arrays of their own: they would be donated twice.
    self.wrapper_states = nnx.data(
      jax.tree.map(lambda x: WrapperState(jnp.copy(x)), states)
    )
    self.before: nnx.State = nnx.data(nnx.State({}))
    if mesh is not None:
      variables_lib.place_optimizer(self, params, param_specs, mesh)

  # -- A train step.

  def value_and_grad(
    self,
    loss_fn: Callable[..., Any],
    model: Any = None,
    *args: Any,
    has_aux: bool = False,
    **kwargs: Any,
  ) -> Any:
    """Differentiates `loss_fn(model, *args, **kwargs)` through the wrappers.

    Use it in place of `nnx.value_and_grad`, which knows nothing of loss
    scaling. What the loss changes in the module, and in other NNX objects among
    its arguments, is changed there too.

    A step is all calls since the last `update`: with gradients of several
    calls, a skipped step undoes what all of them have changed in the module.

    Args:
      loss_fn: Returns a floating-point scalar, the loss, or a pair
        `(loss, aux)` if `has_aux`.
      model: The module, the first argument of `loss_fn`. Without it a function
        of the module and the rest is returned, as by `nnx.value_and_grad`.
      *args: Further arguments of `loss_fn`.
      has_aux: Whether `loss_fn` returns auxiliary output.
      **kwargs: Keyword arguments of `loss_fn`.

    Returns:
      `(loss, grads)`, or `((loss, aux), grads)`, both unscaled. `grads` is a
      state of the variables that `wrt` selects. With `LossScale` they are
      float32 or wider.

    Raises:
      TypeError: The loss is a pair, and `has_aux` says that it is none, or the
        other way round.
      ValueError: The loss is no scalar.
    """
    if model is None:
      return functools.partial(self.value_and_grad, loss_fn, has_aux=has_aux)
    # Split together: objects may share variables, such as random streams.
    given = (model, args, kwargs)
    in_wrt = nnx.filterlib.to_predicate(self.wrt)
    is_trained = lambda path, x: path[0] == 0 and in_wrt(path[1:], x)
    graphdef, *states = nnx.split(given, is_trained, ...)
    trained, others = states
    before = dict(nnx.to_flat_state(others))

    def is_same(a: Any, b: Any) -> bool:
      return [*map(id, jax.tree.leaves(a))] == [*map(id, jax.tree.leaves(b))]

    def pure_loss(params: PyTree) -> tuple[Any, tuple[Any, nnx.State]]:
      differentiated = _with_arrays(trained, params)
      copies = nnx.merge(graphdef, differentiated, others, copy=True)
      own_model, own_args, own_kwargs = copies
      output = loss_fn(own_model, *own_args, **own_kwargs)
      loss, aux = step_lib.split_loss(output, has_aux)
      known = before | dict(nnx.to_flat_state(differentiated))
      # What the loss leaves alone is no output, so that a transformation
      # neither copies nor carries it.
      changed = [
        (path, x)
        for path, x in nnx.to_flat_state(nnx.state(copies))
        if path not in known or not is_same(x, known[path])
      ]
      return loss, (aux, nnx.from_flat_state(changed))

    (loss, (aux, changed)), grads = step_lib.value_and_grad(
      self.tx,
      self.wrappers,
      nnx.as_pure(self.wrapper_states),
      self._params(model),
      pure_loss,
      has_aux=True,
    )
    first = {
      path[1:]: WrapperState(nnx.as_pure(before[path]))
      for path, _ in nnx.to_flat_state(changed)
      if path[0] == 0 and path in before
    }
    if self.wrappers and first:
      # What an earlier call since the last update has changed stays as it was.
      held = first | dict(nnx.to_flat_state(self.before))
      self.before = nnx.data(nnx.from_flat_state([*held.items()]))
    nnx.update(given, changed)
    grads = _with_arrays(nnx.state(model, self.wrt), grads)
    return (loss, aux) if has_aux else loss, grads

  # NNX too takes `grads` by name, though its type does not say so.
  def update(  # type: ignore[override]
    self, model: M, grads: Any, **kwargs: Any
  ) -> Any:
    """Applies unscaled gradients through the wrappers.

    Args:
      model: The module.
      grads: The gradients that `value_and_grad` returns.
      **kwargs: Extra arguments of the optimizer's update, such as the `value`
        of `optax.contrib.reduce_on_plateau`.

    Returns:
      Without wrappers the updates of the optimizer, as `nnx.Optimizer` does.
      With wrappers, or a None as a gradient, the changes of the parameters;
      zeros in a skipped step.

    Raises:
      TypeError: The module stands in the place of the gradients; or, with
        wrappers, the optimizer has no such extra argument.
      ValueError: The gradients have another structure than the parameters.
    """
    if isinstance(grads, nnx.Module):
      # The gradients would be updated, and the module stay as it is.
      raise TypeError(
        f"update: grads is the module, a {type(grads).__name__}. Write "
        "optimizer.update(model, grads)."
      )
    # NNX's optimizer takes no None, the gradient of an integer.
    if not self.wrappers and all(
      g is not None for g in jax.tree.leaves(grads, is_leaf=gradients.is_leaf)
    ):
      return super().update(model, grads, **kwargs)
    extra_arguments.check(self.tx, kwargs)
    params = self._params(model)
    held = dict(nnx.to_flat_state(self.before))
    # A value of another shape, such as one more sown value, has no old one.
    after = nnx.filter_state(
      nnx.state(model),
      lambda path, x: path in held and _shapes(x) == _shapes(held[path]),
    )
    before = [(path, held[path]) for path, _ in nnx.to_flat_state(after)]
    old = nnx.as_pure(nnx.from_flat_state(before))
    target = base.Target(
      step=self.step[...].astype(jnp.int32),
      params=params,
      opt_state=nnx.as_pure(self.opt_state),
      collections={"model": jax.tree.map(trees.drop_weak_type, old)},
      wrapper_states=nnx.as_pure(self.wrapper_states),
      new_collections={"model": nnx.as_pure(after)},
    )
    result = step_lib.update(
      self.tx,
      self.wrappers,
      target,
      nnx.as_pure(nnx.state(grads, self.wrt)),
      nnx.as_pure(kwargs),
    )
    nnx.update(model, _with_arrays(nnx.state(model, self.wrt), result.params))
    nnx.update(model, _with_arrays(after, result.collections))
    if jax.tree.leaves(self.before):
      self.before = nnx.data(nnx.State({}))
    self._assign(result.step, result.opt_state, result.wrapper_states)
    change = lambda n, o: n != o if n.dtype == bool else n - o
    return jax.tree.map(change, result.params, params)

  def eval_params(self, model: Any) -> PyTree:
    """Returns the parameters to evaluate and to export.

    They are the average of `EMA` if the optimizer has that wrapper, else those
    of the module.

    Args:
      model: The module.

    Returns:
      A tree for `nnx.update`.

    Example:
      >>> import flaxshard as fs, optax
      >>> from flax import nnx
      >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
      >>> optimizer = fs.nnx.Optimizer(
      ...     model, optax.sgd(0.1), wrt=nnx.Param, wrappers=[fs.EMA(0.9)])
      >>> average = nnx.clone(model)
      >>> nnx.update(average, optimizer.eval_params(model))
    """
    states = stack.local_states(self.wrappers, nnx.as_pure(self.wrapper_states))
    return stack.params(self.wrappers, states, self._params(model), "eval")

  def metrics(self) -> dict[str, jax.Array]:
    """Returns the wrappers' metrics, for a training loop to log.

    Returns:
      Scalar arrays by name: `loss_scale` (float32) and `skipped_steps` (int32)
      with `LossScale`, `commits` (int32) with `AGN`; `{}` without wrappers.
    """
    return stack.metrics(self.wrappers, nnx.as_pure(self.wrapper_states))

  # -- Checkpoints.

  def train_state(self, model: Any) -> TrainState:
    """Returns the module and the optimizer as a TrainState.

    It is for a `Checkpointer`, and for the methods of a state: `get_slot` and
    `variables`. It has the leaves that `create_train_state` makes of the
    module, the same arrays as the module, and no `apply_fn`. Parameters that
    `wrt` does not select are in the collection `frozen`.

    Args:
      model: The module.

    Example:
      >>> import flaxshard as fs, optax, tempfile
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = fs.nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
      >>> with fs.Checkpointer(tempfile.mkdtemp()) as checkpointer:
      ...   checkpointer.save(1, optimizer.train_state(model))
      ...   state = checkpointer.restore(optimizer.train_state(model))
      True
      >>> optimizer.set_train_state(model, state)
    """
    flat: dict[nnx_adapter.Place, Any] = {}
    for _, leaves in variables_lib.parts(model, self.wrt):
      flat |= leaves
    fields = traverse_util.unflatten_dict(flat)
    if self.wrappers:
      untrained = ("params", stack.FROZEN)
      collections = {k: v for k, v in fields.items() if k not in untrained}
      # Those of each replica, of which there is one.
      fields["wrapper_states"] = stack.map_collections(
        lambda _: jax.tree.map(lambda x: jnp.expand_dims(x, 0), collections),
        _with_string_keys(self.wrapper_states),
      )
    own = dict(
      step=self.step[...].astype(jnp.int32),
      apply_fn=None,
      tx=self.tx,
      opt_state=_with_string_keys(self.opt_state),
      wrappers=self.wrappers,
    )
    return fields_lib.build(TrainState, own | fields)

  def set_train_state(self, model: Any, state: TrainState) -> None:
    """Sets the module and the optimizer to a TrainState.

    Args:
      model: The module.
      state: A state like that of `train_state`, such as a restored one.

    Raises:
      ValueError: The state is one of another module, optimizer or wrappers.
    """
    variables_lib.update(model, state, wrt=self.wrt)
    states = stack.map_collections(lambda _: {}, state.wrapper_states)
    self._assign(state.step, state.opt_state, states)

  def _assign(self, step: Any, *states: PyTree) -> None:
    """Sets `step`, and `opt_state` and `wrapper_states` to `states`."""
    variables = self.step, self.opt_state, self.wrapper_states
    step = jnp.asarray(step, self.step[...].dtype)
    variables_lib.assign(variables, (step, *states))

  def _params(self, model: Any) -> PyTree:
    """Returns the parameters of a module that are trained."""
    return nnx.as_pure(nnx.state(model, self.wrt, graph=self.graph))


def _with_string_keys(tree: PyTree) -> PyTree:
  """Returns the arrays of variables, in dicts like those of a TrainState."""

  def convert(x: Any) -> Any:
    if not isinstance(x, nnx.State):
      return x
    flat = {tuple(map(str, path)): leaf for path, leaf in nnx.to_flat_state(x)}
    return traverse_util.unflatten_dict(flat)

  is_state = lambda x: isinstance(x, nnx.State)
  return jax.tree.map(convert, nnx.as_pure(tree), is_leaf=is_state)


def _with_arrays(variables: nnx.State, tree: PyTree) -> nnx.State:
  """Returns a state of the same variables with the leaves of a tree."""
  # A frozen parameter has no gradient; a table may have rows of one.
  leaves = jax.tree.leaves(tree, is_leaf=gradients.is_leaf)
  state: nnx.State = jax.tree.unflatten(jax.tree.structure(variables), leaves)
  return state


def _shapes(variable: Any) -> list[tuple[int, ...]]:
  return list(map(jnp.shape, jax.tree.leaves(variable)))


def _check_wrappers(wrappers: tuple[base.Base, ...], num_replicas: int) -> None:
  """Raises a ValueError if a wrapper needs a TrainState."""
  for w in wrappers:
    if w.reduces == "store" or (w.reduces != "before" and num_replicas > 1):
      raise ValueError(
        f"wrappers: {type(w).__name__} commits between steps, or needs the "
        f"gradients of each of the {num_replicas} replicas. Under nnx.jit "
        "there is one gradient, the mean over the whole batch. Leave the "
        "wrapper out, or make a TrainState with create_train_state(model, ...),"
        " which takes NNX modules too, and call Strategy.run."
      )
