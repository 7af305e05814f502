"""A step through a stack of wrappers, in a TrainState and without one."""

import dataclasses
import functools

from compilations import count
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import quadratic_states
from tree_equality import assert_trees_equal

import flaxshard as fs


@dataclasses.dataclass(frozen=True)
class SignGradients(fs.wrappers.Base):
  def apply(self, state, target, grads, next):
    return next(target, jax.tree.map(jnp.sign, grads)), state


@dataclasses.dataclass(frozen=True)
class Affine(fs.wrappers.Base):
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


create = functools.partial(
  quadratic_states.create, params={"w": np.array([2.0, -3.0], np.float32)}
)
AGN = fs.AGN(2, commit="mean")
step = jax.jit(lambda state, g: state.apply_gradients(grads={"w": g}))


def test_the_innermost_wrapper_scales_first_and_unscales_last():
  state = create([Affine(factor=2.0), OtherAffine(shift=3.0)])
  assert float(state.scale_loss(jnp.float32(1.0))) == (1 + 3) * 2
  grads = state.unscale_gradients({"w": jnp.array([8.0])})
  assert float(grads["w"][0]) == 8 / 2 - 3
  # w = [2, -3] becomes (w + 3) * 2 = [10, 0], where the gradient is [20, 0].
  loss, grads = state.value_and_grad(lambda p: (p["w"] ** 2).sum())
  assert float(loss) == 100.0
  # To unscale it subtracts the shift.
  np.testing.assert_array_equal(grads["w"], [20.0 - 3.0, -3.0])


def test_the_outermost_wrapper_sees_gradients_first():
  # An infinity has a sign: only a check before the sign sees it.
  bad = jnp.array([jnp.inf, -1.0])
  skipped = step(create([fs.LossScale("dynamic"), SignGradients()]), bad)
  np.testing.assert_array_equal(skipped.params["w"], [2.0, -3.0])
  assert int(skipped.step) == 0
  applied = step(create([SignGradients(), fs.LossScale("dynamic")]), bad)
  np.testing.assert_array_equal(applied.params["w"], [1.5, -2.5])
  assert int(applied.step) == 1


# Outside of a trace.


@pytest.mark.parametrize(
  ("wrappers", "params"),
  [
    ([fs.LossScale("dynamic")], {"w": np.full((128, 128), 0.5, "f")}),
    (
      [fs.LossScale("dynamic"), AGN],
      {"w": np.array([[1.0, -2.0], [0.5, 0.25]], "f"), "b": np.ones(2, "f")},
    ),
  ],
)
def test_eager_steps_do_not_compile_again(wrappers, params):
  loss_fn = lambda params: sum((p**2).sum() for p in params.values())
  eager = lambda state: state.minimize(loss_fn)[0]
  state = create(wrappers, optax.sgd(0.125), params=params)
  wanted, jitted = jax.tree.map(jnp.copy, state), jax.jit(eager)
  for _ in range(4):  # an AGN commit is every second step
    state = eager(state)
  with count() as compiled:
    for _ in range(4):
      state = eager(state)
  assert compiled.total == 0
  for _ in range(8):
    wanted = jitted(wanted)
  # Powers of two: eager and fused arithmetic round alike.
  assert_trees_equal(state, wanted)


# Without a TrainState.


STRATEGY = fs.Strategy()


def loss_fn(params, x):
  return (x @ params["w"].astype(x.dtype)).astype(jnp.float32).sum() ** 2


def batches():
  # The third one overflows in float16, and the first scales are too large.
  for i, factor in enumerate((1, 1, 1e4, 1, 1, 1)):
    rng = np.random.default_rng(i)
    yield jnp.asarray(factor * rng.normal(size=(4, 3)), jnp.float16)


def make_params():
  return {"w": jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)}


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_wrap_equals_a_train_state(jit):
  wrappers = [fs.LossScale("dynamic"), fs.Accumulate(2), fs.EMA(0.9)]
  tx = optax.adamw(0.1)
  opt, params = fs.wrap(tx, wrappers), make_params()
  state = opt.init(params)
  other = quadratic_states.create(wrappers, tx, make_params())

  @jit
  def step(params, state, x):
    loss, grads = opt.value_and_grad(loss_fn, params, state, x)
    return *opt.update(grads, state, params), loss

  other_step = jit(lambda state, x: state.minimize(loss_fn, x))
  for x in batches():
    params, state, loss = step(params, state, x)
    other, other_loss = other_step(other, x)
    assert_trees_equal((loss, params), (other_loss, other.params))
    for name in ("step", "opt_state", "wrapper_states"):
      assert_trees_equal(getattr(state, name), getattr(other, name))
  assert int(opt.metrics(state)["skipped_steps"]) == 3
  assert int(state.step) == 1
  assert_trees_equal(opt.eval_params(params, state), other.eval_params)


@pytest.mark.parametrize(
  "wrappers",
  [[fs.EMA(0.5), AGN], [fs.Accumulate(2, per_replica=True)]],
)
def test_wrap_in_run_equals_a_train_state(wrappers):
  tx = optax.sgd(0.125, momentum=0.5)
  opt, params = fs.wrap(tx, wrappers), make_params()
  state, run = opt.init(params), STRATEGY.run
  other = quadratic_states.create(wrappers, tx, params, strategy=STRATEGY)

  def step(params, state, x):
    grads = opt.value_and_grad(loss_fn, params, state, x)[1]
    return opt.update(grads, state, params)

  with jax.numpy_dtype_promotion("strict"):
    for x in np.random.default_rng(0).normal(size=(3, 8, 3)):
      x = STRATEGY.shard_batch(np.float32(x))
      params, state = run(step, (params, state, x))
      other = run(lambda state, x: state.minimize(loss_fn, x)[0], (other, x))
  assert_trees_equal(STRATEGY.local_results(params)[5], other.params)
  states = jax.tree.map(
    np.squeeze, (state.wrapper_states, other.wrapper_states)
  )
  for ours, wanted in zip(*map(jax.tree.leaves, states), strict=True):
    np.testing.assert_array_equal(*np.broadcast_arrays(ours, wanted))


def test_a_step_may_donate_and_orbax_saves_the_state(tmp_path):
  opt = fs.wrap(optax.sgd(0.1, momentum=0.9), [fs.AGN(2), fs.LossScale(8.0)])
  params = make_params()
  state = opt.init(params)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, x):
    (loss, aux), grads = opt.value_and_grad(
      lambda p: (loss_fn(p, x), x.sum()), params, state, has_aux=True
    )
    return *opt.update(grads, state, params), loss, aux

  for x in list(batches())[:2]:
    params, state, _, aux = step(params, state, x)
    assert float(aux) == float(x.sum())
  assert int(opt.metrics(state)["commits"]) == 1
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "step", (params, state))
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "step", (params, state))
  assert_trees_equal(restored, (params, state))


def test_update_takes_numbers_and_extra_arguments():
  opt = fs.wrap(optax.contrib.reduce_on_plateau(patience=1), [fs.EMA(0.5)])
  _, new = opt.update({"w": 2.0}, opt.init({"w": 2.0}), {"w": 2.0}, value=2.0)
  assert float(new.opt_state.best_value) == 2.0
  assert float(opt.eval_params({"w": 2.0}, new)["w"]) == 4.0
