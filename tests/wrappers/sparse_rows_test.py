"""LossScale and CrossShard with gradients that are rows of a table."""

from flax.training import dynamic_scale as flax_dynamic_scale
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sparse_states

import flaxshard as fs

EIGHT = fs.Strategy()
GROUPS = ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("rows", [sparse_states.ROWS, 3])
@pytest.mark.filterwarnings("ignore:CrossShard")
def test_groups_reduce_rows_as_they_reduce_arrays(rows, reduction):
  """For 4 replicas with two ids each, 3 rows are summed as an array."""

  def step(state, batch):
    batch = {**batch, "ids": batch["ids"] % 3}
    return state.minimize(sparse_states.loss_fn, batch)

  wrappers = [fs.CrossShard(reduction, GROUPS)]
  states = []
  for sparse in ([], ["table"]):
    state = fs.TrainState.create(
      apply_fn=None,
      params=sparse_states.params(rows=rows),
      tx=optax.adagrad(0.1),
      wrappers=wrappers,
      strategy=EIGHT,
      sparse=sparse,
    )
    jitted = EIGHT.jit(step)
    for i in range(2):
      batch = EIGHT.shard_batch(sparse_states.batch(i))
      state, _ = jitted(state, batch)
    states.append(state)
  dense, new = (
    [np.asarray(shard.data) for shard in s.params["table"].addressable_shards]
    for s in states
  )
  np.testing.assert_allclose(new, dense, rtol=1e-6, atol=1e-6)
  assert not np.allclose(new[0], new[1])
  np.testing.assert_array_equal(new[0], new[2])


@pytest.mark.slow
def test_dynamic_scale_is_that_of_flax_for_the_same_overflows():
  """Ids that occur twice: only the sum of their rows overflows float32."""
  ids = jnp.array([3, 3, 1])
  weights = [1.0, 3e38, 1.0, np.nan, 1.0, 1.0, 1.0, 1e37]

  def loss_fn(params, weight):
    return (params["table"][ids] * weight).sum()

  rule = fs.DynamicLossScale(initial_scale=4.0, growth_interval=2)
  state = fs.TrainState.create(
    apply_fn=None,
    params={"table": jnp.ones((5, 2))},
    tx=optax.sgd(1e-3),
    wrappers=[fs.LossScale(rule)],
    sparse=["table"],
  )
  # Flax counts the finite steps before the one that grows.
  scale = flax_dynamic_scale.DynamicScale(
    growth_interval=1, scale=jnp.float32(4)
  )
  step = jax.jit(lambda state, weight: state.minimize(loss_fn, weight)[0])
  params = {"table": jnp.ones((5, 2))}
  for weight in weights:
    before = state.params["table"]
    state = step(state, weight)
    scale, finite, _, grads = scale.value_and_grad(loss_fn)(params, weight)
    found = state.wrapper_states["loss_scale"]
    assert float(found.scale) == float(scale.scale)
    assert int(found.good_steps) == int(scale.fin_steps)
    if finite:
      new = optax.apply_updates(
        params, jax.tree.map(lambda g: -1e-3 * g, grads)
      )
      params = new
    np.testing.assert_allclose(
      state.params["table"], params["table"], rtol=1e-6
    )
    assert bool(finite) != bool((before == state.params["table"]).all())
  assert 0 < int(state.metrics()["skipped_steps"]) < len(weights)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_models_in_16_bits_have_small_gradients_of_rows(dtype):
  """Without a scale 1e-8 is zero in float16."""
  table = jnp.ones((6, 4))
  ids = jnp.array([2, 5, 2])

  def loss_fn(params):
    rows = params["table"].astype(dtype)[ids]
    return (rows.astype(jnp.float32) * 1e-8).sum()

  state = fs.TrainState.create(
    apply_fn=None,
    params={"table": table},
    tx=optax.sgd(1e6),
    wrappers=[fs.LossScale("dynamic")],
    sparse=["table"],
  )
  loss, grads = jax.jit(lambda s: s.value_and_grad(loss_fn))(state)
  assert fs.is_indexed_slices(grads["table"])
  assert grads["table"].dtype == jnp.float32
  wanted = np.zeros((6, 4))
  wanted[2], wanted[5] = 2e-8, 1e-8
  np.testing.assert_allclose(grads["table"].to_dense(), wanted, rtol=2e-2)
  new, _ = jax.jit(lambda s: s.minimize(loss_fn))(state)
  np.testing.assert_allclose(new.params["table"], 1 - 1e6 * wanted, rtol=1e-3)
  assert float(loss) == pytest.approx(1.2e-7)
