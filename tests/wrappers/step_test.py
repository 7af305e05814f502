"""Wrappers around an optimizer without a TrainState: `fs.wrap`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from tree_equality import assert_trees_equal

import flaxshard as fs

WRAPPERS = [fs.LossScale("dynamic"), fs.Accumulate(2), fs.EMA(0.9)]


def loss_fn(params, x):
  return (x @ params["w"].astype(x.dtype)).astype(jnp.float32).sum() ** 2


def batches():
  # The third one overflows in float16, and the first scales are too large.
  for i, factor in enumerate((1, 1, 1e4, 1, 1, 1)):
    rng = np.random.default_rng(i)
    yield jnp.asarray(factor * rng.normal(size=(4, 3)), jnp.float16)


def params():
  return {"w": jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)}


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_steps_equal_those_of_a_train_state(jit):
  opt = fs.wrap(optax.adamw(0.1), WRAPPERS)
  given = params()
  state = opt.init(given)
  other = fs.TrainState.create(
    apply_fn=None, params=params(), tx=optax.adamw(0.1), wrappers=WRAPPERS
  )

  @jit
  def step(params, state, x):
    loss, grads = opt.value_and_grad(loss_fn, params, state, x)
    return *opt.update(grads, state, params), loss

  @jit
  def other_step(state, x):
    return state.minimize(loss_fn, x)

  for x in batches():
    given, state, loss = step(given, state, x)
    other, other_loss = other_step(other, x)
    assert_trees_equal(loss, other_loss)
    assert_trees_equal(given, other.params)
    assert_trees_equal(state.opt_state, other.opt_state)
    assert_trees_equal(state.wrapper_states, other.wrapper_states)
    assert int(state.step) == int(other.step)
  assert int(opt.metrics(state)["skipped_steps"]) == 3
  assert int(state.step) == 1
  assert_trees_equal(opt.eval_params(given, state), other.eval_params)


def test_a_step_may_donate_and_orbax_saves_the_state(tmp_path):
  opt = fs.wrap(optax.sgd(0.1, momentum=0.9), [fs.AGN(2), fs.LossScale(8.0)])
  given = params()
  state = opt.init(given)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, x):
    (loss, aux), grads = opt.value_and_grad(
      lambda p: (loss_fn(p, x), x.sum()), params, state, has_aux=True
    )
    return *opt.update(grads, state, params), loss, aux

  for x in list(batches())[:2]:
    given, state, _, aux = step(given, state, x)
    assert float(aux) == float(x.sum())
  assert int(opt.metrics(state)["commits"]) == 1
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "step", (given, state))
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "step", (given, state))
  assert_trees_equal(restored, (given, state))


def test_update_takes_extra_arguments_and_checks_gradients():
  opt = fs.wrap(optax.contrib.reduce_on_plateau(patience=1))
  given = params()
  state = opt.init(given)
  _, grads = opt.value_and_grad(loss_fn, given, state, next(batches()))
  _, new = opt.update(grads, state, given, value=2.0)
  assert float(new.opt_state.best_value) == 2.0
  with pytest.raises(TypeError, match=r"'valeu' .* Did you mean 'value'"):
    opt.update(grads, state, given, valeu=2.0)
  with pytest.raises(ValueError, match=r"grads must match .* w: shape"):
    opt.update({"w": jnp.ones(3)}, state, given)
  with pytest.raises(ValueError, match="put 'ema' first"):
    fs.wrap(optax.sgd(0.1), [fs.AGN(2), fs.EMA()])
  with pytest.raises(TypeError, match=r"tx .* Call it: sgd\(1e-3\)"):
    fs.wrap(optax.sgd)
