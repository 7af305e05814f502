"""Frozen parameters, and learning rates by pattern."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quadratic_states
import tree_equality

import flaxshard as fs

PARAMS = {
  "encoder": {"kernel": np.full((4, 3), 0.5), "bias": np.full(3, 0.25)},
  "head": {"kernel": np.full((3, 2), 0.125), "bias": np.full(2, 1.0)},
}
PARAMS = jax.tree.map(np.float32, PARAMS)
X = np.arange(8, dtype=np.float32).reshape(2, 4) / 8


def loss_fn(params, x=X):
  encoder, head = params["encoder"], params["head"]
  hidden = jnp.tanh(x @ encoder["kernel"] + encoder["bias"])
  return jnp.mean((hidden @ head["kernel"] + head["bias"]) ** 2)


def create(tx, wrappers=(), strategy=None):
  params = jax.tree.map(np.copy, PARAMS)
  return quadratic_states.create(wrappers, tx, params, strategy=strategy)


@jax.jit
def step(state):
  return state.minimize(loss_fn)[0]


# -- Frozen parameters.


@pytest.mark.parametrize(
  "wrappers",
  [
    [fs.LossScale("dynamic"), fs.Accumulate(2), fs.EMA(0.5)],
    [fs.AGN(2)],
  ],
  ids=["accumulate", "agn"],
)
def test_only_parameters_that_are_not_frozen_change(wrappers):
  # Weight decay would change a frozen parameter.
  tx = fs.freeze(optax.adamw(0.1, weight_decay=0.5), ["^encoder/"])
  state = create(tx, wrappers)
  slots = [x.shape for x in jax.tree.leaves(state.opt_state) if x.ndim]
  assert sorted(slots) == [(2,), (2,), (3, 2), (3, 2)]
  new = step(step(state))
  tree_equality.assert_trees_equal(new.params["encoder"], PARAMS["encoder"])
  for name, leaf in new.params["head"].items():
    assert (np.asarray(leaf) != np.asarray(PARAMS["head"][name])).all()
  # No wrapper keeps a sum or an average of a frozen parameter.
  for name in ("grad_accum", "params", "grads"):
    for wrapper_state in state.wrapper_states.values():
      tree = getattr(wrapper_state, name, {"encoder": {}})
      assert not jax.tree.leaves(tree["encoder"])


def test_scaling_factors_of_fp8_layers_are_not_frozen():
  layer = lambda x: {"encoder": {"scale": x}, "head": {"scale": x}}
  tree = lambda x: {"params": layer(x), "_overwrite_with_gradient": layer(x)}
  tx = fs.freeze(optax.sgd(1.0), ["^encoder/"])
  state = quadratic_states.create(tx=tx, params=tree(jnp.float32(1)))
  new = state.apply_gradients(grads=tree(jnp.float32(3)))
  assert jax.tree.leaves(new.params["params"]) == [1, -2]
  assert jax.tree.leaves(new.params["_overwrite_with_gradient"]) == [3, 3]


def test_replicas_do_not_exchange_the_gradients_of_frozen_parameters():
  strategy = fs.Strategy()
  state = create(fs.freeze(optax.sgd(0.1), ["encoder"]), strategy=strategy)
  n = strategy.num_replicas_in_sync
  batch = strategy.shard_batch(np.ones((2 * n, 4), np.float32))

  def step(state, x):
    return state.minimize(loss_fn, x)[0]

  text = strategy.jit(step).lower(state, batch).as_text()
  sums = re.findall(r"stablehlo.all_reduce.*?-> tensor<(\S+)>", text, re.S)
  assert sorted(sums) == ["2xf32", "3x2xf32"]


@pytest.mark.parametrize("tx", [optax.polyak_sgd(), optax.lbfgs()])
def test_extra_arguments_reach_the_inner_optimizer(tx):
  # `minimize` passes the loss, its gradient and its function.
  scaled = fs.scale_learning_rates(tx, [(".", 0.5)])
  frozen = optax.chain(optax.identity(), fs.freeze(scaled, ["encoder"]))
  new = step(create(frozen)).params["head"]
  head, fn = PARAMS["head"], lambda head: loss_fn({**PARAMS, "head": head})

  @jax.jit
  def update(head):
    value, grad = jax.value_and_grad(fn)(head)
    objective = dict(value=value, grad=grad, value_fn=fn)
    updates, _ = tx.update(grad, tx.init(head), head, **objective)
    return jax.tree.map(lambda p, u: p + u / 2, head, updates)

  tree_equality.assert_trees_close(new, update(head), rtol=1e-5)


# -- Learning rates by pattern.


@pytest.mark.parametrize(
  "create_tx",
  [
    lambda rate: optax.adamw(rate, weight_decay=0.5),
    lambda rate: optax.rmsprop(optax.linear_schedule(rate, 0.0, 4)),
  ],
  ids=["adamw", "schedule"],
)
def test_scaled_rate_equals_an_optimizer_with_that_rate(create_tx):
  factors = [("^head/bias", 4.0), ("head", 0.5)]
  scaled = create(fs.scale_learning_rates(create_tx(0.125), factors))
  plain = create(
    optax.partition(
      {"1": create_tx(0.125), "4": create_tx(0.5), "0.5": create_tx(0.0625)},
      {
        "encoder": {"kernel": "1", "bias": "1"},
        "head": {"kernel": "0.5", "bias": "4"},
      },
    )
  )
  for _ in range(3):
    scaled, plain = step(scaled), step(plain)
  # Powers of 2 change no rounding, but XLA may fuse another way.
  tree_equality.assert_trees_close(scaled.params, plain.params, 1e-6, 0)
  # A checkpoint without other rates has the same optimizer state.
  tree_equality.assert_trees_equal(
    create(create_tx(0.125)).opt_state,
    create(fs.scale_learning_rates(create_tx(0.125), factors)).opt_state,
  )
