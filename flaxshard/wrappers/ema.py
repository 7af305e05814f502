"""EMA: an exponential moving average of the parameters, for evaluation."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import trees
from flaxshard.wrappers import base

PyTree = Any


class EMAState(NamedTuple):
  """The state of `EMA`.

  Attributes:
    params: The average of each parameter that is trained, float32 or wider;
      None for the others.
    weight: float32 scalar, the sum of the weights of the parameters in the
      average. It is below 1 as long as the average is debiased.
    num_updates: int32 scalar, the number of updates in the average.
  """

  params: PyTree
  weight: jax.Array
  num_updates: jax.Array


@dataclasses.dataclass(frozen=True)
class EMA(base.Base):
  """Keeps an exponential moving average of the parameters.

  After each update, `average = decay * average + (1 - decay) * params`. A
  skipped step does not change the average. `state.eval_params` returns it in
  the dtypes of the parameters, and the training loop evaluates it.
  `state.params` stay those that are trained.

  It may stand anywhere but inside of `AGN`. Inside of `LossScale` it shares the
  conditional of the update. Around `AGN` it averages the center, once for each
  local step.

  The average is sharded like the parameters, and takes 4 bytes for each trained
  parameter of up to 32 bits. It is saved with the wrapper states. A checkpoint
  without it starts a new average.

  Args:
    decay: Weight of the old average in the new one, from 0 to below 1.
    debias: Whether the weights of the averaged parameters sum to 1 from the
      first update on, as in `optax.ema`. Then the initial parameters are not
      in the average. If False, the average starts at the parameters before the
      first update.
    warmup: Whether the decay is at most (1 + n) / (10 + n) after n updates, as
      with the `num_updates` of `tf.train.ExponentialMovingAverage`.

  Raises:
    ValueError: `decay` is not from 0 to below 1.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.zeros(())}, tx=optax.sgd(1.0),
    ...     wrappers=[fs.EMA(decay=0.5)])
    >>> for _ in range(2):
    ...   state, _ = state.minimize(lambda p: -3 * p["w"])
    ...   print(float(state.params["w"]), float(state.eval_params["w"]))
    3.0 3.0
    6.0 5.0

  References:
    Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging,
    1992; `optax.ema`; `tf.train.ExponentialMovingAverage`.
  """

  name: ClassVar[str] = "ema"
  takes_indexed_slices: ClassVar[bool] = True

  decay: float = 0.999
  debias: bool = True
  warmup: bool = False

  def __post_init__(self) -> None:
    checks.fields(self, checks.number, "decay", minimum=0, below=1)
    switches = ("debias", "warmup")
    checks.fields(self, checks.one_of, *switches, allowed=(True, False))

  def init(self, params: PyTree, tx: Any) -> EMAState:
    """Returns the first state.

    Args:
      params: The parameters.
      tx: The optax optimizer.
    """
    return EMAState(
      params=gradients.zero_accumulators(tx, params),
      # With the weight 1 the parameters before the first update, which `apply`
      # starts from, are a part of the average.
      weight=jnp.array(0 if self.debias else 1, jnp.float32),
      num_updates=jnp.zeros((), jnp.int32),
    )

  def params(self, state: EMAState, params: PyTree, mode: str) -> PyTree:
    """Returns the average to evaluate, in the dtypes of the parameters."""
    if mode == "train":
      return params
    average = trees.map_both(
      lambda p, a: a.astype(p.dtype), params, state.params
    )
    # Before the first update there is no average. A conditional: a select would
    # copy all parameters for each evaluation.
    return base.cond(state.num_updates > 0, lambda: average, lambda: params)

  def apply(
    self, state: EMAState, target: base.Target, grads: PyTree, next: base.Next
  ) -> tuple[base.Target, EMAState]:
    """Calls `next`, and adds the new parameters to the average."""
    new = next(target, grads)
    # A wrapper inside, such as LossScale, may have skipped the step.
    applied = new.step != target.step
    # 1 - decay, in float64.
    step_size = jnp.float32(1 - self.decay)
    if self.warmup:
      # 1 - (1 + n) / (10 + n)
      n = state.num_updates.astype(jnp.float32)
      step_size = jnp.maximum(step_size, 9 / (10 + n))
    weight = state.weight + step_size * (1 - state.weight)
    # Divided by the weight here, and not when it is read: so the state has the
    # debiased average. At the first update the quotient is exactly 1.
    # Not a conditional: that would keep XLA from fusing the optimizer's update
    # with this one. With a step size of 0 the average keeps its bits.
    step_size = jnp.where(applied, step_size / weight, 0)
    cast_like = lambda a, p: p.astype(a.dtype)
    average = state.params
    if not self.debias:
      # Not in `init`: parameters may have been replaced since then.
      average = jax.tree.map(
        lambda a, p: jnp.where(state.num_updates == 0, p, a),
        average,
        trees.map_both(cast_like, average, target.params),
      )
    return new, EMAState(
      params=optax.incremental_update(
        trees.map_both(cast_like, average, new.params), average, step_size
      ),
      weight=jnp.where(applied, weight, state.weight),
      num_updates=state.num_updates + applied.astype(jnp.int32),
    )
