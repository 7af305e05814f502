"""The precision in which a model computes, and the scale of its loss."""

import warnings

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import flaxshard as fs

X = jnp.ones((8, 3))


class InnerFloat16(nn.Module):
  """No `dtype` and no `policy` of its own."""

  dtype_of_layer: object = jnp.float16

  @nn.compact
  def __call__(self, x):
    return nn.Dense(2, dtype=self.dtype_of_layer)(x).astype(jnp.float32)


class InnerNNX(nnx.Module):
  def __init__(self, rngs):
    self.hidden = nnx.Linear(3, 2, dtype=jnp.float16, rngs=rngs)

  def __call__(self, x):
    return self.hidden(x).astype(jnp.float32)


def create(model, *wrappers, sample_input=X, **kwargs):
  """Returns the state, and what is said when it is created."""
  with warnings.catch_warnings(record=True) as record:
    warnings.simplefilter("always")
    state = fs.create_train_state(
      model,
      jax.random.key(0),
      sample_input,
      optax.sgd(0.1),
      wrappers=wrappers,
      **kwargs,
    )
  said = [w for w in record if w.category is UserWarning]
  assert all(w.filename == __file__ for w in said)
  return state, [str(w.message) for w in said]


MODELS = {
  "linen": (lambda: InnerFloat16(), X),
  "shapes": (lambda: InnerFloat16(), jax.ShapeDtypeStruct(X.shape, X.dtype)),
  "nnx": (lambda: InnerNNX(nnx.Rngs(0)), None),
  "nnx function": (lambda: lambda rngs: InnerNNX(rngs), None),
}


@pytest.mark.parametrize("strategy", [None, fs.Strategy()], ids=["", "mesh"])
@pytest.mark.parametrize("make, x", MODELS.values(), ids=MODELS)
def test_float16_in_inner_layers(make, x, strategy):
  auto = fs.LossScale("auto")
  state, said = create(make(), auto, sample_input=x, strategy=strategy)
  assert "loss_scale" in state.metrics()
  assert said == []
  (said,) = create(make(), sample_input=x, strategy=strategy)[1]
  assert "computes in float16" in said and "LossScale('dynamic')" in said


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_other_precisions_need_no_scale(dtype):
  state, said = create(InnerFloat16(dtype), fs.LossScale("auto"))
  assert state.metrics() == {} and said == []
  assert create(InnerFloat16(dtype))[1] == []


def test_abstract_state_says_nothing():
  # It may be restored for an evaluation, which needs no scale.
  assert create(InnerFloat16(), abstract=True)[1] == []
