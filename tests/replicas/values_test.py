"""PerReplica, and operations on per-replica values outside of run."""

import functools

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
REVERSED = fs.Strategy(devices=jax.devices()[::-1])
STRATEGIES = [SPLIT, EXPLICIT]


def rows(context):
  """Returns a `[2, 3]` array that differs per replica."""
  first = 6 * context.replica_id_in_sync_group
  return np.arange(first, first + 6, dtype=np.float32).reshape(2, 3)


def make(value_fn):
  """Makes values of the number of each replica."""
  return EIGHT.distribute_values_from_function(
    lambda context: value_fn(context.replica_id_in_sync_group)
  )


# -- PerReplica.


def test_per_replica_is_a_sequence_and_a_pytree():
  losses = fs.PerReplica(jnp.array([1.0, 3.0]))
  assert [float(x) for x in losses] == [1.0, 3.0]
  assert len(losses) == 2 and float(losses[-1]) == 3.0
  assert np.mean(losses) == 2.0
  assert np.asarray(losses, np.float64).dtype == np.float64
  tree = fs.PerReplica({"a": jnp.arange(2), "b": jnp.ones((2, 3))})
  assert len(tree) == 2 and tree[1]["b"].shape == (3,)
  assert int(jax.jit(lambda tree: tree[1]["a"])(tree)) == 1
  with pytest.raises(IndexError, match="got 2"):
    losses[2]
  for convert in (float, bool):
    with pytest.raises(TypeError, match=r"2 replicas.* x\.mean\(\) .*x\[0\]"):
      convert(losses)
  doubled = jax.tree.map(lambda x: 2 * x, losses)
  assert isinstance(doubled, fs.PerReplica)
  assert np.asarray(doubled).tolist() == [2.0, 6.0]


# -- distribute_values_from_function.


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
  array = np.arange(6.0 * n, dtype=np.float32).reshape(n, 2, 3)
  np.testing.assert_array_equal(made["rows"], array)
  assert made["rows"].value.dtype == jnp.float32
  assert np.asarray(made["id"]).tolist() == list(range(n))
  assert np.asarray(made["of"]).tolist() == [n] * n
  assert made["none"] is None
  assert made["key"][n - 1] == jax.random.key(n - 1)
  split = NamedSharding(strategy.mesh, P("replica"))
  assert made["rows"].value.sharding.is_equivalent_to(split, 3)
  # In run each replica sees its own row.
  sums = strategy.run(lambda x: x.sum(), args=(made["rows"],))
  np.testing.assert_array_equal(sums, array.sum((1, 2)))


# -- reduce, gather, local_results.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reduce_and_gather(strategy):
  n = strategy.num_replicas_in_sync
  value = strategy.distribute_values_from_function(rows)
  array = np.arange(6.0 * n, dtype=np.float32).reshape(n, 2, 3)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
  for op, fn in ("sum", np.sum), ("mean", np.mean):
    for call in strategy.reduce, jax.jit(strategy.reduce, static_argnums=0):
      close(call(op, {"a": value})["a"], fn(array, axis=0))
    for axis, axes in (0, (0, 1)), (1, (0, 2)), (-1, (0, 2)):
      close(strategy.reduce(op, value, axis=axis), fn(array, axis=axes))
  for axis in (0, 1, -1):
    got = strategy.gather([value], axis)[0]
    np.testing.assert_array_equal(got, np.concatenate(array, axis))
  with compilations.count() as compiled:
    strategy.reduce("mean", value)
    strategy.gather(value, 0)
  assert compiled.total == 0


def test_reduce_of_integers_booleans_and_shared_values():
  ids = make(np.int32)
  total, mean = EIGHT.reduce("sum", ids), EIGHT.reduce("mean", ids)
  assert (int(total), total.dtype) == (28, jnp.int32)
  assert (float(mean), mean.dtype) == (3.5, jnp.float32)
  odd = jax.tree.map(lambda x: x % 2 == 1, ids)
  assert int(EIGHT.reduce("sum", odd)) == 4
  tree = {"a": np.arange(3.0), "b": 2.0}
  same = EIGHT.reduce("mean", tree)
  assert same["a"] is tree["a"] and same["b"] == 2.0
  assert float(EIGHT.reduce("mean", np.arange(3.0), axis=0)) == 1.0


