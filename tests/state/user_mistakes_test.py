"""Mistakes in the use of a TrainState: the message names what to write."""

import warnings

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quadratic_states import create
from quadratic_states import make_params
from quadratic_states import quadratic

import flaxshard as fs

KEY = jax.random.key(0)
DYNAMIC = fs.LossScale("dynamic")
STATS = {"mean": jnp.zeros(2)}


def message_of(error, fn, *args, **kwargs):
  """Returns the message of the error that `fn` raises, which is short."""
  with pytest.raises(error) as caught:
    fn(*args, **kwargs)
  message = str(caught.value)
  assert len(message) < 400
  assert "\n" not in message
  return message


# The optimizer.


@pytest.mark.parametrize(
  ("tx", "expected"),
  [
    (optax.adam, ("adam", "adam(1e-3)")),
    (
      nnx.Optimizer(
        nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param
      ),
      ("Optimizer", "nnx.Optimizer was made with"),
    ),
    ("adam", ("'adam'",)),
    (np.ones((64, 64)), ("float64[64,64]",)),
  ],
  ids=["not called", "nnx.Optimizer", "name", "array"],
)
def test_tx_that_is_no_optimizer(tx, expected):
  kwargs = dict(apply_fn=None, params=make_params(), tx=tx)
  message = message_of(TypeError, fs.TrainState.create, **kwargs)
  assert all(part in message for part in ("tx must be", *expected))


# Gradients.


def test_gradients_by_position():
  for args, kwargs in ((({"w": 1.0},), {}), ((), {})):
    message = message_of(TypeError, create().apply_gradients, *args, **kwargs)
    assert "apply_gradients(grads=grads)" in message


def test_loss_and_gradients_as_gradients():
  message = message_of(
    ValueError, create().apply_gradients, grads=(1.0, make_params())
  )
  assert "value_and_grad returns (loss, grads)" in message


@pytest.mark.parametrize("wrappers", [(), (DYNAMIC,), (fs.AGN(2),)])
@pytest.mark.parametrize(
  "grads",
  [
    {"w": None, "b": {"c": None}},
    {"w": np.zeros(2, jax.dtypes.float0), "b": {"c": np.int32(0)}},
  ],
)
def test_no_gradient_for_any_parameter(wrappers, grads):
  state = create(wrappers)
  message = message_of(ValueError, state.apply_gradients, grads=grads)
  assert "No gradients provided for any parameter" in message
  assert "b/c" in message and "w" in message


@pytest.mark.parametrize("wrappers", [(), (DYNAMIC,)])
@pytest.mark.parametrize(
  ("name", "expected"),
  [
    ("batch_stat", ("batch_stats", "Did you mean 'batch_stats'?")),
    ("learning_rate", ("batch_stats", "value_fn")),
    ("step", ("batch_stats",)),
  ],
)
def test_name_that_is_no_field(wrappers, name, expected):
  state = create(wrappers, batch_stats=STATS)
  replaced = {"grads": make_params(), name: 1}
  message = message_of(TypeError, state.apply_gradients, **replaced)
  assert all(part in message for part in (repr(name), *expected))


@pytest.mark.parametrize("wrappers", [(), (DYNAMIC,)])
def test_optimizer_that_needs_the_loss(wrappers):
  state = create(wrappers, tx=optax.chain(optax.clip(1.0), optax.polyak_sgd()))
  message = message_of(TypeError, state.apply_gradients, grads=make_params())
  assert "needs value " in message and "value=..." in message
  assert "state.minimize(loss_fn)" in message


# The loss.


@pytest.mark.parametrize("wrappers", [(), (DYNAMIC,)])
@pytest.mark.parametrize(
  ("make_value", "has_aux", "expected"),
  [
    (lambda loss: (loss, {}), False, ("a tuple of 2", "has_aux=True")),
    (lambda loss: loss, True, ("(loss, aux)", "float32 of shape ()")),
    (lambda loss: (loss, 1, 2), True, ("(loss, aux)", "a tuple of 3")),
    (lambda loss: loss * jnp.ones(2), False, ("float32 of shape (2,)",)),
    (lambda loss: 3, False, ("int32 of shape ()",)),
  ],
  ids=["forgotten", "no pair", "triple", "vector", "integer"],
)
def test_loss_that_is_no_scalar_or_forgotten_has_aux(
  wrappers, make_value, has_aux, expected
):
  state = create(wrappers)
  loss_fn = lambda params: make_value(quadratic(params))
  for method in (state.value_and_grad, state.minimize):
    message = message_of(TypeError, method, loss_fn, has_aux=has_aux)
    assert all(part in message for part in ("loss_fn", *expected))
    assert "Tracer" not in message


# Parameters, wrappers.


def test_params_that_are_a_single_array():
  message = message_of(TypeError, create, params=jnp.ones((128, 128)))
  assert "params must be a tree" in message and "float32[128,128]" in message


