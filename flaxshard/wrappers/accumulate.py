"""Accumulate: the mean gradient of several batches for each update."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import parameter_groups
from flaxshard.core import tracing
from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.sparse import row_accumulator
from flaxshard.wrappers import base

PyTree = Any
P = jax.sharding.PartitionSpec


class AccumulateState(NamedTuple):
  """The state of `Accumulate`.

  Attributes:
    grads: The sum of the gradients since the last update, float32 or wider;
      None for leaves without a gradient. With `per_replica` they are those of a
      replica, `[replicas, ...]` in a TrainState.
    num_batches: int32 scalar, the number of batches in the sum.
    touched: For each table of `sparse_rows`, bool `[rows]`: the rows in the
      sum. None for other parameters; `{}` without tables.
  """

  grads: PyTree
  num_batches: jax.Array
  touched: PyTree


@dataclasses.dataclass(frozen=True)
class Accumulate(base.Base):
  """Gradient accumulation: one update with the mean gradient of some batches.

  The update is that of one batch of all their examples, up to rounding, if the
  loss is a mean over examples and the batches have the same size.
  `state.step` and the schedules of the optimizer count updates. Collections
  such as `batch_stats` change with every batch.

  It differs from `optax.MultiSteps` in these points. The optimizer's state is
  that of the optimizer alone, so that checkpoints with and without accumulation
  have the same train state. With `per_replica` replicas communicate once for
  an update. And the optimizer runs once for an update, not for each batch.

  Place it inside `LossScale`: a batch that overflows is then left out, and the
  update takes the mean of the next finite ones. Place it outside of
  `CrossShard` with `per_replica`, and outside of `AGN`.

  Extra arguments of the optimizer, such as `value`, are those of the batch that
  completes an update.

  Of a table of `sparse_rows`, a batch adds its rows in place, and the update
  has the rows of all its batches: at most `steps` times as many as the batch
  that completes it. Rows beyond that, from larger batches, stay in the sum for
  the next update.

  Args:
    steps: Number of batches in an update.
    per_replica: Whether each replica keeps the sum of its own gradients, and
      they are reduced once for an update. Needs `Strategy.run`. If False, the
      gradients of each batch are reduced before they are added.

  Raises:
    TypeError: An argument has a wrong type.
    ValueError: `steps` is below 1.

  Example:
    >>> import flaxshard as fs, optax
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.zeros(())}, tx=optax.sgd(0.5),
    ...     wrappers=[fs.Accumulate(2)])
    >>> for x in (1.0, 3.0):
    ...   state, loss = state.minimize(lambda p: p["w"] * x)
    ...   print(float(state.params["w"]), int(state.step))
    0.0 0
    -1.0 1
  """

  name: ClassVar[str] = "accumulate"
  takes_indexed_slices: ClassVar[bool] = True
  derived_fields: ClassVar[tuple[str, ...]] = ("touched",)

  steps: int = 1
  per_replica: bool = False

  def __post_init__(self) -> None:
    steps = checks.integer("Accumulate: steps", self.steps, minimum=1)
    # A plain int, also from a NumPy integer: configs hold plain values.
    object.__setattr__(self, "steps", steps)
    checks.boolean("Accumulate: per_replica", self.per_replica)

  @property
  def defers_reduction(self) -> bool:  # type: ignore[override]
    """Whether gradients are reduced inside of this wrapper."""
    return self.per_replica

  def check_order(
    self, outer: Sequence[base.Wrapper], inner: Sequence[base.Wrapper]
  ) -> None:
    """Raises a ValueError if a wrapper is on the wrong side of this one."""
    for wrapper in outer:
      name = base.name_of(wrapper)
      adapted = base.adapt(wrapper)
      if adapted.local_updates or adapted.commits_on_host:
        raise ValueError(
          f"Accumulate must be outside of {name!r}, whose updates belong to "
          "one replica: put 'accumulate' first."
        )
      if base.adapt(wrapper).reduces_gradients and self.per_replica:
        raise ValueError(
          f"Accumulate(per_replica=True) is inside of {name!r}, which reduces "
          "the gradients of each batch: use Accumulate(per_replica=False), or "
          "put 'accumulate' first."
        )
    for wrapper in inner:
      name = base.name_of(wrapper)
      if base.adapt(wrapper).skips_steps:
        raise ValueError(
          f"Accumulate must be inside of {name!r}, which looks at the "
          f"gradients of each batch: put {name!r} first."
        )
      if base.adapt(wrapper).reduces_gradients and not self.per_replica:
        raise ValueError(
          f"Accumulate(per_replica=False) is outside of {name!r}, which "
          "receives the gradients of one replica: use "
          "Accumulate(per_replica=True)."
        )

  def init(self, params: PyTree, tx: Any) -> AccumulateState:
    """Returns the first state: a sum of no gradients.

    Args:
      params: The parameters.
      tx: The optax optimizer.
    """
    # With optax.lookahead only the fast parameters have gradients.
    trained = opt_state_lib.trained_params(params)
    return AccumulateState(
      grads=parameter_groups.zero_accumulators(tx, trained),
      num_batches=jnp.zeros((), jnp.int32),
      touched=row_accumulator.init_touched(tx, trained),
    )

  def restart(
    self,
    state: AccumulateState,
    target: base.Target,
    saved: dict[str, jax.Array],
  ) -> AccumulateState:
    """Returns a first state: the sums of other replicas are dropped."""
    del target, saved
    return state

  def adjust_restored(
    self, state: AccumulateState
  ) -> tuple[AccumulateState, None]:
    """Returns the state with the rows of sums that another run has saved."""
    touched = row_accumulator.find_touched(state.grads, state.touched)
    return state._replace(touched=touched), None

  def partition_specs(self, state: AccumulateState) -> Any:
    """Returns the specs: the sums are per replica if `per_replica`."""
    spec = P(mesh_lib.REPLICA) if self.per_replica else P()
    specs: Any = jax.tree.map(lambda _: P(), state)
    return specs._replace(
      grads=jax.tree.map(lambda _: spec, state.grads),
      touched=jax.tree.map(lambda _: spec, state.touched),
    )

  def took_batch(
    self, before: AccumulateState, after: AccumulateState
  ) -> jax.Array:
    """Returns whether a batch was added to the sum."""
    return before.num_batches != after.num_batches

  def pending(self, state: AccumulateState) -> str | None:
    """Returns how many batches or rows the parameters lack, if any."""
    count = int(state.num_batches)
    if not count:
      waiting = row_accumulator.count_touched(state.touched)
      if not waiting:
        return None
      return (
        f"Accumulate: {waiting} rows of tables did not fit in the last update, "
        "and are not in params. An update has `steps` times as many rows as "
        "its last batch, and earlier batches were larger."
      )
    return (
      f"Accumulate: {count} of {self.steps} batches of the next update are "
      "done; their gradients are not in params."
    )

  def apply(
    self,
    state: AccumulateState,
    target: base.Target,
    grads: PyTree,
    next: base.Next,
  ) -> tuple[base.Target, AccumulateState]:
    """Adds the gradients to the sum; calls `next` when it is complete."""
    grads = gradients.deduplicate(grads)
    total, touched = row_accumulator.add(state.grads, state.touched, grads)
    count = state.num_batches + 1

    def update(
      target: base.Target, total: PyTree, touched: PyTree
    ) -> tuple[base.Target, PyTree, PyTree]:
      # Statistics of Flax's fp8 layers have no sum: the last batch's replace
      # them. A leaf without a gradient in this batch keeps its sum.
      taken = jax.tree.map(
        lambda x, g: None if g is None else x,
        row_accumulator.take(total, touched, grads, self.steps),
        grads,
        is_leaf=_is_leaf,
      )
      # By the count and not by `steps`: a restored state may have more.
      mean = jax.tree.map(
        lambda x, g: g if x is None else x / count.astype(x.dtype),
        taken,
        grads,
        is_leaf=_is_leaf,
      )
      return next(target, mean), *row_accumulator.clear(total, touched, taken)

    # Not equal: a restored state may have a sum of more batches than `steps`.
    is_update = count >= self.steps
    with jax.named_scope(tracing.UPDATE_SCOPE):
      target, total, touched = tracing.cond(
        is_update, update, lambda *operands: operands, target, total, touched
      )
    return target, AccumulateState(
      total, jnp.where(is_update, 0, count), touched
    )


def add_accumulation(
  wrappers: Sequence[base.Wrapper], steps: int, *, per_replica: bool = False
) -> tuple[base.Wrapper, ...]:
  """Adds an `Accumulate` to wrappers, for `accumulate_steps` of a config.

  It is placed as far outside as possible, so that other wrappers see the
  gradients of the update. Wrappers that skip steps, such as `LossScale`, and
  what is around them stay outside.

  Args:
    wrappers: The wrappers, outermost first.
    steps: Number of batches in an update. With 1 nothing is added.
    per_replica: See `Accumulate`. A wrapper around it that reduces the
      gradients of each batch, such as `CrossShard`, makes it False.

  Raises:
    ValueError: The wrappers do not allow it.

  Example:
    >>> import flaxshard as fs
    >>> added = add_accumulation([fs.LossScale(), fs.EMA()], 4)
    >>> [base.name_of(wrapper) for wrapper in added]
    ['loss_scale', 'accumulate', 'ema']
  """
  wrappers = tuple(wrappers)
  if any(isinstance(wrapper, Accumulate) for wrapper in wrappers):
    raise ValueError(
      "config.wrappers: 'accumulate' is not a wrapper of a training config; "
      "set config.accumulate_steps, which the schedule depends on as well."
    )
  if steps == 1:
    return wrappers
  skipping = [i for i, w in enumerate(wrappers) if base.adapt(w).skips_steps]
  position = skipping[-1] + 1 if skipping else 0
  is_reduced = any(base.adapt(w).reduces_gradients for w in wrappers[:position])
  accumulate = Accumulate(steps, per_replica=per_replica and not is_reduced)
  try:
    return base.check([*wrappers[:position], accumulate, *wrappers[position:]])
  except ValueError as e:
    raise ValueError(f"config.accumulate_steps={steps}: {e}") from e


def _is_leaf(x: Any) -> bool:
  return x is None or is_indexed_slices(x)
