"""Operations on per-replica values: reduce, gather, and others."""

import compilations
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxshard as fs

P = jax.sharding.PartitionSpec
NamedSharding = jax.sharding.NamedSharding

EIGHT = fs.Strategy()
SPLIT = fs.Strategy(mesh_shape={"replica": 2, "model": 4})
EXPLICIT = fs.Strategy(axis_type=jax.sharding.AxisType.Explicit)
STRATEGIES = [SPLIT, EXPLICIT]


def rows(context):
  """Returns a `[2, 3]` array that differs per replica."""
  first = 6 * context.replica_id_in_sync_group
  return np.arange(first, first + 6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_from_function(strategy):
  n = strategy.num_replicas_in_sync
  made = strategy.distribute_values_from_function(
    lambda context: {
      "rows": rows(context),
      "id": context.replica_id_in_sync_group,
      "of": context.num_replicas_in_sync,
      "key": jax.random.key(context.replica_id_in_sync_group),
      "none": None,
    }
  )
  wanted = np.arange(6.0 * n).reshape(n, 2, 3)
  np.testing.assert_array_equal(np.asarray(made["rows"]), wanted)
  assert np.asarray(made["id"]).tolist() == list(range(n))
  assert np.asarray(made["of"]).tolist() == [n] * n
  assert made["none"] is None
  last = jax.random.key_data(made["key"][n - 1])
  np.testing.assert_array_equal(
    last, jax.random.key_data(jax.random.key(n - 1))
  )
  split = NamedSharding(strategy.mesh, P("replica"))
  assert made["rows"].value.sharding.is_equivalent_to(split, 3)
  assert made["rows"].value.dtype == jnp.float32


def test_replica_sees_its_own_row():
  made = EIGHT.distribute_values_from_function(rows)
  sums = EIGHT.run(lambda x: x.sum(), args=(made,))
  wanted = np.arange(48.0).reshape(8, 6).sum(1)
  np.testing.assert_array_equal(np.asarray(sums), wanted)


@pytest.mark.parametrize(
  ("value_fn", "error", "message"),
  [
    (
      lambda c: {"a": np.ones(c.replica_id_in_sync_group)},
      ValueError,
      r"replica 1 differs from replica 0 at a: shape \(1,\)",
    ),
    (
      lambda c: {str(c.replica_id_in_sync_group): 1},
      ValueError,
      "at 0: missing",
    ),
    (lambda c: {"n": 2**31}, ValueError, r"value\[n\] is int64.* 2147483648"),
    (lambda c: np.uint32([5, 2**31]).astype(int), ValueError, "do not fit"),
  ],
)
def test_invalid_value_fn_raises(value_fn, error, message):
  with pytest.raises(error, match=message):
    EIGHT.distribute_values_from_function(value_fn)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reduce_over_replicas_and_axes(strategy):
  n = strategy.num_replicas_in_sync
  value = strategy.distribute_values_from_function(rows)
  array = np.arange(6.0 * n, dtype=np.float32).reshape(n, 2, 3)
  for op, fn in ("sum", np.sum), ("mean", np.mean):
    got = strategy.reduce(op, {"a": value})["a"]
    np.testing.assert_allclose(got, fn(array, axis=0), rtol=1e-6)
    for axis in (0, 1, -1):
      got = strategy.reduce(op, value, axis=axis)
      wanted = fn(array, axis=(0, axis + 1 if axis >= 0 else axis))
      np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_integers_that_do_not_fit_raise():
  counts = fs.PerReplica({"n": np.full((8, 1), -(2**40))})
  for call in (
    lambda: EIGHT.reduce("mean", counts),
    lambda: EIGHT.gather(counts, 0),
    lambda: EIGHT.local_results(counts),
  ):
    with pytest.raises(ValueError, match=r"-1099511627776.* do not fit int32"):
      call()


def test_reduce_of_integers_and_booleans():
  ids = EIGHT.distribute_values_from_function(
    lambda context: np.int32(context.replica_id_in_sync_group)
  )
  total, mean = EIGHT.reduce("sum", ids), EIGHT.reduce("mean", ids)
  assert (int(total), total.dtype) == (28, jnp.int32)
  assert (float(mean), mean.dtype) == (3.5, jnp.float32)
  odd = jax.tree.map(lambda x: x % 2 == 1, ids)
  assert int(EIGHT.reduce("sum", odd)) == 4


def test_mean_of_replicated_value():
  tree = {"a": np.arange(3.0), "b": 2.0}
  same = EIGHT.reduce("mean", tree)
  assert same["a"] is tree["a"] and same["b"] == 2.0
  assert float(EIGHT.reduce("mean", np.arange(3.0), axis=0)) == 1.0
  with pytest.raises(ValueError, match=r"value\[a\] must be a PerReplica"):
    EIGHT.reduce("sum", tree)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gather_concatenates_rows(strategy):
  n = strategy.num_replicas_in_sync
  value = strategy.distribute_values_from_function(rows)
  array = np.arange(6.0 * n).reshape(n, 2, 3)
  for axis in (0, 1, -1):
    got = strategy.gather([value], axis)[0]
    np.testing.assert_array_equal(got, np.concatenate(array, axis))


@pytest.mark.parametrize(
  ("call", "error", "message"),
  [
    (lambda v: EIGHT.reduce("max", v), ValueError, "'max'"),
    (lambda v: EIGHT.reduce("sum", v, axis=2), ValueError, "axis=2"),
    (lambda v: EIGHT.gather({"a": 1.0}, 0), ValueError, r"value\[a\] must be"),
    (lambda v: SPLIT.reduce("sum", v), ValueError, "2 rows"),
    (
      lambda v: SPLIT.local_results({"a": v}),
      ValueError,
      r"value\[a\].* 2 rows",
    ),
  ],
)
def test_invalid_reduce_or_gather_raises(call, error, message):
  with pytest.raises(error, match=message):
    call(EIGHT.distribute_values_from_function(rows))


def test_reduce_and_gather_compile_once():
  value = EIGHT.distribute_values_from_function(rows)

  def combine():
    EIGHT.reduce("mean", value)
    EIGHT.gather(value, 0)
    EIGHT.local_results(value)

  combine()
  with compilations.count() as compiled:
    combine()
  assert compiled.total == 0


def test_local_results_are_on_the_devices_of_their_replica():
  value = SPLIT.distribute_values_from_function(rows)
  results = SPLIT.local_results({"a": value, "b": 2.0})
  for i, result in enumerate(results):
    assert result["b"] == 2.0
    wanted = np.arange(6.0 * i, 6.0 * i + 6).reshape(2, 3)
    np.testing.assert_array_equal(result["a"], wanted)
    assert result["a"].devices() == set(SPLIT.mesh.devices[i])
    for shard in result["a"].addressable_shards:
      assert shard.data.shape == (2, 3)


def test_local_results_stay_sharded_over_logical_devices():
  fn = lambda x: SPLIT.split_to_logical_devices(x + replica_id(), [1, 4])
  replica_id = lambda: fs.get_replica_context().replica_id_in_sync_group
  x = np.arange(16.0).reshape(2, 8)
  results = SPLIT.local_results(SPLIT.run(fn, args=(x,)))
  for i, result in enumerate(results):
    np.testing.assert_array_equal(result, x + i)
    assert result.devices() == set(SPLIT.mesh.devices[i])
    assert {s.data.shape for s in result.addressable_shards} == {(2, 2)}


@pytest.mark.parametrize("made_by", ["numpy", "another order"])
def test_values_on_other_devices(made_by):
  value = np.arange(16.0, dtype=np.float32).reshape(8, 2)
  if made_by == "another order":
    reverse = fs.Strategy(devices=jax.devices()[::-1])
    value = jax.device_put(value, NamedSharding(reverse.mesh, P("replica")))
  value = fs.PerReplica(value)
  np.testing.assert_array_equal(EIGHT.reduce("sum", value), [56.0, 64.0])
  np.testing.assert_array_equal(EIGHT.gather(value, 0), np.arange(16.0))
  for i, result in enumerate(EIGHT.local_results(value)):
    assert result.tolist() == [2 * i, 2 * i + 1]
    assert result.devices() == {jax.devices()[i]}
