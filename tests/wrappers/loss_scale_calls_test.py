"""Steps that go around a loss scale are told so once, when they are traced."""

import copy
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs

PARAMS = {"w": jnp.ones(3, jnp.float16), "b": jnp.ones(2)}
NOT_SCALED = "nothing has scaled a loss"
NOT_UNSCALED = "were not unscaled"


def create(*wrappers, params=PARAMS, **kwargs):
  return fs.TrainState.create(
    apply_fn=None,
    params=dict(params),
    tx=optax.sgd(0.125),
    wrappers=wrappers or [fs.LossScale("dynamic")],
    **kwargs,
  )


def quadratic(params):
  return sum((p.astype(jnp.float32) ** 2).sum() for p in params.values())


def linear(params):
  return sum(p.astype(jnp.float32).sum() for p in params.values())


def bypass(state, loss_fn=quadratic):
  grads = jax.grad(loss_fn)(state.params)
  return state.apply_gradients(grads=grads)


def scale_only(state):
  loss_fn = lambda params: state.scale_loss(quadratic(params))
  return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))


def scale_and_unscale(state):
  loss_fn = lambda params: state.scale_loss(quadratic(params))
  grads = state.unscale_gradients(jax.grad(loss_fn)(state.params))
  return state.apply_gradients(grads=grads)


def minimize(state):
  return state.minimize(quadratic)[0]


def value_and_grad(state):
  _, grads = state.value_and_grad(quadratic)
  return state.apply_gradients(grads=optax.tree.scale(0.5, grads))


def messages(fn, *args):
  """Returns what `LossScale` warns of in `fn(*args)`."""
  with warnings.catch_warnings(record=True) as record:
    warnings.simplefilter("always")
    fn(*args)
  caught = [w for w in record if "LossScale" in str(w.message)]
  for warning in caught:
    assert warning.filename == __file__  # the user's line, not one of ours
  return [str(warning.message) for warning in caught]


def jit(step, state):
  jitted = jax.jit(step)
  jitted(jitted(state))


def eager(step, state):
  step(step(step(state)))


def lower(step, state):
  jax.jit(step).lower(jax.eval_shape(lambda: state))


def scan(step, state):
  jax.lax.scan(lambda state, x: (step(state), x), state, jnp.ones(3))


def run_steps(step, state):
  fn = lambda state, x: (step(state), x)
  fs.Strategy().run_steps(fn, state, np.ones((2, 8), np.float32))


WAYS = [jit, eager, lower, scan, run_steps]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
  ("step", "message"), [(bypass, NOT_SCALED), (scale_only, NOT_UNSCALED)]
)
def test_step_around_the_scale_is_told_once(way, step, message):
  (said,) = messages(way, step, create())
  assert message in said
  assert "state.value_and_grad(loss_fn)" in said
  assert "state.unscale_gradients" in said


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", [scale_and_unscale, minimize, value_and_grad])
def test_step_through_the_scale_says_nothing(way, step):
  assert messages(way, step, create()) == []


@pytest.mark.parametrize(
  "wrappers",
  [
    (fs.LossScale(8.0),),
    (fs.CrossShard("mean"), fs.LossScale("dynamic")),
    (fs.LossScale("auto"),),  # scales: a parameter is float16
    (fs.LossScale("dynamic"), fs.AGN(2, commit="mean")),
    (fs.AGN(2, commit="mean"), fs.LossScale("dynamic")),
  ],
  ids=["fixed", "cross-shard", "auto", "outside-agn", "inside-agn"],
)
def test_other_wrappers_and_scales(wrappers):
  state = create(*wrappers)
  for step in (minimize, scale_and_unscale):
    assert messages(jit, step, state) == []
  for step, expected in ((bypass, NOT_SCALED), (scale_only, NOT_UNSCALED)):
    (said,) = messages(jit, step, state)
    assert expected in said


@pytest.mark.parametrize("way", [jit, eager])
@pytest.mark.parametrize("step", [bypass, scale_only])
@pytest.mark.parametrize("scale", [1.0, "auto"])
def test_scale_that_changes_nothing_says_nothing(way, step, scale):
  state = create(fs.LossScale(scale), params={"w": jnp.ones(3)})
  assert messages(way, step, state) == []


def test_gradients_that_do_not_depend_on_the_parameters_are_told():
  (said,) = messages(jit, lambda state: bypass(state, linear), create())
  assert NOT_SCALED in said


@pytest.mark.parametrize("scale", ["dynamic", 8.0])
def test_functions_that_are_jitted_apart_say_nothing(scale):
  state = create(fs.LossScale(scale))
  grad_fn = jax.jit(lambda state: state.value_and_grad(quadratic)[1])
  apply = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
  clipped = jax.jit(
    lambda state, grads: state.apply_gradients(
      grads=jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads)
    )
  )

  def take_steps(state):
    # An ahead-of-time compilation, too.
    apply.lower(state, grad_fn.lower(state).out_info)
    state = apply(state, grad_fn(state))
    state = clipped(state, grad_fn(state))
    state = state.apply_gradients(grads=grad_fn(state))
    return jax.jit(lambda s: s.apply_gradients(grads=grad_fn(s)))(state)

  assert messages(take_steps, state) == []


def test_gradients_made_by_hand_are_told_in_a_trace_alone():
  apply = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
  grads = {"w": np.ones(3, np.float32), "b": jnp.ones(2)}
  assert messages(lambda: create().apply_gradients(grads=grads)) == []
  (said,) = messages(apply, create(), grads)
  assert NOT_SCALED in said


def test_unscaling_in_a_function_jitted_apart_says_nothing():
  unscale = jax.jit(lambda state, grads: state.unscale_gradients(grads))

  def step(state):
    loss_fn = lambda params: state.scale_loss(quadratic(params))
    grads = unscale(state, jax.grad(loss_fn)(state.params))
    return state.apply_gradients(grads=grads)

  assert messages(jit, step, create()) == []


@pytest.mark.slow
def test_records_hold_no_tracer():
  with jax.check_tracer_leaks():
    jax.jit(minimize)(create())
    jax.jit(lambda state: state.scale_loss(1.0))(create())


def test_records_are_no_part_of_the_wrapper():
  wrapper = fs.LossScale("dynamic")
  messages(jit, scale_only, create(wrapper))
  wrapper.scale_loss(create().wrapper_states["loss_scale"], jnp.ones(()))
  assert wrapper == fs.LossScale("dynamic")
  assert hash(wrapper) == hash(fs.LossScale("dynamic"))
  assert repr(wrapper) == repr(fs.LossScale("dynamic"))
  assert pickle.loads(pickle.dumps(wrapper)) == wrapper
  assert copy.deepcopy(wrapper) == wrapper


@pytest.mark.parametrize("way", [jit, eager])
def test_auto_without_a_scale_tells_of_a_loss_in_float16(way):
  def half(params):
    return (params["w"].astype(jnp.float16) ** 2).astype(jnp.float32).sum()

  def step(state):
    return state.minimize(half)[0]

  params = {"w": jnp.ones(3)}
  (said,) = messages(way, step, create(fs.LossScale("auto"), params=params))
  assert "float16" in said and "LossScale('dynamic')" in said
  assert not messages(
    way, minimize, create(fs.LossScale("auto"), params=params)
  )