def test_replaced_wrappers_without_states():
  state = create([DYNAMIC])
  message = message_of(ValueError, state.replace, wrappers=[fs.AGN(2)])
  assert "['agn']" in message and "['loss_scale']" in message
  assert "TrainState.create(" in message
  message_of(ValueError, create(batch_stats=STATS).replace, wrappers=[DYNAMIC])


def test_replaced_wrappers_of_the_same_names():
  fixed = fs.LossScale(8.0)
  state = create([DYNAMIC]).replace(wrappers=(fixed,))
  assert float(state.scale_loss(jnp.float32(2))) == 16
  # A list would be no static field: jit could not hash it.
  assert create([DYNAMIC]).replace(wrappers=[fixed]).wrappers == (fixed,)
  assert create([DYNAMIC]).replace(step=3).step == 3


# Batch statistics after the update.


def late(state):
  grads = jax.grad(quadratic)(state.params)
  new = state.apply_gradients(grads=state.unscale_gradients(grads))
  return new.replace(batch_stats={"mean": state.batch_stats["mean"] + 1})


def in_time(state):
  _, grads = state.value_and_grad(quadratic)
  batch_stats = {"mean": state.batch_stats["mean"] + 1}
  new = state.apply_gradients(grads=grads, batch_stats=batch_stats)
  return new.replace(batch_stats=batch_stats)


def said(step, state, *, eager):
  with warnings.catch_warnings(record=True) as record:
    warnings.simplefilter("always")
    for _ in range(3):
      state = (step if eager else jax.jit(step))(state)
  return [w for w in record if "batch_stats" in str(w.message)]


@pytest.mark.parametrize("eager", [True, False])
def test_batch_stats_replaced_after_the_update_are_told_once(eager):
  wrapper = fs.LossScale("dynamic")
  (warning,) = said(late, create([wrapper], batch_stats=STATS), eager=eager)
  message = str(warning.message)
  assert "apply_gradients(grads=grads, batch_stats=...)" in message
  assert warning.filename == __file__


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
  ("step", "wrappers"),
  [
    (in_time, [fs.LossScale("dynamic")]),
    (late, [fs.LossScale(8.0)]),  # never skips
    (late, [fs.LossScale("auto")]),
    (late, []),
  ],
)
def test_other_replaced_batch_stats_say_nothing(step, wrappers, eager):
  assert not said(step, create(wrappers, batch_stats=STATS), eager=eager)


def test_batch_stats_replaced_between_steps_say_nothing():
  state = jax.jit(in_time)(create([fs.LossScale("dynamic")], batch_stats=STATS))
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    state.replace(batch_stats=STATS)


# The model and its input.


class NeedsTrain(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    return nn.Dropout(0.5, deterministic=not train)(nn.Dense(2)(x))


class NeedsTrainByName(nn.Module):
  @nn.compact
  def __call__(self, x, *, train):
    return nn.Dense(2)(x)


def create_state(model, rng, sample_input):
  return fs.create_train_state(model, rng, sample_input, optax.sgd(0.1))


@pytest.mark.parametrize("model", [NeedsTrain(), NeedsTrainByName()])
def test_required_train_argument(model):
  x = jnp.ones((1, 3))
  message = message_of(TypeError, create_state, model, KEY, x)
  assert "create_train_state(..., train=False)" in message
  assert fs.create_train_state(model, KEY, x, optax.sgd(0.1), train=False)


def test_batch_as_sample_input():
  batch = {"image": jnp.ones((8, 3)), "label": jnp.zeros(8, jnp.int32)}
  message = message_of(TypeError, create_state, nn.Dense(2), KEY, batch)
  assert "batch['image']" in message and "'label'" in message


def test_exchanged_arguments_do_not_print_the_array():
  x = jnp.ones((64, 64))
  message = message_of(TypeError, create_state, nn.Dense(2), x, KEY)
  assert "rng must be a PRNG key" in message and "float32[64,64]" in message
  message = message_of(TypeError, create_state, x, KEY, nn.Dense(2))
  assert "model must be" in message and "float32[64,64]" in message


def test_nnx_module_itself_is_not_trained():
  # Documented: the state has the trained parameters.
  module, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 3))
  first = module(x)
  state = create_state(module, None, None)
  loss_fn = lambda params: state.apply_fn({"params": params}, x).sum()
  state, _ = state.minimize(loss_fn)
  assert (module(x) == first).all()
  assert (state.apply_fn({"params": state.params}, x) != first).all()


def test_batch_stats_that_are_not_handed_on_stay():
  # As in Flax, and documented: nothing shows that a step has dropped them.
  state = create([DYNAMIC], batch_stats=STATS)
  new, _ = state.minimize(quadratic)
  assert new.batch_stats["mean"].tolist() == STATS["mean"].tolist()
