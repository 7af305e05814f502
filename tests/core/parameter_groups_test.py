"""Frozen parameters, and learning rates by pattern."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tree_equality

import flaxshard as fs
from flaxshard.core import parameter_groups
from flaxshard.core import patterns

PARAMS = {
  "encoder": {"kernel": jnp.full((4, 3), 0.5), "bias": jnp.full(3, 0.25)},
  "head": {"kernel": jnp.full((3, 2), 0.125), "bias": jnp.full(2, 1.0)},
}
X = jnp.arange(8.0).reshape(2, 4) / 8


def loss_fn(params, x=X):
  encoder, head = params["encoder"], params["head"]
  hidden = jnp.tanh(x @ encoder["kernel"] + encoder["bias"])
  return jnp.mean((hidden @ head["kernel"] + head["bias"]) ** 2)


def create(tx, wrappers=()):
  params = jax.tree.map(jnp.copy, PARAMS)
  return fs.TrainState.create(
    apply_fn=None, params=params, tx=tx, wrappers=wrappers
  )


@jax.jit
def step(state):
  return state.minimize(loss_fn)[0]


@jax.jit
def apply(state, grads):
  return state.apply_gradients(grads=state.unscale_gradients(grads))


def slot_paths(state):
  return [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state)
    if x.ndim
  ]


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
  assert len(slot_paths(state)) == 4
  assert all("head" in path for path in slot_paths(state))
  new = step(step(state))
  tree_equality.assert_trees_equal(new.params["encoder"], PARAMS["encoder"])
  for name, leaf in new.params["head"].items():
    assert (np.asarray(leaf) != np.asarray(PARAMS["head"][name])).all()
  # No wrapper keeps a sum or an average of a frozen parameter.
  for name in ("grad_accum", "params", "grads"):
    for wrapper_state in state.wrapper_states.values():
      tree = getattr(wrapper_state, name, {"encoder": {}})
      assert not jax.tree.leaves(tree["encoder"])


def test_trained_parameters_equal_those_of_masked_optax():
  mask = {
    "encoder": {"kernel": True, "bias": True},
    "head": {"kernel": False, "bias": False},
  }
  expected = create(
    optax.selective_transform(optax.adamw(0.1), freeze_mask=mask)
  )
  state = create(fs.freeze(optax.adamw(0.1), ["^encoder/"]))
  for _ in range(3):
    state, expected = step(state), step(expected)
  tree_equality.assert_trees_equal(state.params, expected.params)
  tree_equality.assert_trees_equal(state.opt_state, expected.opt_state)


def test_optimizer_takes_none_for_a_frozen_parameter():
  tx = fs.freeze(optax.sgd(0.5), ["^encoder/"])
  grads = {
    "encoder": {"kernel": None, "bias": None},
    "head": jax.tree.map(jnp.ones_like, PARAMS["head"]),
  }
  updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
  assert not np.any(np.asarray(updates["encoder"]["kernel"]))
  assert np.asarray(updates["head"]["bias"]).tolist() == [-0.5, -0.5]


def test_value_and_grad_returns_none_for_a_frozen_parameter():
  state = create(fs.freeze(optax.sgd(0.1), ["bias"]), [fs.LossScale(8.0)])
  grads = jax.jit(lambda state: state.value_and_grad(loss_fn)[1])(state)
  assert grads["encoder"]["bias"] is None and grads["head"]["bias"] is None
  expected = jax.jit(jax.grad(loss_fn))(PARAMS)
  np.testing.assert_allclose(
    grads["head"]["kernel"], expected["head"]["kernel"], rtol=1e-6
  )


def test_scaling_factors_of_fp8_layers_are_not_frozen():
  layer = {"encoder": {"scale": jnp.ones(())}, "head": {"scale": jnp.ones(())}}
  params = {"params": layer, "_overwrite_with_gradient": layer}
  tx = fs.freeze(optax.sgd(0.1), ["^encoder/"])
  assert parameter_groups.frozen_mask(tx, params) == {
    "params": {"encoder": {"scale": True}, "head": {"scale": False}},
    "_overwrite_with_gradient": {
      "encoder": {"scale": False},
      "head": {"scale": False},
    },
  }


def test_nonfinite_gradient_of_a_frozen_parameter_skips_no_step():
  tx = fs.freeze(optax.sgd(0.5), ["encoder"])
  state = create(tx, [fs.LossScale("dynamic")])
  scaled = {
    "encoder": jax.tree.map(lambda p: p * np.nan, PARAMS["encoder"]),
    "head": jax.tree.map(lambda p: np.full(p.shape, 2.0**15), PARAMS["head"]),
  }
  new = apply(state, scaled)
  assert int(new.step) == 1
  assert np.asarray(new.params["head"]["bias"]).tolist() == [0.5, 0.5]


def test_frozen_parameters_in_a_compiled_step_have_no_gradient():
  rows, width = 8, 128
  kernels = {str(i): jnp.ones((width, width)) for i in range(2)}
  params = {"frozen": kernels, "head": jnp.ones(width)}

  def loss_fn(params, x):
    for kernel in params["frozen"].values():
      x = jnp.tanh(x @ kernel)
    return jnp.mean((x @ params["head"]) ** 2)

  def temporary_bytes(tx):
    state = fs.TrainState.create(apply_fn=None, params=params, tx=tx)
    compiled = (
      jax.jit(lambda state, x: state.minimize(loss_fn, x)[0], donate_argnums=0)
      .lower(state, jnp.ones((rows, width)))
      .compile()
    )
    return compiled.memory_analysis().temp_size_in_bytes

  gradient_bytes = 4 * width**2
  assert temporary_bytes(optax.adam(0.1)) > gradient_bytes
  # Activations, and no gradient of a kernel.
  frozen = fs.freeze(optax.adam(0.1), ["frozen"])
  assert temporary_bytes(frozen) < gradient_bytes / 4


def test_replicas_do_not_exchange_the_gradients_of_frozen_parameters():
  strategy = fs.Strategy()
  state = fs.TrainState.create(
    apply_fn=None,
    params=PARAMS,
    tx=fs.freeze(optax.sgd(0.1), ["encoder"]),
    strategy=strategy,
  )
  n = strategy.num_replicas_in_sync
  batch = strategy.shard_batch(np.ones((2 * n, 4), np.float32))

  def step(state, x):
    return state.minimize(loss_fn, x)[0]

  text = strategy.jit(step).lower(state, batch).as_text()
  sums = re.findall(r"stablehlo.all_reduce.*?-> tensor<(\S+)>", text, re.S)
  assert sorted(sums) == ["2xf32", "3x2xf32"]


def test_extra_arguments_reach_the_inner_optimizer():
  tx = optax.chain(
    optax.identity(),
    fs.freeze(
      fs.scale_learning_rates(optax.polyak_sgd(), [("head", 0.5)]), ["encoder"]
    ),
  )
  state = create(tx)
  # `minimize` passes `value`, which the optimizer needs.
  new = step(state)
  value, grads = jax.jit(jax.value_and_grad(loss_fn))(PARAMS)
  norm = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads["head"]))
  rate = 0.5 * jnp.minimum(1.0, value / norm)
  np.testing.assert_allclose(
    new.params["head"]["bias"],
    PARAMS["head"]["bias"] - rate * grads["head"]["bias"],
    rtol=1e-6,
  )


@pytest.mark.parametrize(
  ["given", "message"],
  [
    (
      ["^encodr/"],
      r"patterns\[0\]='\^encodr/' matches no parameter.*'encoder'",
    ),
    ([""], "freezes all parameters: encoder/bias"),
    (["encoder", "head"], "freezes all parameters"),
    (["encoder", "encoder/k"], r"patterns\[1\]='encoder/k' is never used"),
  ],
)
def test_patterns_that_do_not_fit_the_parameters_raise(given, message):
  with pytest.raises(patterns.PatternError, match=message):
    create(fs.freeze(optax.sgd(0.1), given))


@pytest.mark.parametrize(
  ["given", "message"],
  [
    ("^encoder/", "must be a sequence of regular expressions"),
    ([1], r"patterns\[0\] must be a regular expression, got 1"),
    (["("], r"patterns\[0\]: '\(' is not a regex"),
    (["a", "a"], r"patterns\[1\]: 'a' is given twice"),
    ([], "must have at least one pattern"),
  ],
)
def test_invalid_patterns_raise(given, message):
  with pytest.raises(ValueError, match=message):
    fs.freeze(optax.sgd(0.1), given)


def test_freeze_and_rates_are_inside_of_lookahead():
  tx = fs.freeze(
    fs.scale_learning_rates(optax.sgd(0.5), [("head", 2.0)]), ["encoder"]
  )
  params = optax.LookaheadParams.init_synced(PARAMS)
  state = fs.TrainState.create(
    apply_fn=None, params=params, tx=optax.lookahead(tx, 1, 1.0)
  )
  state = apply(state, jax.tree.map(np.ones_like, PARAMS))
  tree_equality.assert_trees_equal(
    state.params.slow["encoder"], PARAMS["encoder"]
  )
  assert np.asarray(state.params.slow["head"]["bias"]).tolist() == [0.0, 0.0]
  scaled = fs.scale_learning_rates(
    optax.lookahead(optax.sgd(0.5), 1, 1.0), [("head", 2.0)]
  )
  frozen = fs.freeze(optax.lookahead(optax.sgd(0.5), 1, 1.0), ["head"])
  for around in (scaled, frozen):
    with pytest.raises(ValueError, match="the fast optimizer"):
      fs.TrainState.create(apply_fn=None, params=params, tx=around)


# -- Learning rates by pattern.


@pytest.mark.parametrize(
  "create_tx",
  [
    lambda rate: optax.adamw(rate, weight_decay=0.5),
    # A custom optimizer, with a schedule.
    lambda rate: optax.chain(
      optax.scale_by_rms(),
      optax.scale_by_learning_rate(optax.linear_schedule(rate, 0.0, 4)),
    ),
  ],
  ids=["adamw", "custom"],
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
  for a, b in zip(
    jax.tree.leaves(scaled.params), jax.tree.leaves(plain.params), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-6)
  # A checkpoint without other rates has the same optimizer state.
  tree_equality.assert_trees_equal(
    create(create_tx(0.125)).opt_state,
    create(fs.scale_learning_rates(create_tx(0.125), factors)).opt_state,
  )


@pytest.mark.parametrize(
  ["given", "message"],
  [
    ([("haed", 2.0)], r"factors\[0\]='haed' matches no parameter.*'head'"),
    (
      [("head", 2.0), ("head/bias", 3.0)],
      r"factors\[1\]='head/bias' is never used",
    ),
  ],
)
def test_factors_that_do_not_fit_the_parameters_raise(given, message):
  with pytest.raises(patterns.PatternError, match=message):
    create(fs.scale_learning_rates(optax.sgd(0.1), given))


@pytest.mark.parametrize(
  ["given", "message"],
  [
    (("head", 2.0), r"must be a sequence of \(pattern, factor\) pairs"),
    ([("head", 0.0)], r"factors\[0\] must be .*above 0"),
    ([("head", "2")], r"factors\[0\] must be a"),
    ([], "must have at least one pair"),
  ],
)
def test_invalid_factors_raise(given, message):
  with pytest.raises(ValueError, match=message):
    fs.scale_learning_rates(optax.sgd(0.1), given)


def test_rates_around_freeze_raise():
  frozen = fs.freeze(optax.sgd(0.1), ["encoder"])
  with pytest.raises(ValueError, match="call freeze last"):
    fs.scale_learning_rates(frozen, [("head", 2.0)])


def test_rates_to_log():
  assert parameter_groups.rates(0.5, [("head/", 10.0)]) == {
    "learning_rate": 0.5,
    "learning_rate/head/": 5.0,
  }
