"""The interface of wrappers: the base class `Base`.

A wrapper changes how a loss becomes gradients and how gradients become
parameters. It is a frozen dataclass of hyper-parameters. Its state is a pytree
in `TrainState.wrapper_states`. `apply` receives `next`, which applies gradients
through the wrappers inside and the optimizer. The wrapper decides when to call
`next`, and with which gradients, as the optimizer wrappers of TensorFlow call
`self._opt.apply_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import re
import types
from typing import Any, ClassVar, NamedTuple, Self

import jax

from flaxshard.core.policy import Policy
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import values

PyTree = Any


class Target(NamedTuple):
  """The part of a train state that an update may change.

  Attributes:
    step: int32 scalar, the number of updates applied.
    params: The parameters.
    opt_state: The optimizer's state.
    collections: The other collections that this step replaces, by field name.
    wrapper_states: The states of the wrappers, by wrapper name.
  """

  step: jax.Array
  params: PyTree
  opt_state: PyTree
  collections: dict[str, PyTree]
  wrapper_states: dict[str, PyTree]


Next = Callable[[Target, PyTree], Target]


class Stall(NamedTuple):
  """Steps that a wrapper has skipped, with nothing left to try.

  Attributes:
    steps: Number of the last steps that were skipped, all in a row.
    reason: One or more sentences for the user: the cause and a remedy.
  """

  steps: int
  reason: str


@dataclasses.dataclass(frozen=True)
class Base:
  """A wrapper that changes nothing: override the methods that you need.

  Subclass it as a frozen dataclass whose fields are the hyper-parameters. The
  key of its state in `TrainState.wrapper_states` is the class attribute `name`
  if there is one, else the class name in snake case (`LossScale` becomes
  `loss_scale`).

  A leaf of a wrapper's state is replicated or per replica. `partition_specs`
  says which. In a TrainState a per-replica leaf has a leading axis, one row for
  each replica, sharded over `"replica"`. Inside the methods below that axis is
  gone: they see the state of one replica.

  Attributes:
    reduces_gradients: Class attribute. True: the wrapper reduces the gradients
      over the replicas itself, and receives the gradients of one replica.
      False: gradients are averaged over the replicas before any wrapper.
    local_updates: Class attribute. True: the updates applied inside this
      wrapper belong to one replica, so no wrapper inside may reduce gradients.
    commits_to_store: Class attribute. True: the updates applied inside this
      wrapper reach `params` by commits to a store, between steps. They need a
      TrainState, and wrappers that look at `params` must be outside.
    defers_reduction: Class attribute. True: the wrapper receives the gradients
      of one replica. They are averaged over the replicas when it calls `next`,
      unless another wrapper reduces them.
    skips_steps: Class attribute. True: the gradients of a batch decide whether
      its step is skipped, so no wrapper outside may accumulate gradients.
    takes_indexed_slices: Class attribute. True: `apply` and
      `unscale_gradients` can take an `IndexedSlices` as the gradient of a
      parameter that `sparse_rows` names. It has two leaves, and row numbers are
      one of them: map over gradients with
      `is_leaf=flaxshard.is_indexed_slices`. False: gradients become whole
      arrays before any wrapper gets them, with a warning, and the update is
      that of any other parameter.
    derived_fields: Class attribute. Fields of the state that may start again,
      or that follow from the others. A checkpoint may lack them, or have them
      where the state does not, or in another shape: they are zeros when
      `adjust_restored` is called, or dropped.
    foreign_paths: Class attribute. Leaves of a plain Flax train state that a
      checkpoint without a state of this wrapper may have instead, such as
      `"dynamic_scale/scale"`, and the leaf of this wrapper's state that each
      becomes. The other leaves of the state start fresh.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax
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

  reduces_gradients: ClassVar[bool] = False
  local_updates: ClassVar[bool] = False
  commits_to_store: ClassVar[bool] = False
  defers_reduction: ClassVar[bool] = False
  skips_steps: ClassVar[bool] = False
  takes_indexed_slices: ClassVar[bool] = False
  derived_fields: ClassVar[tuple[str, ...]] = ()
  foreign_paths: ClassVar[Mapping[str, str]] = types.MappingProxyType({})

  # -- The way of a step: from parameters to gradients to an update.

  def init(self, params: PyTree, tx: Any) -> PyTree:
    """Returns the first state of the wrapper: `()`, nothing to remember.

    Args:
      params: The parameters.
      tx: The optax optimizer.
    """
    del params, tx
    return ()

  def working_params(self, state: PyTree, params: PyTree) -> PyTree:
    """Returns the parameters at which the loss is differentiated: `params`."""
    del state
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

  def takes_narrow_gradients(self, state: PyTree) -> bool:
    """Returns whether `unscale_gradients` may get gradients in 16 bits.

    True: while a step is traced, `value_and_grad` passes a gradient that the
    model computes in float16 or bfloat16, and casts to float32, as it was
    before that cast. `unscale_gradients` must then return float32. False, the
    default: gradients have the dtypes of their parameters.

    Args:
      state: The wrapper's state.
    """
    del state
    return False

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

  def partition_specs(self, state: PyTree) -> PyTree:
    """Returns a PartitionSpec for each leaf of `state`: all replicated.

    A spec that begins with `"replica"` makes the leaf per replica.
    """
    return jax.tree.map(lambda _: jax.P(), state)

  def eval_params(self, state: PyTree, params: PyTree) -> PyTree:
    """Returns the parameters to evaluate and to export: `params`.

    Args:
      state: The wrapper's state.
      params: The parameters, or what the wrappers inside make of them.
    """
    del state
    return params

  def took_batch(self, before: PyTree, after: PyTree) -> jax.Array | None:
    """Returns whether a step without an update has used its batch.

    A step that changes `TrainState.step` has used its batch in any case.

    Args:
      before: The wrapper's state before the step.
      after: The wrapper's state after the step.

    Returns:
      A bool scalar. None, the default: a step without an update was skipped.
    """
    del before, after
    return None

  # -- Other collections, such as batch statistics.

  def init_collections(
    self, state: PyTree, collections: dict[str, PyTree]
  ) -> PyTree:
    """Returns the first state, given the collections: `state` as it is.

    Args:
      state: The result of `init`.
      collections: The other collections of the train state, by name.
    """
    del collections
    return state

  def swap_collections(
    self, state: PyTree, collections: dict[str, PyTree]
  ) -> tuple[PyTree, dict[str, PyTree]]:
    """Exchanges the train state's collections for those of a replica.

    `Strategy.run` calls it when it begins and again when it ends, so that a
    replica sees the collections that the wrapper keeps for it.

    Returns:
      The state and the collections, exchanged. The default keeps both.
    """
    return state, collections

  def reduce_collection(self, x: jax.Array) -> jax.Array:
    """Reduces one array of a collection over the replicas.

    Where several wrappers override it, each is called in turn, outermost first.

    Args:
      x: This replica's new value.

    Returns:
      The value to go on with. The default: the mean of floating-point arrays,
      the first replica's value of others.
    """
    return replica_context.mean_collection(x)

  # -- Before training, and at a restore.

  def with_policy(self, policy: Policy) -> Self:
    """Returns the wrapper for a model with that precision policy: `self`."""
    del policy
    return self

  def check_order(self, outer: Sequence[Base], inner: Sequence[Base]) -> None:
    """Raises a ValueError if another wrapper is on the wrong side.

    Args:
      outer: The wrappers around this one, outermost first.
      inner: The wrappers inside of this one.
    """
    del outer, inner

  def check_replicas(self, num_replicas: int) -> None:
    """Raises or warns if the wrapper does not fit that many replicas."""
    del num_replicas

  def divergence(self) -> str | None:
    """Returns a sentence if groups of replicas get different parameters.

    None, the default, says that all replicas hold the same ones.
    """
    return None

  def replica_groups(self) -> replica_context.Groups:
    """Returns the groups of replicas that keep the same parameters.

    Each replica is in one group. `Strategy.run` checks that a TrainState does
    not differ within a group. None, the default, means one group of all
    replicas; if `divergence` returns a sentence, that the groups are not known,
    and nothing is checked.
    """
    return None

  def restart(
    self, state: PyTree, target: Target, saved: dict[str, jax.Array]
  ) -> PyTree:
    """Makes a state from a checkpoint that has none for so many replicas.

    Args:
      state: A first state.
      target: The restored parameters, optimizer state and collections.
      saved: The saved leaves that do not depend on the number of replicas, by
        path: the replicated ones, and the first replica's scalars. Empty if the
        checkpoint has no state of this wrapper.

    Returns:
      The state to go on with. The default: the first state. Without an
      override, a checkpoint for another number of replicas is an error.
    """
    del target, saved
    return state

  def adjust_restored(self, state: PyTree) -> tuple[PyTree, str | None]:
    """Adjusts a restored state to the hyper-parameters of this wrapper.

    Args:
      state: The state of the wrapper in a checkpoint, which another
        configuration may have saved.

    Returns:
      The state to go on with, and a sentence on what has changed, for a
      warning. The default: the state as it is, and None.
    """
    return state, None

  # -- For the training loop.

  def metrics(self, state: PyTree) -> dict[str, jax.Array]:
    """Returns scalars to log, by name: none."""
    del state
    return {}

  def warning(
    self, previous: Mapping[str, float] | None, current: Mapping[str, float]
  ) -> str | None:
    """Returns a warning to log, if the metrics show that training goes wrong.

    Args:
      previous: The metrics of the wrappers when they were last logged, by
        name; None the first time.
      current: The metrics now.

    Returns:
      A message; None, the default, if there is nothing to report.
    """
    del previous, current
    return None

  def pending(self, state: PyTree) -> str | None:
    """Returns what the parameters lack until a later step, as a sentence.

    The training loop logs it at an evaluation and at the end of a run, and
    `TrainState.without_wrappers` warns of it.

    Args:
      state: The wrapper's state, outside of a trace.

    Returns:
      None, the default, if the parameters have all updates.
    """
    del state
    return None

  def stalled(self, state: PyTree) -> Stall | None:
    """Returns the steps skipped in a row, if no further step can succeed.

    The training loop stops after 20 such steps, and saves nothing before.

    Args:
      state: The wrapper's state, outside of a trace.

    Returns:
      None, the default, if the last step was applied or the next one may be.
    """
    del state
    return None


