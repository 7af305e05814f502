"""The built-in models, and models from configs."""

import functools

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxshard import models
from flaxshard.core import jaxprs
from flaxshard.core.policy import Policy
from flaxshard.models import images

IMAGES = np.random.default_rng(1).normal(size=(2, 16, 16, 3)).astype("f")
TOKENS = np.random.default_rng(1).integers(0, 50, (2, 12), np.int32)
STAGES = {"stage_sizes": [1, 1], "width": 4}
BLOCK = {"num_layers": 1, "num_heads": 2, "embed_dim": 16, "mlp_dim": 32}
BLOCK["max_length"] = 16
# By model: fields, inputs, shape of the logits, and one precision policy, so
# that each policy is compiled once.
SMALL = {
  "cnn": ({"features": [4, 8], "dense": 16}, IMAGES, (2, 10), "float32"),
  "resnet": (STAGES, IMAGES, (2, 10), "mixed_bfloat16"),
  "transformer": (BLOCK, TOKENS, (2, 12, 50), "mixed_float16"),
}


def create(name, policy=None, **fields):
  config, inputs, shape, default = SMALL[name]
  model = models.create(
    {"name": name, **config, **fields},
    num_classes=shape[-1],
    policy=Policy(policy or default),
  )
  return model, inputs, shape


@functools.partial(jax.jit, static_argnums=0)
def init(model, inputs):
  return model.init(jax.random.key(0), inputs)


@functools.partial(jax.jit, static_argnums=(0, 3))
def apply(model, variables, inputs, train=False, key=None):
  rngs = None if key is None else {"dropout": key}
  return model.apply(variables, inputs, train=train, rngs=rngs)


def abstract(model, inputs):
  return jax.eval_shape(model.init, jax.random.key(0), inputs)


def count(tree):
  return sum(x.size for x in jax.tree.leaves(tree))


def test_resnet_has_its_stride_in_the_3x3_convolution():
  images = jnp.zeros((1, 64, 64, 3))
  model = models.ResNet(num_classes=10)
  init = functools.partial(model.init, capture_intermediates=True)
  state = jax.eval_shape(init, jax.random.key(0), images)
  block = state["intermediates"]["stage1_block0"]
  (first,), (second,) = (block[f"Conv_{i}"]["__call__"] for i in (0, 1))
  assert first.shape == (1, 16, 16, 128)
  assert second.shape == (1, 8, 8, 128)


@pytest.mark.slow
def test_resnet_updates_batch_statistics_in_training_only():
  model, inputs, _ = create("resnet")
  variables = init(model, inputs)
  # A block equals its shortcut at first.
  for block in ("stage0_block0", "stage1_block0"):
    params = variables["params"][block]
    assert not params["BatchNorm_2"]["scale"].any()
    assert params["BatchNorm_1"]["scale"].all()
  train = functools.partial(model.apply, train=True, mutable=["batch_stats"])
  _, trained = jax.jit(train)(variables, inputs)
  for before, after in zip(
    jax.tree.leaves(variables["batch_stats"]),
    jax.tree.leaves(trained),
    strict=True,
  ):
    assert after.dtype == jnp.float32
    assert not np.array_equal(before, after)
  # It would raise if it had statistics to update.
  jax.eval_shape(model.apply, variables, inputs)


def test_resnet_50_has_the_published_number_of_parameters():
  images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
  variables = abstract(models.ResNet(num_classes=1000), images)
  # As published, for ResNet-50.
  assert count(variables["params"]) == 25_557_032
  # Mean and variance for each of the 26,560 normalized channels.
  assert count(variables["batch_stats"]) == 2 * 26_560


@pytest.mark.slow
@pytest.mark.parametrize("name", models.MODELS)
def test_logits_and_gradients_are_finite_float32(name):
  model, inputs, shape = create(name)
  variables = init(model, inputs)

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
    model, inputs, _ = create(name, "mixed_float16")
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
  model, tokens, _ = create("transformer")
  variables = init(model, tokens)
  logits = apply(model, variables, tokens)
  for t in (0, 5, 11):
    changed = apply(model, variables, tokens + (np.arange(12) == t))
    np.testing.assert_array_equal(logits[:, :t], changed[:, :t])
    assert not np.array_equal(logits[:, t], changed[:, t])
    assert t == 11 or not np.array_equal(logits[:, -1], changed[:, -1])


