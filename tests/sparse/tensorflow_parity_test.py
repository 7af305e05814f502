"""Updates and gradients of rows equal TensorFlow's.

tests/testdata/make_tensorflow_figures.py made the figures with TensorFlow.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs

FIGURES = json.loads(
  (
    pathlib.Path(__file__).parents[1] / "testdata/sparse_optimizers.json"
  ).read_text()
)
TABLE = np.array(FIGURES["table"], np.float32)
RATES = FIGURES["learning_rates"]


def rate(count):
  return jnp.array(RATES)[count]


def adam(epsilon, b1=0.9, b2=0.999):
  """Adam of TensorFlow, which adds epsilon before the bias correction."""
  eps = lambda count: epsilon / jnp.sqrt(1 - b2 ** (count + 1))
  return optax.inject_hyperparams(optax.adam)(rate, b1, b2, eps=eps)


def l1_l2(function, **arguments):
  return function(
    rate,
    l1_regularization_strength=0.3,
    l2_regularization_strength=0.2,
    **arguments,
  )


def keras_momentum(nesterov=False, learning_rate=rate):
  return optax.chain(
    optax.scale_by_learning_rate(learning_rate), optax.trace(0.9, nesterov)
  )


# The name in the figures, and the optax optimizer that equals it.
TRAIN = {
  "GradientDescent": optax.sgd(rate),
  "Momentum": optax.sgd(rate, 0.9),
  "Momentum nesterov": optax.sgd(rate, 0.9, nesterov=True),
  "Adagrad": optax.adagrad(rate, eps=0),
  "AdagradDA": fs.optimizers.adagrad_da(rate),
  "AdagradDA l1 l2": fs.optimizers.adagrad_da(rate, 0.2, 0.05, 0.03),
  "Adadelta": optax.adadelta(rate, rho=0.95, eps=1e-8),
  "RMSProp": optax.rmsprop(rate, 0.9, 1e-10, 1.0, momentum=0.0),
  "RMSProp momentum": optax.rmsprop(rate, 0.9, 0.01, 1.0, momentum=0.8),
  "RMSProp centered": optax.rmsprop(
    rate, 0.9, 1e-10, 1.0, centered=True, momentum=0.8
  ),
  "Ftrl": fs.optimizers.ftrl(rate),
  "Ftrl l1 l2": l1_l2(fs.optimizers.ftrl, initial_accumulator_value=0.5),
  "Ftrl power beta shrinkage": fs.optimizers.ftrl(
    rate,
    learning_rate_power=-0.7,
    l1_regularization_strength=0.1,
    l2_shrinkage_regularization_strength=0.05,
    beta=0.4,
  ),
  "ProximalGradientDescent": l1_l2(fs.optimizers.proximal_gradient_descent),
  "ProximalAdagrad": fs.optimizers.proximal_adagrad(rate),
  "ProximalAdagrad l1 l2": l1_l2(fs.optimizers.proximal_adagrad),
  "Adam": adam(1e-8),
  "Adam large epsilon": adam(0.05),
}
LEGACY = {
  "SGD momentum": keras_momentum(),
  "SGD nesterov": keras_momentum(nesterov=True),
  "Adagrad": optax.adagrad(rate, eps=1e-7),
  "Adadelta": optax.adadelta(rate, rho=0.95, eps=1e-7),
  "RMSprop momentum": optax.rmsprop(rate, 0.9, 1e-7, momentum=0.8),
  "RMSprop centered": optax.rmsprop(
    rate, 0.9, 1e-7, centered=True, momentum=0.8
  ),
  "Ftrl": fs.optimizers.ftrl(rate, l1_regularization_strength=0.1, beta=0.4),
  "Adam": adam(1e-7),
  "Adamax": optax.adamax(rate, eps=1e-7),
}
KERAS = "tf.keras.optimizers.legacy"
COUNTERPARTS = {"tf.compat.v1.train": TRAIN, KERAS: LEGACY}
# Slots that have other names in Keras than in tf.train.
KERAS_SLOTS = {
  "Adadelta": {
    "accum_grad": "accum",
    "accum_var": "accum_update",
    "accumulated_grad": "accum",
    "accumulated_delta_var": "accum_update",
  },
  "RMSprop": {"velocity": "rms"},
  "Ftrl": {"accumulator": "accum"},
  "Adam": {"momentum": "m", "velocity": "v"},
  "Adamax": {"momentum": "m", "norm": "v"},
}
# What Keras 2 does where it is not "tf": its RMSprop decays all rows, but moves
# those of the gradient alone. Keras 3 updates all rows.
SEMANTICS = {(KERAS, "Adamax"): "lazy"}
# They differ from another one in constants alone.
SLOW = (
  "SGD momentum|Momentum|AdagradDA|RMSProp|RMSProp momentum|RMSprop momentum|"
  "RMSprop centered|Ftrl|Ftrl power beta shrinkage|ProximalAdagrad|"
  "Adam large epsilon"
).split("|")


def create(tx, semantics="tf", params=None, **arguments):
  return fs.TrainState.create(
    apply_fn=None,
    params=params or {"table": TABLE},
    tx=tx,
    sparse=["table"],
    sparse_semantics=semantics,
    **arguments,
  )


def gradient(step):
  return fs.IndexedSlices(
    FIGURES["ids"][step],
    np.array(FIGURES["values"][step], np.float32),
    TABLE.shape,
  )


def slot(state, optimizer, name):
  """Returns a slot by TensorFlow's name, with TensorFlow's sign."""
  renamed = KERAS_SLOTS.get(optimizer.split()[0], {}).get(name, name)
  value = state.get_slot("table", renamed)
  # optax scales by the negative learning rate before the momentum.
  is_negative = optimizer.startswith("RMS") and name == "momentum"
  return -np.asarray(value) if is_negative else value


SLOW_ONES = pytest.param(True, marks=pytest.mark.slow)


@pytest.mark.parametrize("is_slow", [False, SLOW_ONES])
def test_rows(is_slow):
  """Parameters and slots after each step of all optimizers."""
  states = {
    (api, name): create(tx, SEMANTICS.get((api, name), "tf"))
    for api, optimizers in COUNTERPARTS.items()
    for name, tx in optimizers.items()
    if (name in SLOW) == is_slow
  }

  @jax.jit
  def update(states, grads):
    return [state.apply_gradients(grads=grads) for state in states]

  for step in range(len(RATES)):
    new = update([*states.values()], {"table": gradient(step)})
    states = dict(zip(states, new, strict=True))
    for (api, name), state in states.items():
      for slot_name, wanted in FIGURES[api][name]["sparse"].items():
        is_table, where = slot_name == "table", f"{name}: {slot_name}, {step}"
        found = (
          state.params["table"] if is_table else slot(state, name, slot_name)
        )
        figure = np.array(wanted[step], np.float32)
        np.testing.assert_allclose(found, figure, 1e-6, 1e-6, err_msg=where)


def test_clip_by_global_norm_takes_the_norm_of_summed_rows():
  facts = FIGURES["indexed_slices"]
  values, bias = np.array(facts["values"]), np.array(facts["bias"])
  slices = fs.IndexedSlices(facts["ids"], values, TABLE.shape)
  grads = {"table": slices, "bias": bias.astype(np.float32)}
  norm = facts["dense_global_norm"]
  np.testing.assert_allclose(
    jax.jit(fs.sparse.global_norm)(grads), norm, rtol=1e-6
  )
  # TensorFlow takes the norm of the rows before those of one number are summed.
  assert facts["global_norm"] != pytest.approx(norm)
  state = create(
    optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0)),
    params={"table": np.zeros_like(TABLE), "bias": np.zeros(2, "f")},
  )
  apply = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
  params = apply(state, grads).params
  factor = -0.5 / norm
  np.testing.assert_allclose(
    params["table"], factor * np.array(facts["dense"]), rtol=1e-6
  )
  np.testing.assert_allclose(params["bias"], factor * bias, rtol=1e-6)


LOOKUP_IDS = np.array([[1, 4], [1, 0]], np.int32)


def gather(t):
  return jnp.sum(jnp.tanh(t[LOOKUP_IDS] @ jnp.array([[0.5], [-1.5]])))


def embedding_lookup(t):
  return jnp.mean(jnp.square(jnp.take(t, LOOKUP_IDS.reshape(-1), axis=0)))


def two_lookups(t):
  first, second = t[jnp.array([2, 2, 5])], t[jnp.array([0, 2, 1])]
  return jnp.sum(first * first * second)


def lookup_and_sum(t):
  return gather(t) + jnp.sum(t * t)


def test_gradients_of_lookups():
  """They are TensorFlow's rows; dense if the table is also used whole."""
  state = create(TRAIN["GradientDescent"])
  losses = (gather, embedding_lookup, two_lookups, lookup_and_sum)

  @jax.jit
  def values_and_grads(state):
    return [
      state.value_and_grad(lambda params, f=f: f(params["table"]))
      for f in losses
    ]

  with pytest.warns(UserWarning, match="table"):
    results = values_and_grads(state)
  for loss_fn, (loss, grads) in zip(losses, results, strict=True):
    figures, grad = FIGURES["lookups"][loss_fn.__name__], grads["table"]
    np.testing.assert_allclose(loss, figures["loss"], rtol=1e-6)
    assert fs.is_indexed_slices(grad) == ("ids" in figures)
    if "ids" in figures:
      assert grad.indices.tolist() == figures["ids"], loss_fn
      grad = jax.jit(fs.sparse.to_dense)(grad)
    np.testing.assert_allclose(grad, figures["dense"], rtol=1e-6, atol=1e-6)


def test_dynamic_loss_scale():
  """A row overflows in the third of five steps."""
  figures = FIGURES["loss_scale"]
  scale = fs.DynamicLossScale(initial_scale=16.0, growth_interval=2)
  state = create(
    keras_momentum(learning_rate=0.1), wrappers=[fs.LossScale(scale)]
  )

  @jax.jit
  def train_step(state, ids, values):
    # The gradient of the looked-up rows is `values`.
    return state.minimize(lambda p: jnp.sum(p["table"][ids] * values))[0]

  for step, ids in enumerate(FIGURES["ids"]):
    values = np.array(FIGURES["values"][step], np.float32)
    if step == 2:
      values[1, 0] = np.inf
    state = train_step(state, jnp.array(ids), values)
    for name, value in (
      ("table", state.params["table"]),
      ("momentum", slot(state, "SGD", "momentum")),
      ("scale", state.wrapper_states["loss_scale"].scale),
    ):
      wanted = np.array(figures[name][step], np.float32)
      np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-6)
  assert state.step == 4
