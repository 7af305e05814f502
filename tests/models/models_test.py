"""The built-in models, and models from configs."""

import functools

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from flaxshard import models
from flaxshard.core import jaxprs
from flaxshard.core.policy import Policy
from flaxshard.models import pooling

# One precision policy per model, so that each policy is compiled once.
POLICIES = {
  "cnn": "float32",
  "resnet": "mixed_bfloat16",
  "transformer": "mixed_float16",
}
IMAGES = jax.random.normal(jax.random.key(1), (2, 16, 16, 3))
TOKENS = jax.random.randint(jax.random.key(1), (2, 12), 0, 50)
SMALL = {
  "cnn": ({"features": [4, 8], "dense": 16}, IMAGES, (2, 10)),
  "resnet": ({"stage_sizes": [1, 1], "width": 4}, IMAGES, (2, 10)),
  "transformer": (
    {
      "num_layers": 1,
      "num_heads": 2,
      "embed_dim": 16,
      "mlp_dim": 32,
      "max_length": 16,
    },
    TOKENS,
    (2, 12, 50),
  ),
}


class ModelWithoutPolicy(nn.Module):
  num_classes: int


def _create(name, policy=None, **fields):
  config, inputs, shape = SMALL[name]
  model = models.create(
    {"name": name, **config, **fields},
    num_classes=shape[-1],
    policy=Policy(policy or POLICIES[name]),
  )
  return model, inputs, shape


@functools.partial(jax.jit, static_argnums=0)
def _init(model, inputs):
  return model.init(jax.random.key(0), inputs)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _apply(model, variables, inputs, train=False, key=None):
  rngs = None if key is None else {"dropout": key}
  return model.apply(variables, inputs, train=train, rngs=rngs)


def _abstract(model, inputs):
  return jax.eval_shape(model.init, jax.random.key(0), inputs)


def _count(tree):
  return sum(x.size for x in jax.tree.leaves(tree))


def test_resnet_has_its_stride_in_the_3x3_convolution():
  model = models.ResNet(num_classes=10)
  images = jax.ShapeDtypeStruct((1, 64, 64, 3), jnp.float32)
  _, state = jax.eval_shape(
    lambda key, x: model.init_with_output(
      key, x, capture_intermediates=True, mutable=True
    ),
    jax.random.key(0),
    images,
  )
  block = state["intermediates"]["stage1_block0"]
  (first,), (second,) = (block[f"Conv_{i}"]["__call__"] for i in (0, 1))
  assert first.shape == (1, 16, 16, 128)
  assert second.shape == (1, 8, 8, 128)


def test_resnet_updates_batch_statistics_in_training_only():
  model, inputs, _ = _create("resnet")
  variables = _init(model, inputs)
  # A block equals its shortcut at first.
  for block in ("stage0_block0", "stage1_block0"):
    params = variables["params"][block]
    assert not params["BatchNorm_2"]["scale"].any()
    assert params["BatchNorm_1"]["scale"].all()
  evaluated, trained = jax.jit(
    lambda v: tuple(
      model.apply(v, inputs, train=train, mutable=["batch_stats"])[1]
      for train in (False, True)
    )
  )(variables)
  jax.tree.map(
    np.testing.assert_array_equal,
    evaluated["batch_stats"],
    variables["batch_stats"],
  )
  before, after = (
    v["batch_stats"]["stem_norm"]["mean"] for v in (variables, trained)
  )
  assert not np.array_equal(before, after)
  for leaf in jax.tree.leaves(trained["batch_stats"]):
    assert leaf.dtype == jnp.float32


def test_numbers_of_parameters():
  resnet = models.ResNet(num_classes=1000)
  images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
  variables = _abstract(resnet, images)
  # As published, for ResNet-50.
  assert _count(variables["params"]) == 25_557_032
  # Mean and variance for each of the 26,560 normalized channels.
  assert _count(variables["batch_stats"]) == 2 * 26_560
  cnn, images, _ = _create("cnn")
  convolutions = (3 * 9 * 4 + 4) + (4 * 9 * 8 + 8)
  dense = (4 * 4 * 8 * 16 + 16) + (16 * 10 + 10)
  assert _count(_abstract(cnn, images)) == convolutions + dense
  transformer, tokens, _ = _create("transformer", num_layers=2)
  attention = 4 * (16 * 16 + 16)
  mlp = (16 * 32 + 32) + (32 * 16 + 16)
  block = attention + mlp + 2 * 2 * 16
  tables = (50 + 16 + 50) * 16  # embeddings, positions, head
  assert _count(_abstract(transformer, tokens)) == 2 * block + tables + 2 * 16


