"""A Transformer with split parameters trains as on one device."""

import compilations
import jax
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.models import Transformer
from flaxshard.partitioning import FSDP

P = jax.sharding.PartitionSpec
MESH_SHAPE = {"replica": 4, "model": 2}
MODEL = Transformer(
  num_classes=64,
  num_layers=1,
  num_heads=4,
  embed_dim=32,
  mlp_dim=64,
  max_length=16,
)
# A large eps: the gradients of the keys' biases are rounding errors around 0,
# which Adam would otherwise scale up to full steps.
TX = optax.adam(1e-2, eps=1e-3)
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 16)).astype(np.int32)

# Megatron-LM (Shoeybi et al., 2019): columns, then rows, one all-reduce each.
TENSOR_PARALLEL = (
  ("(query|key|value|mlp_in)/kernel", P(None, "model")),
  ("(query|key|value|mlp_in)/bias", P("model")),
  ("(out|mlp_out)/kernel", P("model", None)),
  ("embed/embedding", P("model", None)),
  ("head/kernel", P(None, "model")),
)
RULES = (*TENSOR_PARALLEL, FSDP(min_size=512))


def create(**kwargs):
  key = jax.random.key(0)
  return fs.create_train_state(MODEL, key, TOKENS, TX, **kwargs)


def train_step(state, tokens):
  def loss_fn(params):
    logits = state.apply_fn({"params": params}, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(
      logits[:, :-1], tokens[:, 1:]
    ).mean()

  return state.minimize(loss_fn)


def train(step, state, tokens):
  losses = []
  for _ in range(3):
    state, loss = step(state, tokens)
    losses.append(float(loss))
  return state, losses


@pytest.mark.slow
def test_sharded_training_matches_one_device():
  wanted, wanted_losses = train(jax.jit(train_step), create(), TOKENS)
  strategy = fs.Strategy(mesh_shape=MESH_SHAPE)
  state = create(strategy=strategy, rules=RULES)
  params = state.params
  specs = [
    params["block0"]["mlp_in"]["kernel"].sharding.spec,
    params["block0"]["out"]["kernel"].sharding.spec,
    params["head"]["kernel"].sharding.spec,
  ]
  assert specs == [
    P("replica", "model"),
    P("model", "replica"),
    P("replica", "model"),
  ]

  shardings = jax.tree.map(lambda x: x.sharding, state)
  # Without out_shardings, XLA may choose other shardings for the new state.
  step = jax.jit(
    lambda state, tokens: train_step(state, tokens),
    out_shardings=(shardings, None),
    donate_argnums=0,
  )
  tokens = jax.device_put(
    TOKENS, jax.sharding.NamedSharding(strategy.mesh, P("replica"))
  )
  with compilations.count() as compiled:
    state, losses = train(step, state, tokens)
  assert compiled.total == 1
  assert jax.tree.map(lambda x: x.sharding, state) == shardings
  np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
  assert losses[2] < losses[0] - 0.2
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      np.asarray(a), np.asarray(b), rtol=1e-4, atol=2e-5
    ),
    (state.params, state.opt_state),
    (wanted.params, wanted.opt_state),
  )
