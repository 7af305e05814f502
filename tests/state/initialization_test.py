"""Initialization of Linen modules; nnx_adapter_test.py has NNX modules."""

from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.state import initialization

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


def test_variables_are_equal_to_those_of_the_module():
  model = nn.Sequential([nn.Dense(4), nn.BatchNorm(use_running_average=True)])
  wanted = model.init(KEY, X)
  facts, variables = initialization.run(model, KEY, X)
  assert_close(variables, dict(wanted))
  assert facts.policy is None
  out = facts.apply_fn(variables, X)
  np.testing.assert_allclose(out, model.apply(wanted, X), rtol=1e-6)


def test_variables_keep_their_partitioning_metadata():
  kernel_init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
  model = nn.Dense(4, kernel_init=kernel_init)
  _, variables = initialization.run(model, KEY, X)
  for params in (
    variables["params"],
    initialization.trace(model, KEY, X).variables["params"],
  ):
    assert params["kernel"].names == (None, "model")
    assert params["bias"].shape == (4,)


def test_typed_and_raw_keys():
  typed, raw = jax.random.key(1), jax.random.PRNGKey(1)
  wanted = nn.Dense(2).init(typed, X)["params"]
  for rng in (typed, raw, {"params": raw}):
    assert_close(create(nn.Dense(2), rng).params, wanted)


@pytest.mark.parametrize("rng", [None, {}, {"params": 0}, X])
def test_invalid_rng_raises(rng):
  with pytest.raises(TypeError, match=r"rng.*jax\.random\.key") as e:
    create(nn.Dense(2), rng)
  # The values of a large array do not appear in the message.
  assert len(str(e.value)) < 120


def test_empty_sample_input_raises():
  for sample_input in (None, (), (None,)):
    with pytest.raises(ValueError, match="sample_input"):
      create(nn.Dense(2), sample_input=sample_input)


@pytest.mark.parametrize("sample_input", [(X, X), (X, "flag")])
def test_error_of_the_model_has_a_note_with_the_sample_input(sample_input):
  with pytest.raises(TypeError) as e:
    create(nn.Dense(2), sample_input=sample_input)
  (note,) = [n for n in e.value.__notes__ if "sample_input" in n]
  assert "Dense" in note
  assert "'float32[2, 3]'" in note


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


def test_fp8_scales_are_part_of_the_parameters():
  dense = nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp)
  state = create(dense, sample_input=jnp.ones((4, 16)))
  assert set(state.params) == {"params", "_overwrite_with_gradient"}
  assert set(state.params["params"]) == {"kernel", "bias"}
  state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
  scales = jax.tree.leaves(state.params["_overwrite_with_gradient"])
  # Flax overwrites the scales with their gradients.
  assert all((scale == 1).all() for scale in scales)


# Models that use the names `policy` and `dtype` for something else.


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
    AnyPolicy(policy="mixed_float16", dtype="auto"),
    AnyPolicy(policy=jnp.tanh, dtype=max),
  ],
)
def test_other_uses_of_policy_and_dtype_are_ignored(model):
  state = create(model, scale="auto")
  assert_close(state.params, model.init(KEY, X)["params"])
  assert state.wrapper_states["loss_scale"] == ()


@pytest.mark.parametrize(
  ("model", "scales"),
  [
    (AnyPolicy(policy=fs.Policy("mixed_float16")), True),
    (AnyPolicy(policy=fs.Policy("float32"), dtype=jnp.float16), False),
    (AnyPolicy(dtype="float16"), True),
    (AnyPolicy(policy="greedy", dtype=jnp.float16), True),
    (AnyPolicy(dtype=jnp.bfloat16), False),
  ],
)
def test_auto_loss_scale_follows_policy_and_dtype(model, scales):
  state = create(model, scale="auto")
  assert (state.wrapper_states["loss_scale"] != ()) == scales