@pytest.mark.slow
@pytest.mark.parametrize("name", models.MODELS)
def test_logits_and_gradients_are_finite_float32(name):
  model, inputs, shape = _create(name)
  variables = _init(model, inputs)

  def loss_fn(params):
    given = {**variables, "params": params}
    logits, _ = model.apply(given, inputs, train=True, mutable=["batch_stats"])
    return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0]), logits

  @jax.jit
  def both(variables):
    grad = jax.grad(loss_fn, has_aux=True)
    return *grad(variables["params"]), model.apply(variables, inputs)

  grads, trained, evaluated = both(variables)
  assert trained.shape == evaluated.shape == shape
  for leaf in jax.tree.leaves((variables, trained, evaluated, grads)):
    assert leaf.dtype == jnp.float32
    assert np.isfinite(leaf).all()


def test_products_have_the_compute_dtype_of_the_policy():
  for name in models.MODELS:
    model, inputs, _ = _create(name, "mixed_float16")
    jaxpr = jax.make_jaxpr(model.init)(jax.random.key(0), inputs)
    products = [
      equation
      for equation in jaxprs.equations(jaxpr)
      if equation.primitive.name in ("dot_general", "conv_general_dilated")
    ]
    assert products, name
    for equation in products:
      dtypes = {v.aval.dtype for v in equation.invars}
      assert dtypes == {jnp.dtype(jnp.float16)}, name


@pytest.mark.slow
def test_transformer_is_causal():
  model, tokens, _ = _create("transformer")
  variables = _init(model, tokens)
  logits = _apply(model, variables, tokens)
  for t in (0, 5, 11):
    changed = _apply(model, variables, tokens.at[:, t].add(1))
    np.testing.assert_array_equal(logits[:, :t], changed[:, :t])
    assert not np.array_equal(logits[:, t], changed[:, t])
    assert t == 11 or not np.array_equal(logits[:, -1], changed[:, -1])


def test_transformer_in_float16_does_not_overflow():
  model, tokens, _ = _create("transformer")
  variables = _init(model, tokens)
  embedding = variables["params"]["embed"]["embedding"]
  variables["params"]["embed"]["embedding"] = embedding * 1e4
  assert np.isfinite(_apply(model, variables, tokens)).all()


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_dropout_in_training_only(name):
  model, inputs, _ = _create(name, dropout=0.5)
  plain, _, _ = _create(name)
  variables = _init(plain, inputs)  # dropout adds no variables
  evaluated = _apply(model, variables, inputs)
  np.testing.assert_array_equal(evaluated, _apply(plain, variables, inputs))
  first, second, again = (
    _apply(model, variables, inputs, True, jax.random.key(seed))
    for seed in (1, 2, 1)
  )
  assert not np.array_equal(first, second)
  assert not np.array_equal(first, evaluated)
  np.testing.assert_array_equal(first, again)
  # Without dropout, training needs no random stream.
  jax.eval_shape(lambda: plain.apply(variables, inputs, train=True))


@pytest.mark.parametrize(
  ("name", "inputs", "fields", "error", "facts"),
  [
    ("cnn", IMAGES[0], {}, ValueError, r"inputs.*\(16, 16, 3\)"),
    ("cnn", IMAGES[:, :, :3], {}, ValueError, r"4x4.*\(2, 16, 3, 3\)"),
    ("cnn", IMAGES, {"dense": "8"}, TypeError, "'8'"),
    ("resnet", IMAGES[0], {}, ValueError, "inputs"),
    ("transformer", TOKENS[0], {}, ValueError, r"inputs.*\(12,\)"),
    ("transformer", TOKENS, {"max_length": 11}, ValueError, "11.*got 12"),
    ("transformer", TOKENS, {"num_heads": 3}, ValueError, "=3.*embed_dim=16"),
    ("transformer", TOKENS, {"dropout": "x"}, TypeError, "dropout"),
  ],
)
def test_invalid_field_or_input_raises(name, inputs, fields, error, facts):
  model, _, _ = _create(name, **fields)
  with pytest.raises(error, match=facts):
    _abstract(model, inputs)


