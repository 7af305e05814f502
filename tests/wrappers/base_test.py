"""The base class of wrappers, and a stack of wrappers."""

import dataclasses
import functools
from typing import ClassVar

from compilations import count
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quadratic_states

import flaxshard as fs
from flaxshard.wrappers import Base


@dataclasses.dataclass(frozen=True)
class SignGradients(Base):
  def apply(self, state, target, grads, next):
    return next(target, jax.tree.map(jnp.sign, grads)), state


@dataclasses.dataclass(frozen=True)
class Affine(Base):
  """Applies x -> factor * x + shift to the loss and working parameters."""

  factor: float = 1.0
  shift: float = 0.0

  def params(self, state, params, mode):
    if mode == "eval":
      return params
    return jax.tree.map(lambda p: p * self.factor + self.shift, params)

  def scale_loss(self, state, loss):
    return loss * self.factor + self.shift

  def unscale_gradients(self, state, grads):
    return jax.tree.map(lambda g: (g - self.shift) / self.factor, grads)


@dataclasses.dataclass(frozen=True)
class OtherAffine(Affine):
  pass


@dataclasses.dataclass(frozen=True)
class Counter(Base):
  """Calls `next` several times and counts the calls of `apply`."""

  name: ClassVar[str] = "counter"
  calls: int = 1

  def init(self, params, tx):
    return jnp.zeros((), jnp.int32)

  def apply(self, state, target, grads, next):
    for _ in range(self.calls):
      target = next(target, grads)
    return target, state + 1


create = functools.partial(
  quadratic_states.create, params={"w": np.array([2.0, -3.0], np.float32)}
)
step = jax.jit(lambda state, g: state.apply_gradients(grads={"w": g}))


@pytest.mark.parametrize(
  ("wrappers", "error", "fact"),
  [
    (fs.LossScale(), TypeError, "wrappers .*LossScale"),
    ({fs.LossScale(), fs.EMA(0.9)}, TypeError, "wrappers must be a list"),
    ([SignGradients(), fs.LossScale], TypeError, r"wrappers\[1\].*LossScale"),
    ([fs.FixedLossScale(2.0)], TypeError, r"wrappers\[0\].*LossScale\("),
    (["loss_scale"], TypeError, r"wrappers\[0\].*'loss_scale'"),
    ([fs.LossScale(8), fs.LossScale()], ValueError, r"wrappers\[1\].* twice"),
    ([fs.AGN(), fs.CrossShard()], ValueError, "put 'cross_shard' first"),
    ([fs.AGN(2), fs.Accumulate(2)], ValueError, "put 'accumulate' first"),
    ([fs.AGN(2), fs.EMA()], ValueError, "put 'ema' first"),
    ([fs.Accumulate(2), fs.LossScale()], ValueError, "put 'loss_scale' first"),
    (
      [fs.Accumulate(2), fs.CrossShard()],
      ValueError,
      r"per_replica=False\): put 'cross_shard' first",
    ),
    (
      [fs.CrossShard(), fs.Accumulate(2, per_replica=True)],
      ValueError,
      "put 'accumulate' first",
    ),
  ],
)
def test_wrappers_that_cannot_be(wrappers, error, fact):
  with pytest.raises(error, match=fact):
    create(wrappers)


def test_gradients_are_unscaled_in_the_opposite_order():
  outer, inner = Affine(factor=2.0), OtherAffine(shift=3.0)
  state = create([outer, inner])
  # The innermost scales first: (1 + 3) * 2, not 1 * 2 + 3.
  assert float(state.scale_loss(jnp.float32(1.0))) == 8.0
  grads = state.unscale_gradients({"w": jnp.array([8.0])})
  assert float(grads["w"][0]) == 1.0


def test_loss_is_differentiated_at_the_working_params():
  state = create([Affine(factor=2.0), OtherAffine(shift=3.0)])
  # w = [2, -3] becomes (w + 3) * 2 = [10, 0], where the gradient is [20, 0].
  loss, grads = state.value_and_grad(lambda p: (p["w"] ** 2).sum())
  assert float(loss) == 100.0
  # Affine also shifts the gradient when it unscales.
  np.testing.assert_array_equal(grads["w"], [20.0 - 3.0, -3.0])


SIGN_THEN_SCALE = [SignGradients(), fs.LossScale("dynamic")]
SCALE_THEN_SIGN = [fs.LossScale("dynamic"), SignGradients()]


def test_outermost_wrapper_sees_gradients_first():
  # An infinity has a sign: only a check before the sign sees it.
  bad = jnp.array([jnp.inf, -1.0])
  skipped = step(create(SCALE_THEN_SIGN), bad)
  np.testing.assert_array_equal(skipped.params["w"], [2.0, -3.0])
  assert int(skipped.step) == 0
  applied = step(create(SIGN_THEN_SCALE), bad)
  np.testing.assert_array_equal(applied.params["w"], [1.5, -2.5])
  assert int(applied.step) == 1


@pytest.mark.parametrize(
  ("wrappers", "counted"),
  [
    # Only the state of a wrapper inside LossScale is kept.
    ([fs.LossScale("dynamic"), Counter()], [1, 1, 2]),
    ([Counter(), fs.LossScale("dynamic")], [1, 2, 3]),
  ],
)
def test_skipped_step_keeps_the_states_of_inner_wrappers(wrappers, counted):
  state = create(wrappers)
  seen = []
  for g in (1.0, np.nan, 1.0):
    state = step(state, jnp.array([g, 0.0]))
    seen.append(int(state.wrapper_states["counter"]))
  assert seen == counted
  assert int(state.step) == 2
  np.testing.assert_array_equal(state.params["w"], [1.0, -3.0])


# Outside of a trace.

SMALL = {"w": jnp.array([[1.0, -2.0], [0.5, 0.25]]), "b": jnp.ones(2)}
LARGE = {"w": jnp.full((128, 128), 0.5)}


def quadratic(params):
  return sum((p**2).sum() for p in jax.tree.leaves(params))


def eager_step(state):
  return state.minimize(quadratic)[0]


@pytest.mark.parametrize(
  ("wrappers", "params"),
  [
    ([fs.LossScale("dynamic")], SMALL),
    ([fs.LossScale("dynamic")], LARGE),
    ([fs.LossScale("dynamic"), fs.AGN(2, commit="mean")], SMALL),
  ],
  ids=["dynamic", "large", "agn"],
)
def test_eager_steps_do_not_compile_again(wrappers, params):
  state = create(wrappers, optax.sgd(0.125), params=params)
  start = jax.tree.map(jnp.copy, state)
  for _ in range(4):  # an AGN commit is every second step
    state = eager_step(state)
  with count() as compiled:
    for _ in range(4):
      state = eager_step(state)
  assert compiled.total == 0

  jitted, step = start, jax.jit(eager_step)
  for _ in range(8):
    jitted = step(jitted)
  # Powers of two: eager and fused arithmetic round alike.
  for got, want in zip(
    jax.tree.leaves(state), jax.tree.leaves(jitted), strict=True
  ):
    assert jnp.array_equal(got, want)
