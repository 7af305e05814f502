"""Initialization of Linen modules; nnx_adapter_test.py has NNX modules."""

from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs

X = np.array([[1.0, 2.0, -1.0], [0.5, -0.25, 3.0]], np.float32)
KEY = jax.random.key(3)


def create(model, rng=KEY, sample_input=X, scale=None):
  return fs.create_train_state(
    model,
    rng,
    sample_input,
    optax.sgd(0.5),
    wrappers=[] if scale is None else [fs.LossScale(scale)],
  )


def assert_close(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


def test_typed_and_raw_keys():
  typed, raw = jax.random.key(1), jax.random.PRNGKey(1)
  wanted = nn.Dense(2).init(typed, X)["params"]
  for rng in (typed, raw, {"params": raw}):
    assert_close(create(nn.Dense(2), rng).params, wanted)


class Batch(NamedTuple):
  image: Any
  weight: Any


class TakesBatch(nn.Module):
  @nn.compact
  def __call__(self, batch):
    assert isinstance(batch, Batch)
    return nn.Dense(2)(batch.image) * batch.weight


def test_named_tuple_is_one_argument():
  batch = Batch(X, np.ones((2, 1), np.float32))
  wanted = TakesBatch().init(KEY, batch)["params"]
  for sample_input in (batch, (batch,)):
    state = create(TakesBatch(), sample_input=sample_input)
    assert_close(state.params, wanted)
  out = state.apply_fn({"params": state.params}, batch)
  assert out.shape == (2, 2)


class WithFlag(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    # Fails if `train` is traced.
    x = nn.Dense(2 if train else 5)(x)
    return nn.BatchNorm(use_running_average=not train)(x)


def test_flag_in_the_sample_input_is_not_traced():
  abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
  for x, train, features in ((X, True, 2), (abstract, False, 5)):
    state = create(WithFlag(), sample_input=(x, train))
    assert state.params["Dense_0"]["kernel"].shape == (3, features)
    assert state.batch_stats["BatchNorm_0"]["mean"].shape == (features,)


# Models that use the names `policy` and `dtype` for something else.


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
    (AnyPolicy(policy=jnp.tanh, dtype=max), False),
  ],
)
def test_auto_loss_scale_follows_policy_and_dtype(model, scales):
  state = create(model, scale="auto")
  assert (state.wrapper_states["loss_scale"] != ()) == scales
