"""Wrappers around an optimizer as three pure functions, for a loop of your own.

Parameters and state are pytrees, without a TrainState or an NNX module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxshard.core import extra_arguments
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import base
from flaxshard.wrappers import stack
from flaxshard.wrappers import step as step_lib

PyTree = Any


def wrap(tx: Any, wrappers: Sequence[base.Base] = ()) -> Wrapped:
  """Returns an optimizer with wrappers around it, as pure functions.

  They are for your own loop, with Equinox, Haiku or plain JAX: without a
  TrainState. State and parameters are pytrees, which go through `jax.jit` and
  plain Orbax. `Strategy.run` takes them as those of one replica, and returns a
  `PerReplica` for each array.

  Args:
    tx: The optax optimizer.
    wrappers: Wrappers such as `LossScale("dynamic")`, outermost first.

  Raises:
    TypeError: An argument is of a wrong type.
    ValueError: A wrapper is given twice, one may not stand inside another, or
      one needs a TrainState.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax
    >>> opt = fs.wrap(optax.sgd(0.25), [fs.LossScale("dynamic")])
    >>> params = {"w": jnp.ones(())}
    >>> state = opt.init(params)
    >>> loss_fn = lambda p, x: p["w"] * x
    >>> loss, grads = opt.value_and_grad(loss_fn, params, state, 2.0)
    >>> params, state = opt.update(grads, state, params)
    >>> float(loss), float(params["w"]), int(state.step)
    (2.0, 0.5, 1)
  """
  opt_state_lib.check_tx(tx)
  wrappers = stack.check(wrappers)
  if any(w.reduces == "store" for w in wrappers):
    raise ValueError(
      "wrappers: AGN(transport='store') needs a TrainState, and fs.Worker."
    )
  return Wrapped(tx, wrappers)


class WrappedState(NamedTuple):
  """The state of a wrapped optimizer.

  Attributes:
    step: int32 scalar, the number of applied updates.
    opt_state: The optimizer's state, with the structure of `tx.init(params)`.
    wrapper_states: The wrappers' states by name.
  """

  step: jax.Array
  opt_state: PyTree
  wrapper_states: dict[str, PyTree]


@dataclasses.dataclass(frozen=True)
class Wrapped:
  """An optimizer with wrappers around it: three pure functions.

  Attributes:
    tx: The optax optimizer.
    wrappers: The wrappers, outermost first.
  """

  tx: Any
  wrappers: tuple[base.Base, ...] = ()

  def init(self, params: PyTree) -> WrappedState:
    """Returns the first state.

    Args:
      params: A tree of arrays.
    """
    params = trees.unshare_buffers(params)
    state = WrappedState(
      jnp.zeros((), jnp.int32),
      opt_state_lib.init(self.tx, params),
      stack.init(self.wrappers, params, self.tx),
    )
    # A step that donates both must not get a buffer twice.
    return trees.unshare_buffers((params, state))[1]

  def value_and_grad(
    self,
    loss_fn: Callable[..., Any],
    params: PyTree,
    state: WrappedState,
    *args: Any,
    has_aux: bool = False,
  ) -> tuple[Any, PyTree]:
    """Differentiates `loss_fn(params, *args)` through the wrappers.

    Args:
      loss_fn: Returns a floating-point scalar, the loss, or a pair
        `(loss, aux)` if `has_aux`.
      params: The parameters.
      state: The state.
      *args: Further arguments of `loss_fn`.
      has_aux: Whether `loss_fn` returns auxiliary output.

    Returns:
      `(loss, grads)` or `((loss, aux), grads)`, both unscaled; see
      `TrainState.value_and_grad`.
    """
    return step_lib.value_and_grad(
      self.tx,
      self.wrappers,
      self._map_rows(lambda _, x: x[0], state.wrapper_states),
      params,
      loss_fn,
      args,
      has_aux=has_aux,
    )

  def update(
    self, grads: PyTree, state: WrappedState, params: PyTree, **extra: Any
  ) -> tuple[PyTree, WrappedState]:
    """Applies unscaled gradients through the wrappers.

    Args:
      grads: Gradients like `params`, None where a leaf has none.
      state: The state.
      params: The parameters.
      **extra: Extra arguments of the optimizer's update, such as `value`.

    Returns:
      The new parameters and the new state; the old parameters and optimizer
      state if a wrapper skips the step.

    Raises:
      ValueError: `grads` does not match `params`.
      TypeError: The optimizer has no such extra argument.
    """
    extra_arguments.check(self.tx, extra)
    target = base.Target(
      step=state.step,
      params=jax.tree.map(trees.drop_weak_type, params),
      opt_state=state.opt_state,
      collections={},
      wrapper_states=self._map_rows(lambda _, x: x[0], state.wrapper_states),
      new_collections={},
    )
    new = step_lib.update(self.tx, self.wrappers, target, grads, extra)
    states = self._map_rows(lambda _, x: x[None], new.wrapper_states)
    return new.params, WrappedState(new.step, new.opt_state, states)

  def eval_params(self, params: PyTree, state: WrappedState) -> PyTree:
    """Returns the parameters to evaluate, such as the average of `EMA`."""
    params = jax.tree.map(trees.drop_weak_type, params)
    states = stack.local_states(self.wrappers, state.wrapper_states)
    return stack.params(self.wrappers, states, params, "eval")

  def _map_rows(self, fn: Any, states: dict[str, Any]) -> dict[str, Any]:
    """Maps a function over the per-replica leaves inside of `Strategy.run`.

    There a state has the row of its replica, as a train state has not.
    """
    if replica_context.current.get() is None:
      return states
    return stack.map_per_replica(fn, self.wrappers, states)

  def metrics(self, state: WrappedState) -> dict[str, jax.Array]:
    """Returns the wrappers' metrics by name, such as `loss_scale`."""
    return stack.metrics(self.wrappers, state.wrapper_states)
