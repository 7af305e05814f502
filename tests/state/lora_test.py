"""LoRA trains factors of kernels, and keeps the other parameters frozen."""

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.state import lora as lora_lib

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


class Module(nnx.Module):
  def __init__(self, rngs):
    self.body = nnx.Linear(32, 64, rngs=rngs)
    self.head = nnx.Linear(64, 8, rngs=rngs)

  def __call__(self, x):
    return self.head(self.body(x))


LORA = fs.LoRA(rank=4, alpha=8, patterns=("kernel$",), train=("head/bias",))


def make(model=None, lora=LORA, rng=KEY, **kwargs):
  return fs.create_train_state(
    Net() if model is None else model,
    rng,
    X,
    TX,
    lora=lora,
    **kwargs,
  )


def loss(state, params):
  variables = {"params": params, "frozen": state.frozen}
  if hasattr(state, "batch_stats"):
    variables["batch_stats"] = state.batch_stats
  return jnp.mean((state.apply_fn(variables, X) - Y) ** 2)


@jax.jit
def step(state):
  value, grads = state.value_and_grad(lambda p: loss(state, p))
  return state.apply_gradients(grads=grads), value


def shapes(tree):
  return jax.tree.map(jnp.shape, tree)


@pytest.fixture(scope="module")
def state():
  return make()


def test_factors_and_frozen_parameters(state):
  plain = make(lora=None)
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
  merged = fs.merge_lora(state)
  jax.tree.map(np.testing.assert_array_equal, merged["params"], plain.params)
  assert fs.merge_lora(plain)["params"] is plain.params


_ON_STRATEGY = {"strategy": STRATEGY, "wrappers": [fs.LossScale(8.0)]}


@pytest.mark.parametrize(
  ("model", "kwargs"),
  [
    pytest.param(Net(), {}, id="linen"),
    pytest.param(
      lambda rngs: Module(rngs),
      _ON_STRATEGY,
      id="nnx_function_on_strategy",
      marks=pytest.mark.slow,
    ),
  ],
)
def test_only_factors_are_trained(model, kwargs):
  state = make(model, **kwargs)
  new, losses = state, []
  for _ in range(10):
    new, value = step(new)
    losses.append(float(value))
  assert losses[-1] < 0.6 * losses[0]
  jax.tree.map(np.testing.assert_array_equal, new.frozen, state.frozen)
  # Merged parameters give the outputs of the state.
  variables = fs.merge_lora(new)
  apply_fn = lora_lib.model_apply(new.apply_fn)
  value = jnp.mean((apply_fn(variables, X) - Y) ** 2)
  np.testing.assert_allclose(value, loss(new, new.params), rtol=1e-5)
  kernel = state.frozen["body"]["kernel"]
  factors = new.params["body"]["kernel"]
  product = jnp.tensordot(factors["lora_a"], factors["lora_b"], 1)
  np.testing.assert_allclose(
    variables["params"]["body"]["kernel"], kernel + 2 * product, rtol=1e-5
  )


def test_collections_of_the_model_and_the_mode(state):
  variables = {
    "params": state.params,
    "frozen": state.frozen,
    "batch_stats": state.batch_stats,
  }
  for mutable in (["batch_stats"], ["batch_stats", "frozen"]):
    _, new = state.apply_fn(variables, X, train=True, mutable=mutable)
    assert set(new) == {"batch_stats"}


@pytest.mark.slow
def test_rules_split_kernels_and_their_factors():
  rules = (("body/kernel", P("replica", "model")), ("head/kernel", P("model")))
  state = make(strategy=STRATEGY, rules=rules)
  specs = jax.tree.map(lambda x: x.sharding.spec, state.params)
  body, head = specs["body"]["kernel"], specs["head"]["kernel"]
  assert body == {"lora_a": P("replica"), "lora_b": P(None, "model")}
  assert head == {"lora_a": P("model"), "lora_b": P()}
  frozen = state.frozen["body"]["kernel"]
  assert frozen.sharding.spec == P("replica", "model")
  assert state.opt_state[0].mu["body"]["kernel"]["lora_b"].sharding.spec == P(
    None, "model"
  )
  abstract = make(strategy=STRATEGY, rules=rules, abstract=True)
  same = lambda a, b: (a.shape, a.sharding) == (b.shape, b.sharding)
  assert all(map(same, jax.tree.leaves(abstract), jax.tree.leaves(state)))
  merged = fs.merge_lora(state)["params"]["body"]["kernel"]
  assert merged.sharding == frozen.sharding


class Stack(nn.Module):
  """Three layers, whose kernels are `[layers, inputs, outputs]`."""

  @nn.compact
  def __call__(self, x):
    body = nn.scan(
      lambda layer, x: (layer(x), None),
      variable_axes={"params": 0},
      split_rngs={"params": True},
      length=3,
    )
    x, _ = body(nn.Dense(32, name="layer"), x)
    return nn.Dense(8, name="head")(x)


def test_stacked_layers_have_factors_each():
  state = make(
    Stack(),
    fs.LoRA(rank=4, alpha=8, batch_dims=[("^layer/", 1)]),
    strategy=STRATEGY,
    rules=(("^layer/kernel", P(None, "replica", "model")),),
    abstract=True,
  )
  assert shapes(state.params) == {
    "layer": {"kernel": {"lora_a": (3, 32, 4), "lora_b": (3, 4, 32)}},
    "head": {"kernel": {"lora_a": (32, 4), "lora_b": (4, 8)}},
  }
  factors = state.params["layer"]["kernel"]
  assert factors["lora_a"].sharding.spec == P(None, "replica")
  assert factors["lora_b"].sharding.spec == P(None, None, "model")
  rng = np.random.default_rng(0)
  params, frozen = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(x.dtype),
    (state.params, state.frozen),
  )
  merged = lora_lib.merge(params, frozen, state.apply_fn.scale)
  for i in range(3):
    a, b = (params["layer"]["kernel"][name][i] for name in lora_lib.FACTORS)
    np.testing.assert_allclose(
      merged["layer"]["kernel"][i],
      frozen["layer"]["kernel"][i] + 2 * a @ b,
      rtol=1e-4,
      atol=1e-4,
    )


def test_loss_without_the_frozen_parameters_raises(state):
  call = lambda params: state.apply_fn({"params": params}, X).sum()
  wanted = r"\{'params': params, 'frozen': state.frozen"
  for method in (
    state.value_and_grad,
    jax.jit(state.minimize, static_argnums=0),
  ):
    with pytest.raises(ValueError, match=wanted):
      method(call)


@pytest.mark.parametrize(
  ("arguments", "facts"),
  [
    ({"rank": 0}, ["rank"]),
    ({"patterns": ("kernal",)}, ["'kernel'"]),
    ({"patterns": ("norm",)}, ["norm/bias", "(16,)"]),
    ({"train": ("head",)}, ["head/kernel", "train="]),
    ({"batch_dims": (("bias", 1),)}, ["batch_dims[0]='bias'", "head/kernel"]),
    ({"batch_dims": (("body", 2),)}, ["body/kernel", "2 batch dimensions"]),
  ],
)
def test_mistakes(arguments, facts):
  with pytest.raises(ValueError) as e:
    make(lora=fs.LoRA(**{"rank": 4, **arguments}))
  assert all(fact in str(e.value) for fact in facts)
