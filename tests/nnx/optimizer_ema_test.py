"""fs.nnx.Optimizer with averages, accumulation and frozen parameters."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs

X = jnp.arange(8.0).reshape(2, 4) / 8


class Model(nnx.Module):
  """A layer to freeze, and another one."""

  def __init__(self, rngs):
    self.encoder = nnx.Linear(4, 3, rngs=rngs)
    self.head = nnx.Linear(3, 2, rngs=rngs)

  def __call__(self, x):
    return self.head(self.encoder(x))


@nnx.jit
def step(model, optimizer, x):
  loss_fn = lambda model, x: (model(x) ** 2).mean()
  _, grads = optimizer.value_and_grad(loss_fn, model, x)
  optimizer.update(model, grads)


def train(tx, wrappers, factors):
  """Returns the module, its optimizer, and the head's bias of each step."""
  model = Model(nnx.Rngs(0))
  optimizer = fs.nnx.Optimizer(model, tx, wrt=nnx.Param, wrappers=wrappers)
  biases = []
  for factor in factors:
    step(model, optimizer, X * factor)
    biases.append(np.asarray(model.head.bias[...]))
  return model, optimizer, biases


@pytest.mark.slow
def test_average_of_the_updates():
  wrappers = [fs.LossScale("dynamic"), fs.Accumulate(2), fs.EMA(0.5)]
  model, optimizer, biases = train(
    optax.sgd(0.1), wrappers, [1.0, jnp.inf, 2.0, 1.0, 1.0]
  )
  # One batch is left out, so updates end with the third and the last batch.
  assert int(optimizer.step[...]) == 2
  average = nnx.clone(model)
  nnx.update(average, optimizer.eval_params(model))
  np.testing.assert_allclose(
    average.head.bias[...], (biases[2] + 2 * biases[4]) / 3, rtol=1e-5
  )
  np.testing.assert_array_equal(model.head.bias[...], biases[4])


@pytest.mark.parametrize("wrappers", [[], [fs.LossScale("dynamic")]])
def test_frozen_layer_does_not_change(wrappers):
  tx = fs.freeze(optax.adamw(0.1), ["^encoder/"])
  model, optimizer, biases = train(tx, wrappers, [1.0, 1.0])
  initial = Model(nnx.Rngs(0))
  for a, b in zip(
    jax.tree.leaves(nnx.state(model.encoder)),
    jax.tree.leaves(nnx.state(initial.encoder)),
    strict=True,
  ):
    np.testing.assert_array_equal(a, b)
  assert (biases[1] != 0).all()
  # Without EMA these are the parameters of the module.
  params = optimizer.eval_params(model)
  np.testing.assert_array_equal(params["head"]["bias"], biases[1])
