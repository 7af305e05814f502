"""PerReplica values, and the functions over them outside of run."""

import compilations
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.replicas import values

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


def test_per_replica_is_a_sequence():
  losses = fs.PerReplica(jnp.array([1.0, 3.0]))
  assert [float(x) for x in losses] == [1.0, 3.0]
  assert len(losses) == 2 and float(losses[-1]) == 3.0
  assert np.mean(losses) == 2.0
  assert np.asarray(losses, np.float64).dtype == np.float64
  tree = fs.PerReplica({"a": jnp.arange(2), "b": jnp.ones((2, 3))})
  assert len(tree) == 2 and tree[1]["b"].shape == (3,)
  with pytest.raises(IndexError, match="got 2"):
    losses[2]


@pytest.mark.parametrize("index", [slice(1), "0", 0.5])
def test_index_that_is_no_integer_raises(index):
  with pytest.raises(TypeError, match="integer"):
    fs.PerReplica(jnp.ones(2))[index]


def test_per_replica_has_arithmetic():
  x = fs.PerReplica(jnp.array([1.0, 3.0]))
  y = fs.PerReplica(np.array([2.0, -2.0], np.float32))
  results = {
    "x + 1": x + 1,
    "1 - x": 1 - x,
    "np 2 * x": np.float32(2) * x,
    "jnp 2 * x": jnp.float32(2) * x,
    "x / y": x / y,
    "2**x": 2**x,
    "x // 2": x // 2,
    "5 % x": 5 % x,
    "-abs(y)": -abs(y),
    "x > 2": x > 2,
    "x <= y": x <= y,
  }
  assert {
    name: (type(value), np.asarray(value).tolist())
    for name, value in results.items()
  } == {
    "x + 1": (fs.PerReplica, [2, 4]),
    "1 - x": (fs.PerReplica, [0, -2]),
    "np 2 * x": (fs.PerReplica, [2, 6]),
    "jnp 2 * x": (fs.PerReplica, [2, 6]),
    "x / y": (fs.PerReplica, [0.5, -1.5]),
    "2**x": (fs.PerReplica, [2, 8]),
    "x // 2": (fs.PerReplica, [0, 1]),
    "5 % x": (fs.PerReplica, [0, 2]),
    "-abs(y)": (fs.PerReplica, [-2, -2]),
    "x > 2": (fs.PerReplica, [False, True]),
    "x <= y": (fs.PerReplica, [True, False]),
  }
  tree = fs.PerReplica({"a": jnp.arange(2), "b": jnp.ones((2, 3))}) * 2
  assert tree[1]["a"] == 2 and tree[1]["b"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("other", [np.ones(2), jnp.ones(2), "1", [1, 2]])
def test_arithmetic_with_an_array_for_some_replicas_raises(other):
  x = fs.PerReplica(jnp.array([1.0, 3.0]))
  for call in (lambda: x + other, lambda: other + x, lambda: x < other):
    with pytest.raises(TypeError, match="PerReplica"):
      call()


def test_mean_of_a_per_replica():
  x = fs.PerReplica(jnp.array([[1.0, 2.0], [3.0, 6.0]]))
  assert float(x.mean()) == float(np.mean(x)) == 3.0
  assert x.mean(axis=0).tolist() == [2.0, 4.0]
  losses = EIGHT.run(lambda: jnp.float16(60_000))
  assert float(losses.mean()) == 60_000


@pytest.mark.parametrize(
  "convert",
  [float, int, bool, round, lambda x: x.item(), lambda x: f"{x:.3f}"],
  ids=["float", "int", "bool", "round", "item", "format"],
)
def test_one_number_of_a_per_replica_loss_raises(convert):
  losses = fs.PerReplica(jnp.ones(8))
  with pytest.raises(TypeError, match=r"8 replicas.* x\.mean\(\) .*x\[0\]"):
    convert(losses)
  assert "PerReplica" in f"{losses}"


def test_per_replica_is_a_pytree():
  doubled = jax.tree.map(lambda x: 2 * x, fs.PerReplica(jnp.arange(3)))
  assert isinstance(doubled, fs.PerReplica)
  assert np.asarray(doubled).tolist() == [0, 2, 4]
  assert values.is_per_replica(doubled) and not values.is_per_replica([doubled])


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
    (3, TypeError, "value_fn must be a function, got 3"),
    (lambda c: "a", TypeError, "value_fn of replica 0.* got 'a'"),
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
  # Nothing is computed: it is returned unchanged.
  assert EIGHT.reduce("mean", 2**40) == 2**40


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
    (lambda v: EIGHT.reduce("mean", "a"), TypeError, "reduce: value.* got 'a'"),
    (lambda v: EIGHT.reduce("sum", v, axis=2), ValueError, "allowed: -2 to 1"),
    (lambda v: EIGHT.gather(v, None), TypeError, r"gather: axis .* None"),
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


def test_mean_over_replicas_and_broadcast_to_replicas():
  keys = jax.random.split(jax.random.key(0), 8)
  tree = {
    "mean": EIGHT.distribute_values_from_function(rows),
    "count": fs.PerReplica(jnp.arange(8)),
    "key": fs.PerReplica(keys),
    "shared": jnp.ones(3),
  }
  merged = values.mean_over_replicas(tree)
  wanted = np.arange(48.0).reshape(8, 2, 3).mean(0)
  np.testing.assert_allclose(merged["mean"], wanted, rtol=1e-6)
  assert int(merged["count"]) == 0
  assert (
    jax.random.key_data(merged["key"]) == jax.random.key_data(keys[0])
  ).all()
  assert merged["shared"] is tree["shared"]

  spread = values.broadcast_to_replicas(merged, tree)
  assert jax.tree.structure(spread) == jax.tree.structure(tree)
  for i in (0, 7):
    np.testing.assert_array_equal(spread["mean"][i], merged["mean"])
    assert spread["key"][i] == merged["key"]
  where = spread["mean"].value.sharding
  assert where == tree["mean"].value.sharding
