"""Linen modules, initialized."""

from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.state import create as create_lib

X = np.array([[1.0, 2.0, -1.0], [0.5, -0.25, 3.0]], np.float32)


def init(model, rng, x):
  initialize, args = create_lib._linen_initializer(model, rng, x)
  return jax.jit(initialize)(*args)


def create(model, rng=None, sample_input=X, scale=None):
  return fs.create_train_state(
    model,
    jax.random.key(0) if rng is None else rng,
    sample_input,
    optax.sgd(0.5),
    wrappers=[] if scale is None else [fs.LossScale(scale)],
  )


def assert_close(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


def test_the_variables_are_those_of_the_module():
  key = jax.random.key(3)
  model = nn.Sequential([nn.Dense(4), nn.BatchNorm(use_running_average=True)])
  variables = init(model, key, X)
  assert_close(variables, dict(model.init(key, X)))
  assert set(variables) == {"params", "batch_stats"}


def test_partitioning_metadata_stays_on():
  kernel_init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
  variables = init(nn.Dense(4, kernel_init=kernel_init), jax.random.key(0), X)
  assert variables["params"]["kernel"].names == (None, "model")
  assert isinstance(variables["params"]["bias"], jax.Array)


@pytest.mark.parametrize("rng", [jax.random.key(1), jax.random.PRNGKey(1)])
def test_keys_old_and_new_and_in_a_dict(rng):
  wanted = nn.Dense(2).init(rng, X)["params"]
  assert_close(create(nn.Dense(2), rng).params, wanted)
  assert_close(create(nn.Dense(2), {"params": rng}).params, wanted)


@pytest.mark.parametrize(
  "rng", [None, 0, 1.5, {}, "key", {"params": None}, {"params": 0}]
)
def test_what_is_no_key_is_refused(rng):
  for make in (
    lambda: create_lib._linen_initializer(nn.Dense(2), rng, X),
    lambda: fs.create_train_state(nn.Dense(2), rng, X, optax.sgd(0.1)),
  ):
    with pytest.raises(TypeError, match="rng must be a PRNG key or a dict"):
      make()


@pytest.mark.parametrize("sample_input", [None, (), {}, (None,)])
def test_an_empty_sample_input_is_refused(sample_input):
  with pytest.raises(ValueError, match="sample_input must be one input of the"):
    create(nn.Dense(2), sample_input=sample_input)


class Batch(NamedTuple):
  image: Any
  weight: Any


class OfBatch(nn.Module):
  @nn.compact
  def __call__(self, batch):
    assert isinstance(batch, Batch)
    return nn.Dense(2)(batch.image) * batch.weight


def test_a_named_tuple_is_one_argument():
  batch = Batch(X, np.ones((2, 1), np.float32))
  wanted = OfBatch().init(jax.random.key(0), batch)["params"]
  abstract = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch
  )
  for sample_input in (batch, (batch,), abstract):
    state = create(OfBatch(), sample_input=sample_input)
    assert_close(state.params, wanted)
  out = state.apply_fn({"params": state.params}, batch)
  assert out.shape == (2, 2)


class WithFlag(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    # A traced flag could not be asked.
    x = nn.Dense(2 if train else 5)(x)
    return nn.BatchNorm(use_running_average=not train)(x)


@pytest.mark.parametrize(("train", "features"), [(True, 2), (False, 5)])
def test_a_flag_among_the_inputs_stays_static(train, features):
  abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
  for x in (X, jnp.asarray(X), abstract):
    state = create(WithFlag(), sample_input=(x, train))
    assert state.params["Dense_0"]["kernel"].shape == (3, features)
    assert state.batch_stats["BatchNorm_0"]["mean"].shape == (features,)


def test_overwrite_with_gradient_goes_with_the_parameters():
  dense = nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp)
  variables = init(dense, jax.random.key(0), jnp.ones((4, 16)))
  assert set(variables) == {"params"}
  assert set(variables["params"]) == {"params", "_overwrite_with_gradient"}
  assert set(variables["params"]["params"]) == {"kernel", "bias"}


# Attributes that mean something else than to us.


class SubmodulePolicy(nn.Module):
  policy: nn.Module

  @nn.compact
  def __call__(self, x):
    return self.policy(x)


class SetupPolicy(nn.Module):
  def setup(self):
    self.policy = nn.Dense(2)

  def __call__(self, x):
    return self.policy(x)


class MethodPolicy(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(2)(x)

  def policy(self, x):
    return x


class AnyPolicy(nn.Module):
  policy: Any = None
  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    return nn.Dense(2)(x)


@pytest.mark.parametrize(
  "model",
  [
    SubmodulePolicy(nn.Dense(2)),
    SetupPolicy(),
    MethodPolicy(),
    AnyPolicy(policy=jnp.tanh),
    AnyPolicy(policy="greedy"),
    AnyPolicy(policy="mixed_float16"),
    AnyPolicy(dtype="auto"),
    AnyPolicy(dtype=max),
    AnyPolicy(policy="greedy", dtype="auto"),
  ],
)
@pytest.mark.parametrize("scale", ["auto", "dynamic", None])
def test_other_meanings_of_policy_and_dtype_do_no_harm(model, scale):
  state = create(model, scale=scale)
  wanted = model.init(jax.random.key(0), X)["params"]
  assert_close(state.params, wanted)
  if scale == "auto":
    assert state.wrapper_states["loss_scale"] == ()
  if scale == "dynamic":
    assert float(state.wrapper_states["loss_scale"].scale) == 2.0**15


@pytest.mark.parametrize(
  ("model", "on"),
  [
    (AnyPolicy(policy=fs.Policy("mixed_float16")), True),
    (AnyPolicy(policy=fs.Policy("float32")), False),
    (AnyPolicy(policy=fs.Policy("float32"), dtype=jnp.float16), False),
    (AnyPolicy(dtype=jnp.float16), True),
    (AnyPolicy(dtype="float16"), True),
    (AnyPolicy(policy="greedy", dtype=jnp.float16), True),
    (AnyPolicy(dtype=jnp.bfloat16), False),
  ],
)
def test_a_real_policy_or_dtype_is_read(model, on):
  state = create(model, scale="auto")
  assert (state.wrapper_states["loss_scale"] != ()) == on