def name_of(wrapper: Base | type) -> str:
  """Returns the key of a wrapper's state in `wrapper_states`."""
  cls = wrapper if isinstance(wrapper, type) else type(wrapper)
  snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
  return getattr(wrapper, "name", snake)


def overrides(wrapper: Base, hook: str) -> bool:
  """Returns whether a wrapper defines a hook, instead of the default."""
  return getattr(type(wrapper), hook) is not getattr(Base, hook)


def check(wrappers: Iterable[Base]) -> tuple[Base, ...]:
  """Checks wrappers and returns them as a tuple.

  Args:
    wrappers: A sequence of wrappers, outermost first.

  Raises:
    TypeError: `wrappers` is no list or tuple, or an entry is not a wrapper.
    ValueError: The same wrapper is given twice, a wrapper reduces gradients
      inside one that keeps them local, or its `check_order` raises.
  """
  if not isinstance(wrappers, (tuple, list)):
    # A set has no order.
    raise TypeError(
      f"wrappers must be a list or a tuple, the outermost first, got "
      f"{wrappers!r}."
    )
  wrappers = tuple(wrappers)
  names: list[str] = []
  for i, wrapper in enumerate(wrappers):
    if not isinstance(wrapper, Base):
      # By name: the modules of these classes import this one.
      kind = type(wrapper).__name__
      hint = " It is the argument lora=." if kind == "LoRA" else ""
      if kind in ("FixedLossScale", "DynamicLossScale"):
        hint = f" Write LossScale({kind}(...))."
      raise TypeError(
        f"wrappers[{i}] must be an instance of a wrapper, such as "
        f"LossScale('dynamic'), got {wrapper!r}.{hint}"
      )
    name = name_of(wrapper)
    if name in names:
      raise ValueError(
        f"wrappers[{i}]: {name!r} is given twice; "
        f"got {[name_of(w) for w in wrappers]}."
      )
    names.append(name)
    outer = [w for w in wrappers[:i] if w.local_updates]
    if outer and wrapper.reduces_gradients:
      raise ValueError(
        f"wrappers[{i}]: {name!r} reduces gradients over replicas, but "
        f"{name_of(outer[0])!r} around it keeps them local; put {name!r} first."
      )
  for i, wrapper in enumerate(wrappers):
    wrapper.check_order(wrappers[:i], wrappers[i + 1 :])
  return wrappers


def partition_specs(wrapper: Base, state: PyTree) -> list[jax.P]:
  """Returns the PartitionSpec of each leaf of a wrapper's state."""
  treedef: Any = jax.tree.structure(state)
  return treedef.flatten_up_to(wrapper.partition_specs(state))


def per_replica_mask(wrapper: Base, state: PyTree) -> list[bool]:
  """Returns, for each leaf of a wrapper's state, whether it is per replica."""
  specs = partition_specs(wrapper, state)
  return [values.has_replica_axis(spec) for spec in specs]