def test_create_accepts_config_dicts():
  config = ml_collections.ConfigDict(
    {"name": "resnet", "stage_sizes": [1, 2], "width": 8}
  )
  policy = Policy("mixed_bfloat16")
  expected = models.ResNet(7, policy, stage_sizes=(1, 2), width=8)
  for form in (config, ml_collections.FrozenConfigDict(config)):
    model = models.create(form, num_classes=7, policy=policy)
    assert model == expected
    hash(model)  # jax.jit needs it for static arguments


@pytest.mark.parametrize(
  ("config", "error", "facts"),
  [
    # core/registry_test.py has the other mistakes.
    ({"name": "resnt"}, ValueError, "config.model.name.*'resnet'"),
    # Those that `create` sets are not listed.
    ({"name": "cnn", "densee": 1}, ValueError, "are features, dense, dropout"),
    ({"name": "cnn", "num_classes": 3}, ValueError, "'num_classes'"),
  ],
)
def test_create_with_invalid_config_raises(config, error, facts):
  with pytest.raises(error, match=facts):
    models.create(config, num_classes=10, policy=Policy())


def dtype_of(rngs, dtype, width=3):
  return nnx.Linear(2, width, dtype=dtype, rngs=rngs)


def test_create_gives_what_the_signature_names(monkeypatch):
  monkeypatch.setitem(models.MODELS, "partial", ModelWithoutPolicy)
  model = models.create({"name": "partial"}, num_classes=2, policy=Policy())
  assert model == ModelWithoutPolicy(2)
  monkeypatch.setitem(models.MODELS, "function", dtype_of)
  policy = Policy("mixed_bfloat16")
  model = models.create({"name": "function", "width": 4}, policy=policy)
  assert model.dtype == jnp.bfloat16
  assert model.kernel.shape == (2, 4)
  # Data without classes cannot give their number.
  with pytest.raises(TypeError, match=r"config.model .*'num_classes'"):
    models.create({"name": "partial"}, policy=Policy())


# Max pooling.


@pytest.mark.parametrize(
  ("size", "window", "stride", "padding"),
  [
    pytest.param((8, 6), 2, 2, 0, marks=pytest.mark.slow),
    pytest.param((9, 7), 2, 2, 0, marks=pytest.mark.slow),
    ((8, 7), 3, 2, 1),
    pytest.param((5, 5), 3, 1, 1, marks=pytest.mark.slow),
  ],
)
def test_values_and_gradients_are_those_of_flax(size, window, stride, padding):
  # Many values are equal.
  values = np.random.default_rng(0).integers(-3, 3, (2, *size, 3))
  x = jnp.asarray(values, jnp.float32)

  def flax_pool(x):
    sides = (padding, padding)
    return nn.max_pool(x, (window,) * 2, (stride,) * 2, (sides, sides))

  def pool(x):
    return pooling.max_pool(x, window, stride=stride, padding=padding)

  @jax.jit
  def both(x):
    gradient = lambda f: jax.grad(lambda x: (f(x) ** 2).sum())(x)
    return [(f(x), gradient(f)) for f in (pool, flax_pool)]

  (pooled, grads), (flax_pooled, flax_grads) = both(x)
  np.testing.assert_array_equal(pooled, flax_pooled)
  np.testing.assert_allclose(grads, flax_grads, rtol=1e-6)


@pytest.mark.parametrize("position", [0, 1, 3])
def test_a_nan_is_the_maximum(position):
  x = jnp.arange(4.0).at[position].set(jnp.nan).reshape(1, 2, 2, 1)
  assert np.isnan(pooling.max_pool(x, 2, stride=2)).all()
