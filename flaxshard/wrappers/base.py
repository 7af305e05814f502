"""The interface of wrappers: the base class `Base`.

A wrapper changes how a loss becomes gradients and how gradients become
parameters. It is a frozen dataclass of hyper-parameters. Its state is a pytree
in `TrainState.wrapper_states`. `apply` receives `next`, which applies gradients
through the wrappers inside and the optimizer. The wrapper decides when to call
`next`, and with which gradients, as the optimizer wrappers of TensorFlow call
`self._opt.apply_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import re
from typing import Any, ClassVar, NamedTuple

import jax

from flaxshard.replicas import rows

PyTree = Any


class Target(NamedTuple):
  """The part of a train state that an update may change.

  Attributes:
    step: int32 scalar, the number of updates applied.
    params: The parameters.
    opt_state: The optimizer's state.
    collections: The other collections that this step replaces, by field name.
    wrapper_states: The states of the wrappers, by wrapper name.
    new_collections: The values that this batch gives `collections`. An update
      puts them there. A wrapper that uses a batch without an update does so.
  """

  step: jax.Array
  params: PyTree
  opt_state: PyTree
  collections: dict[str, PyTree]
  wrapper_states: dict[str, PyTree]
  new_collections: dict[str, PyTree]


Next = Callable[[Target, PyTree], Target]


@dataclasses.dataclass(frozen=True)
class Base:
  """A wrapper that changes nothing: override the methods that you need.

  Subclass it as a frozen dataclass whose fields are the hyper-parameters. The
  key of its state in `TrainState.wrapper_states` is `name`: the class name in
  snake case (`LossScale` becomes `loss_scale`), unless the class has an
  attribute of that name.

  A leaf of a wrapper's state is replicated or per replica. `specs` says which.
  In a TrainState a per-replica leaf has a leading axis, one row for each
  replica, sharded over `"replica"`. Inside the methods below that axis is gone:
  they see the state of one replica.

  A state that is a NamedTuple with a field `collections` keeps the other
  collections of the train state, such as `batch_stats`, for each replica: it is
  given them after `init`, but for `frozen`, the parameters that are not
  trained. Inside `Strategy.run` they take the place of those of the train
  state.

  Attributes:
    reduces: Class attribute, who reduces the gradients over the replicas.
      `"before"`: they are averaged before any wrapper gets them. `"self"`: the
      wrapper gets the gradients of one replica, and reduces them. `"inside"`:
      it gets those of one replica, and they are averaged when it calls `next`,
      unless another wrapper reduces them. `"local"`: it gets those of one
      replica, and the updates applied inside belong to that replica, so no
      wrapper inside may reduce gradients. `"store"`: as `"before"`, and
      `flaxshard.Worker` commits between steps what the wrapper adds up.
    groups: The groups of replicas that keep the same parameters, a tuple of
      tuples of replica numbers; None for one group of all.
    takes_indexed_slices: Class attribute. True: `apply` and
      `unscale_gradients` can take an `IndexedSlices` as the gradient of a
      parameter that `sparse_rows` names. It has two leaves, and row numbers are
      one of them: map over gradients with
      `is_leaf=flaxshard.is_indexed_slices`. False: gradients become whole
      arrays before any wrapper gets them, with a warning, and the update is
      that of any other parameter.

  Example:
    >>> import flaxshard as fs, dataclasses, jax, jax.numpy as jnp, optax
    >>> @dataclasses.dataclass(frozen=True)
    ... class SignGradients(fs.wrappers.Base):
    ...   def apply(self, state, target, grads, next):
    ...     return next(target, jax.tree.map(jnp.sign, grads)), state
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(())}, tx=optax.sgd(0.25),
    ...     wrappers=[SignGradients()])
    >>> float(state.apply_gradients(grads={"w": jnp.float32(8)}).params["w"])
    0.75
  """

  reduces: ClassVar[str] = "before"
  groups: ClassVar[rows.Groups] = None
  takes_indexed_slices: ClassVar[bool] = False

  @property
  def name(self) -> str:
    """The key of its state in `TrainState.wrapper_states`."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__)
    return snake.lower()

  def init(self, params: PyTree, tx: Any) -> PyTree:
    """Returns the first state of the wrapper: `()`, nothing to remember.

    Args:
      params: The parameters.
      tx: The optax optimizer.
    """
    del params, tx
    return ()

  def params(self, state: PyTree, params: PyTree, mode: str) -> PyTree:
    """Returns the parameters to use: `params`.

    Args:
      state: The wrapper's state.
      params: The parameters, or those that the wrappers inside return.
      mode: `"train"`: those at which the loss is differentiated. `"eval"`:
        those to evaluate and to export.
    """
    del state, mode
    return params

  def scale_loss(self, state: PyTree, loss: jax.Array) -> jax.Array:
    """Returns the scalar loss that is differentiated: `loss`."""
    del state
    return loss

  def unscale_gradients(self, state: PyTree, grads: PyTree) -> PyTree:
    """Undoes `scale_loss` on gradients: returns `grads`.

    Args:
      state: The wrapper's state.
      grads: Gradients of the scaled loss, as in `apply`.
    """
    del state
    return grads

  def apply(
    self, state: PyTree, target: Target, grads: PyTree, next: Next
  ) -> tuple[Target, PyTree]:
    """Applies gradients: calls `next` with them.

    Args:
      state: The wrapper's state.
      target: The part of the train state that the update may change.
      grads: Unscaled gradients like the parameters; None where there is none,
        and with `takes_indexed_slices` an `IndexedSlices` for a table.
      next: Applies gradients through the inner wrappers and the optimizer. It
        takes a target and gradients and returns the new target.

    Returns:
      The new target, and the wrapper's new state.
    """
    return next(target, grads), state

  def specs(self, state: PyTree) -> PyTree:
    """Returns a PartitionSpec for each leaf of `state`: all replicated.

    A spec that begins with `"replica"` makes the leaf per replica.
    """
    return jax.tree.map(lambda _: jax.P(), state)

  def restart(
    self, state: PyTree, target: Target, saved: dict[str, jax.Array]
  ) -> PyTree:
    """Makes a state from a checkpoint that has none, or another one.

    The state in a checkpoint is another one if the paths, shapes or dtypes of
    its leaves differ, as for another number of replicas.

    Args:
      state: A first state.
      target: The restored parameters, optimizer state and collections.
      saved: The saved leaves that do not depend on the number of replicas, by
        path: the replicated ones, and the first replica's scalars. Empty if the
        checkpoint has no state of this wrapper.

    Returns:
      The state to go on with. The default: the first state. Without an
      override, a checkpoint that has another state is an error.
    """
    del target, saved
    return state

  def metrics(self, state: PyTree) -> dict[str, jax.Array]:
    """Returns scalars to log, by name: none."""
    del state
    return {}

  def pending(self, state: PyTree) -> jax.Array | int:
    """Returns the number of batches that the parameters lack: 0.

    The training loop logs it at an evaluation and at the end of a run, and
    `TrainState.without_wrappers` warns of it.

    Args:
      state: The wrapper's state, outside of a trace.
    """
    del state
    return 0

  def check_replicas(self, num_replicas: int) -> None:
    """Raises or warns if the wrapper does not fit that many replicas."""
    del num_replicas


def cond(
  pred: jax.Array,
  true_fn: Callable[..., Any],
  false_fn: Callable[..., Any],
  *operands: Any,
) -> Any:
  """Returns `jax.lax.cond(...)`, outside of a trace by a Python branch.

  Outside of a trace `jax.lax.cond` compiles its branches, and keeps what it
  compiled. A new closure is compiled at every call, so an eager train step
  would compile, and take more memory, at every step.

  Args:
    pred: A bool scalar.
    true_fn: Called with the operands if `pred` is true.
    false_fn: Called with them if it is false.
    *operands: Trees of arrays.

  Example:
    >>> int(cond(jax.numpy.array(True), lambda x: x + 1, lambda x: x, 2))
    3
  """
  if isinstance(pred, jax.core.Tracer):
    return jax.lax.cond(pred, true_fn, false_fn, *operands)
  return (true_fn if pred else false_fn)(*operands)
