"""LoRA trains factors of kernels, and keeps the other parameters frozen."""

import functools

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import flaxshard as fs

P = jax.sharding.PartitionSpec
STRATEGY = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
TX = optax.adam(0.01)
KEY = jax.random.key(0)
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
Y = np.ones((2, 8), np.float32)


class Net(nn.Module):
  """Kernels of two and of three dimensions, with statistics."""

  @nn.compact
  def __call__(self, x, train=False):
    x = nn.DenseGeneral((4, 16), name="body")(x)
    x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
    return nn.DenseGeneral(8, axis=(-2, -1), name="head")(x)


LORA = fs.LoRA(rank=4, alpha=8, patterns=("kernel$",), train=("head/bias",))


def make(model=None, lora=LORA, **kwargs):
  model = Net() if model is None else model
  return fs.create_train_state(model, KEY, X, TX, lora=lora, **kwargs)


def shapes(tree):
  return jax.tree.map(jnp.shape, tree)


def test_factors_and_frozen_parameters():
  state, plain = make(), make(lora=None)
  assert shapes(state.params) == {
    "body": {"kernel": {"lora_a": (32, 4), "lora_b": (4, 4, 16)}},
    "head": {
      "bias": (8,),
      "kernel": {"lora_a": (4, 16, 4), "lora_b": (4, 8)},
    },
  }
  assert shapes(state.frozen) == {
    "body": {"bias": (4, 16), "kernel": (32, 4, 16)},
    "head": {"kernel": (4, 16, 8)},
    "norm": {"bias": (16,), "scale": (16,)},
  }
  # The slots are those of the trained parameters.
  assert shapes(state.opt_state[0].mu) == shapes(state.params)
  # It starts as the model without factors.
  merged = jax.jit(fs.merge_lora)(state)
  jax.tree.map(np.testing.assert_array_equal, merged["params"], plain.params)
  assert fs.merge_lora(plain)["params"] is plain.params
  # Nor do wrappers have copies of the others.
  agn = make(wrappers=[fs.AGN()]).wrapper_states["agn"]
  assert list(agn.collections) == ["batch_stats"]
  # The model has no collection `frozen` to change.
  names = ("params", "frozen", "batch_stats")
  variables = {name: getattr(state, name) for name in names}
  for mutable in (["batch_stats"], ["batch_stats", "frozen"]):
    apply = functools.partial(state.apply_fn, train=True, mutable=mutable)
    _, new = jax.eval_shape(apply, variables, X)
    assert set(new) == {"batch_stats"}


def test_only_factors_are_trained():
  layer = lambda rngs, *sizes: nnx.Linear(*sizes, rngs=rngs)
  model = lambda rngs: nnx.Sequential(layer(rngs, 32, 64), layer(rngs, 64, 8))
  options = dict(strategy=STRATEGY, wrappers=[fs.LossScale(8.0)])
  state = new = make(model, fs.LoRA(4, alpha=8), **options)
  frozen, losses = state.frozen, []

  def loss_fn(params):
    outputs = state.apply_fn({"params": params, "frozen": frozen}, X)
    return jnp.mean((outputs - Y) ** 2)

  step = jax.jit(lambda s: s.minimize(loss_fn))
  for _ in range(10):
    new, loss = step(new)
    losses.append(float(loss))
  assert losses[-1] < 0.6 * losses[0]
  jax.tree.map(np.testing.assert_array_equal, new.frozen, frozen)
  # Merged parameters give the outputs of the state.
  merged = jax.jit(fs.merge_lora)(new)
  outputs = jax.jit(make(model, lora=None).apply_fn)(merged, X)
  loss, wanted = np.mean((outputs - Y) ** 2), jax.jit(loss_fn)(new.params)
  np.testing.assert_allclose(loss, wanted, rtol=1e-5)
  factors = jax.device_get(new.params["layers"]["0"]["kernel"])
  np.testing.assert_allclose(
    merged["params"]["layers"]["0"]["kernel"],
    frozen["layers"]["0"]["kernel"] + 2 * factors["lora_a"] @ factors["lora_b"],
    rtol=1e-5,
  )


class Stack(nn.Module):
  """Three layers, whose kernels are `[layers, inputs, outputs]`."""

  @nn.compact
  def __call__(self, x):
    for kernel in self.param("layers", nn.initializers.ones, (3, 32, 32)):
      x = x @ kernel
    return nn.Dense(8, name="head")(x)


def test_stacked_layers_have_factors_each_that_are_split_as_their_kernels():
  state, abstract = (
    make(
      Stack(),
      fs.LoRA(4, 8, ("layers", "kernel$"), batch_dims=[("layers", 1)]),
      strategy=STRATEGY,
      rules=(
        ("layers", P(None, "replica", "model")),
        ("head/kernel", P("model")),
      ),
      abstract=is_abstract,
    )
    for is_abstract in (False, True)
  )
  assert shapes(state.params) == {
    "layers": {"lora_a": (3, 32, 4), "lora_b": (3, 4, 32)},
    "head": {"kernel": {"lora_a": (32, 4), "lora_b": (4, 8)}},
  }
  layers = {"lora_a": P(None, "replica"), "lora_b": P(None, None, "model")}
  head = {"kernel": {"lora_a": P("model"), "lora_b": P()}}
  for params in (state.params, abstract.params, state.opt_state[0].mu):
    specs = jax.tree.map(lambda x: x.sharding.spec, params)
    assert specs == {"layers": layers, "head": head}
  assert jax.tree.leaves(shapes(abstract)) == jax.tree.leaves(shapes(state))
  rng = np.random.default_rng(0)
  params, frozen = jax.tree.map(
    lambda x: jax.device_put(rng.normal(size=x.shape).astype("f"), x.sharding),
    (state.params, state.frozen),
  )
  merged = fs.merge_lora(state.replace(params=params, frozen=frozen))
  merged = merged["params"]["layers"]
  assert merged.sharding == frozen["layers"].sharding
  assert merged.sharding.spec == P(None, "replica", "model")
  a, b = params["layers"]["lora_a"], params["layers"]["lora_b"]
  wanted = frozen["layers"] + 2 * np.einsum("lir,lro->lio", a, b)
  np.testing.assert_allclose(merged, wanted, rtol=1e-4, atol=1e-4)