@pytest.mark.parametrize(
  "name", ["cnn", pytest.param("transformer", marks=pytest.mark.slow)]
)
def test_dropout_in_training_only(name):
  model, inputs, _ = create(name, dropout=0.5)
  plain, _, _ = create(name)
  variables = init(plain, inputs)  # dropout adds no variables
  evaluated = apply(model, variables, inputs)
  np.testing.assert_array_equal(evaluated, apply(plain, variables, inputs))
  first, second = (
    apply(model, variables, inputs, True, jax.random.key(seed))
    for seed in (1, 2)
  )
  assert not np.array_equal(first, second)
  assert not np.array_equal(first, evaluated)
  # Without dropout, training needs no random stream.
  jax.eval_shape(lambda: plain.apply(variables, inputs, train=True))


def dtype_of(rngs, dtype, width=3):
  return nnx.Linear(2, width, dtype=dtype, rngs=rngs)


def test_create_gives_what_the_signature_names(monkeypatch):
  monkeypatch.setitem(models.MODELS, "function", dtype_of)
  policy = Policy("mixed_bfloat16")
  model = models.create({"name": "function", "width": 4}, policy=policy)
  assert model.dtype == jnp.bfloat16
  assert model.kernel.shape == (2, 4)


def shapes_of(name, inputs, **fields):
  return abstract(create(name, **fields)[0], inputs)


def text(tokens=TOKENS, **fields):
  return shapes_of("transformer", tokens, **fields)


def create_named(name, **fields):
  config = {"name": name, **fields}
  return models.create(config, num_classes=10, policy=Policy())


CNN = {"name": "cnn"}


@pytest.mark.parametrize(
  ("call", "error", "words"),
  [
    (lambda: shapes_of("cnn", IMAGES[0]), ValueError, r"inputs.*\(16, 16, 3\)"),
    (lambda: shapes_of("cnn", IMAGES[:, :3]), ValueError, r"4x4.*\(2, 3, 16"),
    (lambda: shapes_of("cnn", IMAGES, dense="8"), TypeError, "'8'"),
    (lambda: shapes_of("cnn", IMAGES, dropout=1.5), ValueError, "dropout.*1.5"),
    (lambda: text(max_length=11), ValueError, "11.*got 12"),
    (lambda: text(num_heads=3), ValueError, "=3.*embed_dim=16"),
    # core/mistakes_test.py has the other mistakes.
    (lambda: create_named("resnt"), ValueError, "config.model.name.*'resnet'"),
    # Those that `create` sets are not listed.
    (lambda: create_named("cnn", densee=1), ValueError, "features, dense, d"),
    (lambda: create_named("cnn", num_classes=3), ValueError, "'num_classes'"),
    # Data without classes cannot give their number.
    (lambda: models.create(CNN, policy=Policy()), TypeError, "'num_classes'"),
  ],
)
def test_mistakes(call, error, words):
  with pytest.raises(error, match=words):
    call()


# Max pooling.


@pytest.mark.parametrize(
  ("size", "window", "stride", "padding"),
  [
    pytest.param((9, 6), 2, 2, 0, marks=pytest.mark.slow),
    ((8, 7), 3, 2, 1),
  ],
)
def test_values_and_gradients_are_those_of_flax(size, window, stride, padding):
  # Many values are equal.
  values = np.random.default_rng(0).integers(-3, 3, (2, *size, 3))

  def flax_pool(x):
    sides = [(padding, padding)] * 2
    return nn.max_pool(x, (window,) * 2, (stride,) * 2, sides)

  def pool(x):
    return images.max_pool(x, window, stride=stride, padding=padding)

  @jax.jit
  def both(x):
    gradient = lambda f: jax.grad(lambda x: (f(x) ** 2).sum())(x)
    return [(f(x), gradient(f)) for f in (pool, flax_pool)]

  (pooled, grads), (flax_pooled, flax_grads) = both(values.astype(np.float32))
  np.testing.assert_array_equal(pooled, flax_pooled)
  np.testing.assert_allclose(grads, flax_grads, rtol=1e-6)
