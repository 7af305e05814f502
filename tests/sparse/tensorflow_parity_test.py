"""Updates and gradients of rows equal TensorFlow's.

tests/testdata/make_sparse_optimizers.py made the figures with TensorFlow.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxshard.core import tf_optimizers

FIGURES = json.loads(
  (
    pathlib.Path(__file__).parents[1] / "testdata/sparse_optimizers.json"
  ).read_text()
)
TABLE = np.array(FIGURES["table"], np.float32)
RATES = FIGURES["learning_rates"]
BETA2 = 0.999


def rate(count):
  return jnp.array(RATES)[count]


def tf_epsilon(epsilon):
  """Epsilon of optax.adam that is TensorFlow's, which divides later by it."""
  return lambda count: epsilon / jnp.sqrt(1 - BETA2 ** (count + 1))


def adam(epsilon):
  return optax.inject_hyperparams(optax.adam)(rate, eps=tf_epsilon(epsilon))


def l1_l2(function, **arguments):
  return function(
    rate,
    l1_regularization_strength=0.3,
    l2_regularization_strength=0.2,
    **arguments,
  )


def keras_momentum(nesterov=False):
  return optax.chain(
    optax.scale_by_learning_rate(rate), optax.trace(0.9, nesterov)
  )


# The name in the figures, and the optax optimizer that equals it.
TRAIN = {
  "GradientDescent": lambda: optax.sgd(rate),
  "Momentum": lambda: optax.sgd(rate, 0.9),
  "Momentum nesterov": lambda: optax.sgd(rate, 0.9, nesterov=True),
  "Adagrad": lambda: optax.adagrad(rate, eps=0),
  "AdagradDA": lambda: tf_optimizers.adagrad_da(rate),
  "AdagradDA l1 l2": lambda: tf_optimizers.adagrad_da(rate, 0.2, 0.05, 0.03),
  "Adadelta": lambda: optax.adadelta(rate, rho=0.95, eps=1e-8),
  "RMSProp": lambda: optax.rmsprop(rate, 0.9, 1e-10, 1.0),
  "RMSProp momentum": lambda: optax.rmsprop(rate, 0.9, 0.01, 1.0, momentum=0.8),
  "RMSProp centered": lambda: optax.rmsprop(
    rate, 0.9, 1e-10, 1.0, centered=True, momentum=0.8
  ),
  "Ftrl": lambda: tf_optimizers.ftrl(rate),
  "Ftrl l1 l2": lambda: l1_l2(
    tf_optimizers.ftrl, initial_accumulator_value=0.5
  ),
  "Ftrl power beta shrinkage": lambda: tf_optimizers.ftrl(
    rate,
    learning_rate_power=-0.7,
    l1_regularization_strength=0.1,
    l2_shrinkage_regularization_strength=0.05,
    beta=0.4,
  ),
  "ProximalGradientDescent": lambda: l1_l2(
    tf_optimizers.proximal_gradient_descent
  ),
  "ProximalAdagrad": lambda: tf_optimizers.proximal_adagrad(rate),
  "ProximalAdagrad l1 l2": lambda: l1_l2(tf_optimizers.proximal_adagrad),
  "Adam": lambda: adam(1e-8),
  "Adam large epsilon": lambda: adam(0.05),
}
LEGACY = {
  "SGD momentum": lambda: keras_momentum(),
  "SGD nesterov": lambda: keras_momentum(nesterov=True),
  "Adagrad": lambda: optax.adagrad(rate, eps=0),
  "Adadelta": lambda: optax.adadelta(rate, rho=0.95, eps=1e-7),
  "RMSprop": lambda: optax.rmsprop(rate, 0.9, 1e-7, eps_in_sqrt=False),
  "RMSprop momentum": lambda: optax.rmsprop(rate, 0.9, 1e-7, momentum=0.8),
  "RMSprop centered": lambda: optax.rmsprop(
    rate, 0.9, 1e-7, centered=True, momentum=0.8
  ),
  "Ftrl": lambda: tf_optimizers.ftrl(
    rate, l1_regularization_strength=0.1, beta=0.4
  ),
  "Adam": lambda: adam(1e-7),
  "Adamax": lambda: optax.adamax(rate, eps=1e-7),
}
KERAS = {
  "SGD": lambda: optax.sgd(rate),
  "SGD momentum": lambda: keras_momentum(),
  "Adagrad": lambda: optax.adagrad(rate, eps=1e-7),
  "Adadelta": lambda: optax.adadelta(rate, rho=0.95, eps=1e-7),
  "RMSprop": lambda: optax.rmsprop(rate, 0.9, 1e-7),
  "Ftrl": lambda: tf_optimizers.ftrl(rate, beta=0.4),
  "Adam": lambda: adam(1e-7),
  "Adamax": lambda: optax.adamax(rate, eps=1e-7),
}
COUNTERPARTS = {
  "tf.compat.v1.train": TRAIN,
  "tf.keras.optimizers.legacy": LEGACY,
  "keras.optimizers": KERAS,
}
CASES = [(api, name) for api, cases in COUNTERPARTS.items() for name in cases]


def test_dense():

  for api, name in CASES:
    tx = COUNTERPARTS[api][name]()
    params = {"t": jnp.array(TABLE)}
    state = tx.init(params)
    figs = FIGURES[api][name]["dense"]
    err = {}
    upd = jax.jit(tx.update)
    for i in range(len(RATES)):
      g = np.zeros_like(TABLE)
      np.add.at(
        g, FIGURES["ids"][i], np.array(FIGURES["values"][i], np.float32)
      )
      u, state = upd({"t": jnp.array(g)}, state, params)
      params = optax.apply_updates(params, u)
      err.setdefault("table", []).append(
        np.abs(params["t"] - np.array(figs["table"][i])).max()
      )
      leaves = [
        (jax.tree_util.keystr(p), x)
        for p, x in jax.tree_util.tree_leaves_with_path(state)
        if x.shape == TABLE.shape
      ]
      for slot in figs:
        if slot != "table":
          e = [
            (np.abs(sgn * x - np.array(figs[slot][i])).max(), k, sgn)
            for k, x in leaves
            for sgn in (1, -1)
          ]
          err.setdefault(slot, []).append(min(e)) if e else None
    print(
      api,
      name,
      {k: (max(v) if k == "table" else max(v)) for k, v in err.items()},
    )
