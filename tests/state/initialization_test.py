"""Initialization of models: keys, inputs, keyword arguments and precision."""

from typing import Any, NamedTuple
import warnings

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tree_equality import assert_trees_close

import flaxshard as fs

P = jax.sharding.PartitionSpec
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
KEY = jax.random.key(3)
STRATEGY = fs.Strategy(mesh_shape={"replica": 4, "model": 2})


def create(model, rng=KEY, x=X, **kwargs):
  return fs.create_train_state(model, rng, x, optax.sgd(0.5), **kwargs)


class Batch(NamedTuple):
  image: Any
  weight: Any


class TakesBatch(nn.Module):
  @nn.compact
  def __call__(self, batch):
    assert isinstance(batch, Batch)
    return nn.Dense(2)(batch.image) * batch.weight


def test_named_tuple_is_one_argument():
  batch = Batch(X, np.ones((4, 1), np.float32))
  wanted = TakesBatch().init(KEY, batch)["params"]
  for sample_input in (batch, (batch,)):
    state = create(TakesBatch(), x=sample_input)
    assert_trees_close(state.params, wanted)
  out = state.apply_fn({"params": state.params}, batch)
  assert out.shape == (4, 2)


class Net(nn.Module):
  """Branches on `train` and `extra`; `scale` is an array."""

  @nn.compact
  def __call__(self, x, train, *, scale=None, extra=False):
    x = nn.Dense(2 if train else 16)(x)
    x = nn.BatchNorm(use_running_average=not train)(x)
    if scale is not None:
      x = x * self.param("gain", lambda key: scale * 2)
    return nn.Dense(4)(x) if extra else x


def test_flag_in_the_sample_input_is_not_traced():
  abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
  for x, train, features in ((X, True, 2), (abstract, False, 16)):
    state = create(Net(), x=(x, train))
    assert state.params["Dense_0"]["kernel"].shape == (8, features)
    assert state.batch_stats["BatchNorm_0"]["mean"].shape == (features,)


@pytest.mark.parametrize(
  "kwargs",
  [{}, {"strategy": STRATEGY, "rules": (("kernel", P(None, "model")),)}],
  ids=["one_device", "rules"],
)
def test_flags_and_arrays_by_name(kwargs):
  scale = np.arange(16, dtype=np.float32)
  state = create(Net(), train=False, extra=True, scale=scale, **kwargs)
  np.testing.assert_array_equal(state.params["gain"], scale * 2)
  assert state.params["Dense_1"]["kernel"].shape == (16, 4)
  kernel = state.params["Dense_0"]["kernel"]
  wanted = P(None, "model") if kwargs else P()
  assert getattr(kernel.sharding, "spec", P()) == wanted
  # The values are those of Linen's own `init`.
  own = Net().init(KEY, X, train=False, extra=True, scale=scale)["params"]
  np.testing.assert_allclose(kernel, own["Dense_0"]["kernel"], rtol=1e-6)


# The precision in which a model computes, and the scale of its loss.


class AnyPolicy(nn.Module):
  policy: Any = None
  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    return nn.Dense(2)(x)


@pytest.mark.parametrize(
  ("model", "scales"),
  [
    (AnyPolicy(policy=fs.Policy("mixed_float16")), True),
    (AnyPolicy(policy=fs.Policy("float32"), dtype=jnp.float16), False),
    (AnyPolicy(dtype="float16"), True),
    (AnyPolicy(policy="greedy", dtype=jnp.float16), True),
    (AnyPolicy(dtype=jnp.bfloat16), False),
    # The names mean something else.
    (AnyPolicy(policy="mixed_float16", dtype="auto"), False),
  ],
)
def test_auto_loss_scale_follows_policy_and_dtype(model, scales):
  state = create(model, wrappers=[fs.LossScale("auto")])
  assert (state.wrapper_states["loss_scale"] != ()) == scales


class InnerFloat16(nn.Module):
  """No `dtype` and no `policy` of its own."""

  dtype_of_layer: object = jnp.float16

  @nn.compact
  def __call__(self, x):
    return nn.Dense(2, dtype=self.dtype_of_layer)(x).astype(jnp.float32)


class InnerNNX(nnx.Module):
  def __init__(self, rngs):
    self.hidden = nnx.Linear(8, 2, dtype=jnp.float16, rngs=rngs)

  def __call__(self, x):
    return self.hidden(x).astype(jnp.float32)


def create_and_listen(model, *wrappers, **kwargs):
  """Returns the state, and what is said when it is created."""
  with warnings.catch_warnings(record=True) as record:
    warnings.simplefilter("always")
    state = create(model, wrappers=wrappers, **kwargs)
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
  state, said = create_and_listen(make(), auto, x=x, strategy=strategy)
  assert "loss_scale" in state.metrics()
  assert said == []
  (said,) = create_and_listen(make(), x=x, strategy=strategy)[1]
  assert "computes in float16" in said and "LossScale('dynamic')" in said
  # It may be restored for an evaluation, which needs no scale.
  assert create_and_listen(make(), x=x, abstract=True)[1] == []


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_other_precisions_need_no_scale(dtype):
  state, said = create_and_listen(InnerFloat16(dtype), fs.LossScale("auto"))
  assert state.metrics() == {} and said == []
  assert create_and_listen(InnerFloat16(dtype))[1] == []
