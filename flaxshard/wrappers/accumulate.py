"""Accumulate: the mean gradient of several batches for each update."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.wrappers import base

PyTree = Any

# JAX name scope of the conditional of an update: compiled programs name it.
UPDATE_SCOPE = "accumulated_update"


class AccumulateState(NamedTuple):
  """The state of `Accumulate`.

  Attributes:
    grads: The sum of the gradients since the last update, float32 or wider;
      None for leaves without a gradient. With `per_replica` they are those of a
      replica, `[replicas, ...]` in a TrainState.
    num_batches: int32 scalar, the number of batches in the sum.
  """

  grads: PyTree
  num_batches: jax.Array


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
  completes an update. A parameter without a gradient in that batch is not
  updated and keeps its sum: a `var_list` must be the same for all batches of an
  update.

  Gradients of tables of `sparse_rows` become whole arrays, with a warning.

  Args:
    steps: Number of batches in an update.
    per_replica: Whether each replica keeps the sum of its own gradients, and
      they are reduced once for an update. Needs `Strategy.run`. If False, the
      gradients of each batch are reduced before they are added.

  Raises:
    TypeError: An argument has a wrong type.
    ValueError: `steps` is below 1.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax
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

  steps: int = 1
  per_replica: bool = False

  def __post_init__(self) -> None:
    checks.fields(self, checks.integer, "steps", minimum=1)
    checks.fields(self, checks.one_of, "per_replica", allowed=(True, False))

  @property
  def reduces(self) -> str:  # type: ignore[override]
    """Whether gradients are reduced before this wrapper, or inside of it."""
    return "inside" if self.per_replica else "before"

  def init(self, params: PyTree, tx: Any) -> AccumulateState:
    """Returns the first state: a sum of no gradients.

    Args:
      params: The parameters.
      tx: The optax optimizer.
    """
    return AccumulateState(
      grads=gradients.zero_accumulators(tx, params),
      num_batches=jnp.zeros((), jnp.int32),
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

  def specs(self, state: AccumulateState) -> Any:
    """Returns the specs: the sums are per replica if `per_replica`."""
    spec = jax.P(mesh_lib.REPLICA) if self.per_replica else jax.P()
    specs: Any = jax.tree.map(lambda _: jax.P(), state)
    return specs._replace(grads=jax.tree.map(lambda _: spec, state.grads))

  def pending(self, state: AccumulateState) -> jax.Array:
    """Returns the number of batches in the sum."""
    return state.num_batches

  def apply(
    self,
    state: AccumulateState,
    target: base.Target,
    grads: PyTree,
    next: base.Next,
  ) -> tuple[base.Target, AccumulateState]:
    """Adds the gradients to the sum; calls `next` when it is complete."""
    count = state.num_batches + 1
    add = lambda x, g: x + g.astype(x.dtype)
    total = trees.map_both(add, state.grads, grads)

    def update(target: base.Target, total: PyTree) -> tuple[Any, PyTree]:
      # Statistics of Flax's fp8 layers have no sum: the last batch's replace
      # them. By the count and not by `steps`: a restored state may have more.
      mean = trees.map_both(
        lambda g, x: x / count.astype(x.dtype), grads, total
      )
      cleared = trees.map_both(lambda x, g: jnp.zeros_like(x), total, grads)
      return next(target, mean), cleared

    # Also a batch without an update changes them.
    target = target._replace(
      collections={**target.collections, **target.new_collections}
    )
    # Not equal: a restored state may have a sum of more batches than `steps`.
    is_update = count >= self.steps
    with jax.named_scope(UPDATE_SCOPE):
      target, total = base.cond(
        is_update, update, lambda *operands: operands, target, total
      )
    return target, AccumulateState(total, jnp.where(is_update, 0, count))
