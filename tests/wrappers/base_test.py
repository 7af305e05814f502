"""The wrapper protocol and the stack of wrappers."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from plain_wrapper import Plain
import pytest

import flaxshard as fs
from flaxshard.wrappers import base
from flaxshard.wrappers import stack
from flaxshard.wrappers import Wrapper


@dataclasses.dataclass(frozen=True)
class SignGradients(Plain):
  def apply(self, state, target, grads, next):
    return next(target, jax.tree.map(jnp.sign, grads)), state


@dataclasses.dataclass(frozen=True)
class Affine(Plain):
  """Loss and working parameters go through x -> factor * x + shift."""

  factor: float = 1.0
  shift: float = 0.0

  def working_params(self, state, params):
    return jax.tree.map(lambda p: p * self.factor + self.shift, params)

  def scale_loss(self, state, loss):
    return loss * self.factor + self.shift

  def unscale_gradients(self, state, grads):
    return jax.tree.map(lambda g: (g - self.shift) / self.factor, grads)


@dataclasses.dataclass(frozen=True)
class OtherAffine(Affine):
  pass


@dataclasses.dataclass(frozen=True)
class Counter(Plain):
  """Calls `next` several times and counts its own applies."""

  name: ClassVar[str] = "counter"
  calls: int = 1

  def init(self, params, tx):
    return jnp.zeros((), jnp.int32)

  def apply(self, state, target, grads, next):
    for _ in range(self.calls):
      target = next(target, grads)
    return target, state + 1


@dataclasses.dataclass(frozen=True)
class HTTPLog2(Plain):
  pass


@dataclasses.dataclass(frozen=True)
class WithPolicy(Plain):
  policy: Any = None

  def with_policy(self, policy):
    return dataclasses.replace(self, policy=self.policy or policy)


def create(wrappers, params=None, tx=None):
  return fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.array([2.0, -3.0])} if params is None else params,
    tx=tx or optax.sgd(0.5),
    wrappers=wrappers,
  )


step = jax.jit(lambda state, g: state.apply_gradients(grads={"w": g}))


def test_names():
  assert base.name_of(fs.LossScale()) == "loss_scale"
  assert base.name_of(fs.LossScale) == "loss_scale"
  assert base.name_of(SignGradients()) == "sign_gradients"
  assert base.name_of(SignGradients) == "sign_gradients"
  assert base.name_of(Counter()) == "counter"
  assert base.name_of(HTTPLog2()) == "httplog2"


def test_protocol():
  assert isinstance(SignGradients(), Wrapper)
  assert isinstance(fs.LossScale(), Wrapper)
  assert not isinstance(object(), Wrapper)


def test_check_gives_a_tuple():
  wrappers = [SignGradients(), fs.LossScale()]
  assert base.check(wrappers) == tuple(wrappers)
  assert base.check(iter(wrappers)) == tuple(wrappers)
  assert base.check(()) == ()


@pytest.mark.parametrize(
  "wrappers", [fs.LossScale(), "loss_scale", {"loss_scale": {}}, None, 3]
)
def test_wrappers_are_a_sequence(wrappers):
  with pytest.raises(TypeError, match="wrappers must be a sequence"):
    base.check(wrappers)


def test_a_class_is_no_wrapper():
  with pytest.raises(
    TypeError, match=r"wrappers\[1\] must be an instance.*LossScale"
  ):
    base.check([SignGradients(), fs.LossScale])


def test_missing_methods_are_named():
  class Half:
    def init(self, params, tx):
      return ()

    def apply(self, state, target, grads, next):
      return next(target, grads), state

  with pytest.raises(TypeError) as e:
    base.check([Half()])
  message = str(e.value)
  for method in (
    "working_params",
    "scale_loss",
    "unscale_gradients",
    "partition_specs",
  ):
    assert method in message
  assert "no init" not in message
  with pytest.raises(TypeError, match=r"wrappers\[0\].*'loss_scale'"):
    base.check(["loss_scale"])


def test_a_wrapper_can_be_hashed():
  @dataclasses.dataclass(frozen=True)
  class Arrays(Plain):
    x: Any = None

  with pytest.raises(TypeError, match=r"wrappers\[0\].*must be hashable"):
    base.check([Arrays(np.ones(2))])


def test_the_same_wrapper_twice():
  with pytest.raises(ValueError, match=r"wrappers\[1\]: 'loss_scale' is given"):
    base.check([fs.LossScale(8), fs.LossScale("dynamic")])


def test_policies_fill_what_was_left_open():
  given = WithPolicy(policy="mine")
  wrappers = stack.with_policy((given, SignGradients()), "model's")
  assert wrappers == (given, SignGradients())
  (filled,) = stack.with_policy((WithPolicy(),), "model's")
  assert filled.policy == "model's"
  assert stack.with_policy((WithPolicy(),), None) == (WithPolicy(),)


def test_states_by_name():
  state = create([fs.LossScale(8), Counter()])
  assert set(state.wrapper_states) == {"loss_scale", "counter"}
  assert int(state.wrapper_states["counter"]) == 0


def test_loss_and_gradients_are_scaled_in_opposite_orders():
  outer, inner = Affine(factor=2.0), OtherAffine(shift=3.0)
  state = create([outer, inner])
  # The innermost scales first: (1 + 3) * 2, not 1 * 2 + 3.
  assert float(state.scale_loss(jnp.float32(1.0))) == 8.0
  grads = state.unscale_gradients({"w": jnp.array([8.0])})
  assert float(grads["w"][0]) == 1.0


def test_loss_is_taken_at_the_working_params():
  state = create([Affine(factor=2.0), OtherAffine(shift=3.0)])
  # w = [2, -3] becomes (w + 3) * 2 = [10, 0]; the gradient is that of there.
  loss, grads = state.value_and_grad(lambda p: (p["w"] ** 2).sum())
  assert float(loss) == 100.0
  # Unscaling is factor first, then the shift that has no business here.
  np.testing.assert_array_equal(grads["w"], [20.0 - 3.0, -3.0])


SIGN_THEN_SCALE = [SignGradients(), fs.LossScale("dynamic")]
SCALE_THEN_SIGN = [fs.LossScale("dynamic"), SignGradients()]


@pytest.mark.parametrize("wrappers", [SIGN_THEN_SCALE, SCALE_THEN_SIGN])
def test_ones_own_wrapper_beside_loss_scale(wrappers):
  state = create(wrappers)
  loss_fn = lambda p: (p["w"] ** 2).sum()
  minimize = jax.jit(lambda s: s.minimize(loss_fn))
  state, loss = minimize(state)
  assert float(loss) == 13.0
  np.testing.assert_array_equal(state.params["w"], [1.5, -2.5])
  skipped = step(state, jnp.array([jnp.nan, 1.0]))
  np.testing.assert_array_equal(skipped.params["w"], [1.5, -2.5])
  assert int(skipped.step) == 1
  assert float(skipped.wrapper_states["loss_scale"].scale) == 2.0**14


def test_the_outermost_sees_gradients_first():
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
    # Inside, its state is held back with everything else; outside it is not.
    ([fs.LossScale("dynamic"), Counter()], [1, 1, 2]),
    ([Counter(), fs.LossScale("dynamic")], [1, 2, 3]),
  ],
)
def test_a_skipped_step_holds_back_the_states_inside(wrappers, counted):
  state = create(wrappers)
  seen = []
  for g in (1.0, np.nan, 1.0):
    state = step(state, jnp.array([g, 0.0]))
    seen.append(int(state.wrapper_states["counter"]))
  assert seen == counted
  assert int(state.step) == 2
  np.testing.assert_array_equal(state.params["w"], [1.0, -3.0])


def test_next_called_twice_carries_the_inner_states_along():
  state = create([Counter(calls=2), fs.LossScale(fs.DynamicLossScale(8.0))])
  state = step(state, jnp.array([1.0, 0.0]))
  np.testing.assert_array_equal(state.params["w"], [1.0, -3.0])
  assert int(state.step) == 2
  assert int(state.wrapper_states["loss_scale"].good_steps) == 2
  state = step(state, jnp.array([jnp.inf, 0.0]))
  assert float(state.wrapper_states["loss_scale"].scale) == 2.0
  assert int(state.wrapper_states["loss_scale"].skipped_steps) == 2


def test_a_wrapper_that_never_calls_next():
  @dataclasses.dataclass(frozen=True)
  class Stop(Plain):
    def apply(self, state, target, grads, next):
      return target, state

  state = create([fs.LossScale(8), Stop()])
  new = step(state, jnp.ones(2))
  np.testing.assert_array_equal(new.params["w"], [2.0, -3.0])
  assert int(new.step) == 0


def test_target_is_what_an_apply_may_change():
  seen = {}

  @dataclasses.dataclass(frozen=True)
  class Look(Plain):
    def apply(self, state, target, grads, next):
      seen["fields"] = target._fields
      seen["collections"] = target.collections
      target = next(target, grads)
      seen["after"] = target.collections
      return target, state

  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.ones(1)},
    tx=optax.sgd(0.5),
    wrappers=[Look()],
    batch_stats={"m": jnp.zeros(1)},
    cache={"c": jnp.zeros(1)},
  )
  new = state.apply_gradients(
    grads={"w": jnp.ones(1)}, batch_stats={"m": jnp.ones(1)}
  )
  assert seen["fields"] == (
    "step",
    "params",
    "opt_state",
    "collections",
    "wrapper_states",
  )
  # Only what this step replaces: the old values, then the new ones.
  assert list(seen["collections"]) == ["batch_stats"]
  assert float(seen["collections"]["batch_stats"]["m"][0]) == 0.0
  assert float(seen["after"]["batch_stats"]["m"][0]) == 1.0
  assert float(new.batch_stats["m"][0]) == 1.0
  assert float(new.cache["c"][0]) == 0.0