def test_local_results_are_on_the_devices_of_their_replica():
  value = SPLIT.distribute_values_from_function(rows)
  with jax.set_mesh(SPLIT.mesh):
    results = SPLIT.local_results({"a": value, "b": 2.0})
  for i, result in enumerate(results):
    assert result["b"] == 2.0
    wanted = np.arange(6.0 * i, 6.0 * i + 6).reshape(2, 3)
    np.testing.assert_array_equal(result["a"], wanted)
    assert result["a"].devices() == set(SPLIT.mesh.devices[i])
    assert result["a"].is_fully_replicated


@pytest.mark.parametrize("mesh", [None, EIGHT.mesh, REVERSED.mesh])
def test_values_on_other_devices(mesh):
  value = np.arange(16.0, dtype=np.float32).reshape(8, 2)
  if mesh is not None:
    spec = P() if mesh is EIGHT.mesh else P("replica")
    value = jax.device_put(value, NamedSharding(mesh, spec))
  value = fs.PerReplica(value)
  np.testing.assert_array_equal(EIGHT.reduce("sum", value), [56.0, 64.0])
  np.testing.assert_array_equal(EIGHT.gather(value, 0), np.arange(16.0))
  results = EIGHT.local_results(value)
  for i, result in enumerate(results):
    assert result.tolist() == [2 * i, 2 * i + 1]
    assert result.devices() == {jax.devices()[i]}
  # Each value is on the device of its replica.
  np.testing.assert_array_equal(make(lambda i: results[i]), value)


VALUE = fs.PerReplica(np.ones((8, 2, 3), np.float32))
LARGE = fs.PerReplica({"n": np.full((8, 1), -(2**40))})
SLICES = fs.IndexedSlices(np.zeros(3, int), np.ones((3, 2), "f"), (9, 2))


def run(fn):
  EIGHT.run(lambda: fn(fs.get_replica_context()))


@pytest.mark.parametrize(
  ("call", "fact"),
  [
    (lambda: EIGHT.reduce("max", VALUE), "'max'"),
    (lambda: EIGHT.reduce("sum", VALUE, axis=2), "axis 2"),
    (lambda: EIGHT.reduce("mean", np.ones(3), axis=1), "axis 1"),
    (lambda: EIGHT.reduce("sum", {"a": 1.0}), r"value\[a\] must be a PerRepl"),
    (lambda: EIGHT.reduce("mean", {"a": SLICES}), "IndexedSlices"),
    (lambda: EIGHT.reduce("mean", LARGE), r"-1099511627776.* not fit int32"),
    (lambda: EIGHT.reduce("mean", LARGE.value, axis=0), "not fit int32"),
    (lambda: LARGE.mean(), "not fit int32"),
    (lambda: SPLIT.local_results({"a": VALUE}), r"value\[a\].* 2 rows"),
    (lambda: run(lambda c: c.all_reduce("average", 1)), "'sum', 'mean'"),
    (lambda: run(lambda c: c.all_gather(jnp.ones(2), 1)), "axis 1"),
    (lambda: make(lambda i: {"a": np.ones(i)}), r"1 .* 0 at a: shape \(1,\)"),
    (lambda: make(lambda i: np.zeros(1, "if"[i % 2])), "1 .* 0 at .*float32"),
    (lambda: make(lambda i: {str(i): 1}), "at 0: missing"),
    (lambda: make(lambda i: {"n": 2**31}), r"value\[n\] is int64.*2147483648"),
  ],
)
def test_mistakes(call, fact):
  with pytest.raises(ValueError, match=fact):
    call()
