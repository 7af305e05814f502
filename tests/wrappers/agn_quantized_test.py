"""AGN with quantized commits: values, error feedback, bytes, and errors."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard import compiled
from flaxshard.core import block_quantization

RNG = np.random.default_rng(0)
PARAMS = {
  "w": RNG.normal(size=(37, 53)).astype(np.float32),
  "b": np.zeros(53, np.float32),
  "scale": np.float32(1.0),
}
FORMATS = block_quantization.FORMATS


def step(state, targets):
  def loss_fn(params):
    errors = jax.tree.map(lambda p, t: ((p - t) ** 2).sum(), params, targets)
    return sum(jax.tree.leaves(errors)) / 2

  return state.minimize(loss_fn)


@functools.cache
def strategy_of(replicas):
  return fs.Strategy(devices=jax.devices()[:replicas])


@functools.cache
def targets_of(replica):
  """Returns the parameters at which the loss of a replica is smallest."""
  rng = np.random.default_rng(replica)
  return jax.tree.map(
    lambda p: rng.normal(size=np.shape(p)).astype(np.float32), PARAMS
  )


def distribute(strategy):
  return strategy.distribute_values_from_function(
    lambda context: targets_of(context.replica_id_in_sync_group)
  )


def gradients_of(name, replicas):
  """Returns the gradients of the replicas at `PARAMS`."""
  return np.stack([PARAMS[name] - targets_of(k)[name] for k in range(replicas)])


def create(strategy, *args, params=PARAMS, rate=0.1, **kwargs):
  return fs.TrainState.create(
    apply_fn=None,
    params=params,
    tx=optax.sgd(rate),
    wrappers=[fs.AGN(*args, **kwargs)],
    strategy=strategy,
  )


def run(state, strategy, steps):
  targets = distribute(strategy)
  train = strategy.jit(step)
  for _ in range(steps):
    state, _ = train(state, targets)
  return state


def quantize(rows, fmt):
  data = block_quantization.encode(jnp.asarray(rows), fmt)
  return np.asarray(block_quantization.decode(data, rows.shape[-1], fmt))


@pytest.mark.parametrize(
  ("fmt", "op"),
  [
    ("bfloat16", "mean"),
    pytest.param("int8", "mean", marks=pytest.mark.slow),
    pytest.param("int4", "sum", marks=pytest.mark.slow),
  ],
)
def test_a_commit_equals_its_restatement(fmt, op):
  strategy = strategy_of(4)
  state = run(create(strategy, 1, op, commit_dtype=fmt), strategy, 1)
  grads = gradients_of("b", 4)
  # 53 numbers are 4 parts of 14, with 3 zeros of padding.
  rows = np.pad(grads, ((0, 0), (0, 3))).reshape(4, 4, 14)
  sent = quantize(rows, fmt)
  total = sent.sum(0) / (4 if op == "mean" else 1)
  reduced = quantize(total, fmt)
  wanted = PARAMS["b"] - 0.1 * reduced.reshape(-1)[:53]
  np.testing.assert_allclose(state.params["b"], wanted, atol=1e-6)
  remainder = rows - sent
  for k in range(4):
    remainder[k, k] += (total - reduced)[k] * (4 if op == "mean" else 1)
  np.testing.assert_allclose(
    state.wrapper_states["agn"].grad_accum["b"],
    remainder.reshape(4, -1)[:, :53],
    atol=1e-5,
  )
  # A scalar is sent as it is.
  scale = getattr(np, op)(gradients_of("scale", 4))
  assert float(state.params["scale"]) == pytest.approx(1 - 0.1 * scale, 1e-5)
  assert not np.any(state.wrapper_states["agn"].grad_accum["scale"])


@pytest.mark.parametrize(
  ("fmt", "replicas"),
  [
    ("int8", 1),
    pytest.param("int4", 3, marks=pytest.mark.slow),
    pytest.param("bfloat16", 8, marks=pytest.mark.slow),
    ("int8", 8),
  ],
)
def test_center_and_remainders_together_lose_nothing(fmt, replicas):
  # The gradients do not depend on the parameters: their sum is known.
  def linear_step(state, targets):
    return state.minimize(
      lambda p: jax.tree.reduce(
        jnp.add, jax.tree.map(lambda p, t: (p * t).sum(), p, targets)
      )
    )

  strategy = strategy_of(replicas)
  targets = distribute(strategy)
  state = create(strategy, 2, "mean", commit_dtype=fmt)
  train = strategy.jit(linear_step)
  for _ in range(6):
    state, _ = train(state, targets)
  committed = (PARAMS["w"] - np.asarray(state.params["w"])) / 0.1 * 2
  waiting = np.mean(state.wrapper_states["agn"].grad_accum["w"], 0)
  gradient = np.mean([targets_of(k)["w"] for k in range(replicas)], 0)
  np.testing.assert_allclose(committed + waiting, 6 * gradient, atol=2e-4)
  if replicas > 1:
    assert np.any(waiting)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS)
def test_reaches_the_mean_of_the_replicas_optima(fmt):
  strategy = strategy_of(8)
  state = create(strategy, 2, "mean", commit_dtype=fmt, rate=0.3)
  state = run(state, strategy, 80)
  optimum = np.mean([targets_of(k)["w"] for k in range(8)], 0)
  error = np.abs(np.asarray(state.params["w"]) - optimum).max()
  # One rounding of a commit is the error that is left.
  assert error < {"bfloat16": 5e-3, "int8": 1e-2, "int4": 0.2}[fmt]


@pytest.mark.slow
def test_all_replicas_continue_from_the_same_center():
  strategy = strategy_of(8)
  state = run(
    create(
      strategy,
      2,
      "mean",
      commit_dtype="int8",
      commit_delta=True,
      outer_tx=optax.sgd(0.7, momentum=0.9, nesterov=True),
    ),
    strategy,
    4,
  )
  for name, local in state.wrapper_states["agn"].local_params.items():
    for row in np.asarray(local):
      np.testing.assert_array_equal(row, state.params[name])


@pytest.mark.slow
def test_a_replica_of_several_devices_quantizes_each_shard():
  strategy = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  model = nn.Dense(64)
  x = np.ones((8, 32), np.float32)

  def train_step(state, x):
    return state.minimize(
      lambda p: (state.apply_fn({"params": p}, x) ** 2).mean()
    )

  losses = {}
  for fmt in (None, "int8"):
    state = fs.create_train_state(
      model,
      jax.random.key(0),
      x,
      optax.sgd(0.1),
      wrappers=[fs.AGN(1, "mean", commit_dtype=fmt)],
      strategy=strategy,
      rules=[
        ("kernel", jax.sharding.PartitionSpec(None, "model")),
        (".*", jax.sharding.PartitionSpec()),
      ],
    )
    train = strategy.jit(train_step)
    for _ in range(10):
      state, loss = train(state, strategy.shard_batch(x))
    losses[fmt] = float(loss.mean())
    assert state.params["kernel"].sharding.spec[1] == "model"
  assert losses["int8"] == pytest.approx(losses[None], rel=2e-2)


def link_bytes(dtype):
  """Returns the bytes that a replica sends for one commit, in a ring."""
  strategy = strategy_of(8)
  params = {"w": np.ones((512, 64), np.float32), "b": np.ones(64, np.float32)}
  state = create(strategy, 2, "mean", params=params, commit_dtype=dtype)

  def decay(state):
    return state.minimize(lambda p: (p["w"] ** 2).sum() + p["b"].sum())

  program = strategy.jit(decay).lower(state).compile()
  found = compiled.collectives(program, strategy.mesh)
  assert all(c.in_commit and c.purpose == "gradients" for c in found)
  return sum(c.link_bytes for c in found)


@pytest.mark.parametrize(
  ("dtype", "share"),
  [
    pytest.param("bfloat16", 0.5, marks=pytest.mark.slow),
    ("int8", 0.254),
    pytest.param("int4", 0.129, marks=pytest.mark.slow),
  ],
)
def test_bytes_of_a_commit_relative_to_float32(dtype, share):
  assert link_bytes(dtype) / link_bytes(None) == pytest.approx(share, abs=1e-3)


def test_a_nonfinite_commit_reaches_the_center():
  # Without LossScale nothing skips such a step: it must not vanish.
  strategy = strategy_of(4)
  state = create(strategy, 1, "mean", commit_dtype="int8")

  def nan_on_one(state, scale):
    return state.minimize(lambda p: (p["w"] * scale).sum())

  scales = strategy.distribute_values_from_function(
    lambda context: np.float32(
      np.nan if context.replica_id_in_sync_group == 2 else 1
    )
  )
  state, _ = strategy.jit(nan_on_one)(state, scales)
  assert np.isnan(state.params["w"]).all()


@pytest.mark.parametrize("fmt", ["bfloat16", "int4"])
def test_a_nonfinite_commit_is_not_in_later_ones(fmt):
  strategy = strategy_of(4)
  state = create(
    strategy,
    1,
    "mean",
    commit_dtype=fmt,
    outer_tx=optax.apply_if_finite(optax.sgd(0.1), 3),
  )

  def scaled(state, scales):
    return state.minimize(lambda p: (p["w"] * scales).sum())

  train = strategy.jit(scaled)
  for replica_2 in (np.nan, np.inf, 1):
    scales = strategy.distribute_values_from_function(
      lambda context, x=replica_2: np.float32(
        x if context.replica_id_in_sync_group == 2 else 1
      )
    )
    state, _ = train(state, scales)
  # Two commits were skipped, and the third is applied.
  np.testing.assert_allclose(state.params["w"], PARAMS["w"] - 0.1, atol=1e-3)
  assert np.isfinite(state.wrapper_states["agn"].grad_accum["w"]).all()


@pytest.mark.parametrize(
  ("kwargs", "error", "facts"),
  [
    ({"commit_dtype": "int3"}, ValueError, ("commit_dtype", "int3", "int4")),
    ({"commit_dtype": 8}, (ValueError, TypeError), ("commit_dtype", "8")),
    (
      {"commit_dtype": "int8", "commit": "sequential"},
      ValueError,
      ("commit_dtype", "sequential", "mean"),
    ),
  ],
)
def test_invalid_formats_raise(kwargs, error, facts):
  with pytest.raises(error) as raised:
    fs.AGN(2, **{"commit": "mean"} | kwargs)
  assert all(fact in str(raised.value) for fact in facts)


def test_tables_with_sparse_updates_raise():
  params = {"table": np.ones((64, 4), np.float32)}
  with pytest.raises(ValueError, match=r"commit_dtype.*sparse_rows.*'int8'"):
    fs.TrainState.create(
      apply_fn=None,
      params=params,
      tx=optax.sgd(0.1),
      wrappers=[fs.AGN(2, "mean", commit_dtype="int8")],
      strategy=strategy_of(4),
      sparse=["table"],
    )


def test_config_has_the_format():
  wrapper = fs.AGN(10, "mean", commit_dtype="int4")
  config = fs.wrappers.to_config([wrapper])
  assert dict(config[0][1])["commit_dtype"] == "int4"
  assert fs.wrappers.from_config(config) == (wrapper,)


def test_frozen_parameters_are_not_committed():
  strategy = strategy_of(2)
  state = fs.TrainState.create(
    apply_fn=None,
    params=PARAMS,
    tx=fs.freeze(optax.sgd(0.1), ["^w"]),
    wrappers=[fs.AGN(1, "mean", commit_dtype="int8")],
    strategy=strategy,
  )
  state = run(state, strategy, 1)
  np.testing.assert_array_equal(state.params["w"], PARAMS["w"])
  assert state.wrapper_states["agn"].grad_accum["w"] is None
  wanted = PARAMS["b"] - 0.1 * gradients_of("b", 2).mean(0)
  np.testing.assert_allclose(state.params["b"], wanted, atol=2e-3)
