"""Keyword arguments of `create_train_state` reach the call of the model."""

import types

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs

KEY = jax.random.key(0)
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
STRATEGY = types.SimpleNamespace(
  mesh=jax.sharding.Mesh(
    np.array(jax.devices()).reshape(4, 2), ("replica", "model")
  )
)
P = jax.sharding.PartitionSpec


class Net(nn.Module):
  """Needs `train` by name; `scale` is an array, `extra` selects a layer."""

  @nn.compact
  def __call__(self, x, *, train, scale=None, extra=False):
    if train:
      raise ValueError("initialized with train=True")
    x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
    if scale is not None:
      x = x * self.param("gain", lambda key: scale * 2)
    return nn.Dense(4)(x) if extra else x

  @nn.compact
  def encode(self, x):
    return nn.Dense(3)(x)


def make(model=None, x=X, rng=KEY, **kwargs):
  tx = optax.adam(0.1)
  return fs.create_train_state(
    Net() if model is None else model, rng, x, tx, **kwargs
  )


def shapes(state):
  return jax.tree.map(lambda x: (x.shape, x.dtype), state.params)


@pytest.mark.parametrize(
  "kwargs",
  [{}, {"strategy": STRATEGY, "rules": (("kernel", P(None, "model")),)}],
  ids=["one_device", "rules"],
)
def test_flags_and_arrays(kwargs):
  scale = np.arange(16, dtype=np.float32)
  state = make(train=False, extra=True, scale=scale, **kwargs)
  np.testing.assert_array_equal(state.params["gain"], scale * 2)
  assert state.params["Dense_1"]["kernel"].shape == (16, 4)
  assert state.batch_stats["BatchNorm_0"]["mean"].shape == (16,)
  kernel = state.params["Dense_0"]["kernel"]
  wanted = P(None, "model") if kwargs else P()
  assert getattr(kernel.sharding, "spec", P()) == wanted
  # The values are those of Linen's own `init`.
  own = Net().init(KEY, X, train=False, extra=True, scale=scale)["params"]
  np.testing.assert_allclose(kernel, own["Dense_0"]["kernel"], rtol=1e-6)


@pytest.mark.parametrize("strategy", [None, STRATEGY])
def test_abstract_state_of_an_abstract_keyword_argument(strategy):
  concrete = make(train=False, scale=np.ones(16, np.float32), strategy=strategy)
  abstract = make(
    x=jax.ShapeDtypeStruct(X.shape, X.dtype),
    train=False,
    scale=jax.ShapeDtypeStruct((16,), jnp.float32),
    strategy=strategy,
    abstract=True,
  )
  assert shapes(abstract) == shapes(concrete)
  assert all(
    isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(abstract)
  )


def test_method():
  state = make(method="encode")
  assert shapes(state) == {
    "Dense_0": {"bias": ((3,), jnp.float32), "kernel": ((8, 3), jnp.float32)}
  }
