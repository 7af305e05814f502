"""The replica context, and what it reduces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.replicas import context as replica_context

P = jax.sharding.PartitionSpec

EIGHT = fs.Strategy()
SPATIAL = fs.Strategy(mesh_shape={"replica": 2, "model": 4})
ONE = fs.Strategy(devices=jax.devices()[:1])


def test_no_context_outside_of_run():
  assert fs.get_replica_context() is None
  with pytest.raises(KeyError):
    EIGHT.run(lambda: {}["a"])
  assert fs.get_replica_context() is None


@pytest.mark.parametrize("strategy", [EIGHT, SPATIAL])
def test_all_reduce_and_all_gather(strategy):
  n = strategy.num_replicas_in_sync

  def fn(x):
    context = fs.get_replica_context()
    mine = x + context.replica_id_in_sync_group
    return {
      "count": context.num_replicas_in_sync,
      "sum": context.all_reduce("sum", mine),
      "mean of integers": context.all_reduce("mean", mine),
      "true": context.all_reduce("sum", mine > 0),
      "tree": context.all_reduce("mean", {"a": mine * 1.5, "b": None}),
      "gathered": context.all_gather(jnp.stack([mine, -mine])[None], -1),
    }

  out = strategy.run(fn, args=(np.int32(0),))
  ids = np.arange(n)
  wanted = {
    "count": n,
    "sum": ids.sum(),
    "mean of integers": ids.mean(),
    "true": n - 1,
    "tree": {"a": 1.5 * ids.mean(), "b": None},
    "gathered": [np.stack([ids, -ids], 1).ravel()],
  }
  fetched = jax.device_get(out)
  for i in range(n):
    mine = jax.tree.map(
      lambda x, i=i: np.asarray(x[i]).tolist(),
      fetched,
      is_leaf=lambda x: isinstance(x, fs.PerReplica),
    )
    assert mine == jax.tree.map(lambda x: np.asarray(x).tolist(), wanted)
  assert out["mean of integers"].value.dtype == jnp.float32
  assert out["sum"].value.dtype == jnp.int32


@pytest.mark.parametrize(
  ("fn", "error", "message"),
  [
    (lambda c: c.all_reduce("max", 1), ValueError, "'max'"),
    (lambda c: c.all_reduce("average", 1), ValueError, "'sum', 'mean'"),
    (lambda c: c.all_gather(jnp.ones(2), 1), ValueError, "axis=1"),
    (lambda c: c.all_gather(1.0, 0), ValueError, r"shape \(\)"),
  ],
)
def test_invalid_collective_raises(fn, error, message):
  with pytest.raises(error, match=message):
    EIGHT.run(lambda: fn(fs.get_replica_context()))


def test_fold_in_gives_each_replica_its_own_key():
  key, raw = jax.random.key(3), jax.random.PRNGKey(4)
  keys = {"typed": key, "raw": raw, "many": jax.random.split(key, (2, 3))}

  def fold_in(keys):
    # Workers fold other numbers into keys.
    with replica_context.number_from(16):
      later = fs.get_replica_context().fold_in(keys["typed"])
    return fs.get_replica_context().fold_in(keys), later

  folded, later = EIGHT.run(fold_in, args=(keys,))
  for i in range(8):
    assert folded["typed"][i] == jax.random.fold_in(key, i)
    assert (folded["raw"][i] == jax.random.fold_in(raw, i)).all()
    assert folded["many"][i].shape == (2, 3)
    wanted = jax.random.fold_in(keys["many"][1, 2], i)
    assert folded["many"][i][1, 2] == wanted
    assert later[i] == jax.random.fold_in(key, 16 + i)
  with replica_context.number_from(16):
    assert fs.get_replica_context() is None


def test_all_reduce_of_bfloat16_over_logical_devices():
  # XLA's CPU compiler aborts the process on a bfloat16 sum here.
  def fn(x):
    context = fs.get_replica_context()
    mine = x * (context.replica_id_in_sync_group + 1)
    return context.all_reduce("sum", mine.astype(jnp.bfloat16))

  n = SPATIAL.num_replicas_in_sync
  out = SPATIAL.run(fn, args=(np.ones((2, 2), np.float32),))
  assert out.value.dtype == jnp.bfloat16
  assert np.asarray(out[0], np.float32).tolist() == [[n * (n + 1) / 2] * 2] * 2


def test_reduce_gradients_averages_gradients_and_takes_largest_statistics():
  def fn():
    number = fs.get_replica_context().replica_id_in_sync_group
    grads = {
      "_overwrite_with_gradient": {"amax": number * 1.0},
      "params": {"w": number * 2.0, "frozen": None},
    }
    reduced = replica_context.reduce_gradients("mean", grads)
    assert reduced["params"]["frozen"] is None
    return reduced

  reduced = EIGHT.run(fn)
  amax = reduced["_overwrite_with_gradient"]["amax"]
  assert np.asarray(amax).tolist() == [7.0] * 8
  assert np.asarray(reduced["params"]["w"]).tolist() == [7.0] * 8


def test_mean_collection_averages_floats_and_keeps_others():
  key = jax.random.key(5)

  def fn(context):
    number = context.replica_id_in_sync_group
    return replica_context.mean_collection(
      {
        "mean": number * 1.0,
        "half": (number * 2).astype(jnp.bfloat16),
        "count": number + 3,
        "byte": (number + 250).astype(jnp.uint8),
        "flag": number == 0,
        "key": jax.random.fold_in(key, number),
      }
    )

  out = EIGHT.run(lambda: fn(fs.get_replica_context()))
  wanted = {
    "mean": np.float32(3.5),
    "half": jnp.bfloat16(7),
    "count": np.int32(3),
    "byte": np.uint8(250),
    "flag": np.bool_(True),
    "key": jax.random.fold_in(key, 0),
  }
  for i in (0, 7):
    for name, value in wanted.items():
      assert out[name][i].dtype == value.dtype, name
      assert out[name][i] == value, name
