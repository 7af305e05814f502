"""Strategy.run with TrainStates that have per-replica leaves."""

import functools

import compilations
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from regression import batch
from regression import create
from regression import sharded
from regression import train_step
from regression import X

import flaxshard as fs

EIGHT = fs.Strategy()


class Model(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.BatchNorm(use_running_average=False, momentum=0.5)(x)
    return nn.Dense(1)(x)[:, 0]


SGD = optax.sgd(0.1)


@functools.cache
def batch_norm_state():
  variables = Model().init(jax.random.key(0), X[0])
  return fs.TrainState.create(
    apply_fn=Model().apply,
    params=variables["params"],
    tx=SGD,
    wrappers=[fs.LossScale("dynamic")],
    batch_stats=variables["batch_stats"],
  )


def batch_norm_step(state, batch):
  def loss_fn(params):
    variables = {"params": params, "batch_stats": state.batch_stats}
    out, replaced = state.apply_fn(
      variables, batch["x"], mutable=["batch_stats"]
    )
    return ((out - batch["y"]) ** 2).mean(), replaced

  (loss, replaced), grads = state.value_and_grad(loss_fn, has_aux=True)
  return state.apply_gradients(grads=grads, **replaced), loss


@pytest.mark.slow
def test_per_replica_statistics_stay_apart_and_are_averaged_when_saved(
  tmp_path,
):
  strategy, n, state = EIGHT, 8, batch_norm_state()
  own = strategy.distribute_values_from_function(lambda _: state.batch_stats)
  state = state.replace(batch_stats=own)
  parts = X.reshape(3, n, 16 // n, 8)
  wanted = np.zeros((n, 8))
  for i in range(2):
    state, _ = strategy.run(batch_norm_step, args=(state, sharded(strategy, i)))
    mean = state.batch_stats["BatchNorm_0"]["mean"]
    wanted = 0.5 * wanted + 0.5 * parts[i].mean(1)
    assert isinstance(mean, fs.PerReplica)
    np.testing.assert_allclose(np.asarray(mean), wanted, rtol=1e-4, atol=1e-6)
  plain = state.without_wrappers()
  mean = plain.batch_stats["BatchNorm_0"]["mean"]
  np.testing.assert_allclose(mean, wanted.mean(0), rtol=1e-4, atol=1e-6)

  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(2, state)
    restored = checkpointer.restore(state)
  args = restored, sharded(strategy, 2)
  mean = restored.batch_stats["BatchNorm_0"]["mean"]
  np.testing.assert_allclose(
    np.asarray(mean), [wanted.mean(0)] * n, rtol=1e-4, atol=1e-6
  )
  with compilations.count() as compiled:
    strategy.run(batch_norm_step, args=args)
  assert compiled.total == 0


def test_per_replica_keys():
  state = create(EIGHT, tx=SGD, dropout=jnp.zeros(()))
  state = state.replace(
    dropout=EIGHT.distribute_values_from_function(
      lambda context: jax.random.key(context.replica_id_in_sync_group)
    )
  )

  def step(state):
    key, mine = jax.random.split(state.dropout)
    return state.replace(dropout=key), jax.random.uniform(mine)

  new, drawn = EIGHT.run(step, args=(state,))
  for i in (0, 5):
    key, mine = jax.random.split(jax.random.key(i))
    assert new.dropout[i] == key
    assert float(drawn[i]) == float(jax.random.uniform(mine))


def test_parameters_with_per_replica_moments_must_be_per_replica():
  # Updates computed from per-replica moments differ between replicas.
  own = EIGHT.distribute_values_from_function
  state = create(EIGHT)
  state = state.replace(opt_state=own(lambda _: state.opt_state))
  args = state, sharded(EIGHT, 0)
  with pytest.raises(
    ValueError, match=r"own data: 0/params/w1, 0/params/w2\. "
  ):
    EIGHT.run(train_step, args=args)
  state = state.replace(params=own(lambda _: state.params))
  new, _ = EIGHT.run(train_step, args=(state, args[1]))
  wanted, _ = jax.jit(train_step)(create(), batch(0))
  assert jax.tree.structure(new) == jax.tree.structure(state)
  np.testing.assert_allclose(
    new.params["w1"][3], wanted.params["w1"], atol=1e-6
  )


def test_one_leaf_of_a_collection_may_be_per_replica():
  statistics = dict(batch_norm_state().batch_stats["BatchNorm_0"])
  mean = statistics["mean"]
  statistics["mean"] = EIGHT.distribute_values_from_function(lambda _: mean)
  state = batch_norm_state().replace(batch_stats={"BatchNorm_0": statistics})
  new, _ = EIGHT.run(batch_norm_step, args=(state, sharded(EIGHT, 0)))
  assert jax.tree.structure(new) == jax.tree.structure(state)
  got = new.batch_stats["BatchNorm_0"]
  parts = X[0].reshape(8, 2, 8)
  np.testing.assert_allclose(
    np.asarray(got["mean"]), 0.5 * parts.mean(1), rtol=1e-4, atol=1e-6
  )
  wanted = 0.5 + 0.5 * parts.var(1).mean(0)
  np.testing.assert_allclose(got["var"], wanted, rtol=1e-4, atol=1e-6)
