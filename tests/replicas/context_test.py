"""The replica context, and what it reduces."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    (lambda c: c.all_gather(jnp.ones(2), 1), ValueError, "axis 1"),
    (lambda c: c.all_gather(1.0, 0), ValueError, "dimension 0"),
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
    with replica_context.marked(first_replica=16):
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
  with replica_context.marked(first_replica=16):
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


# Means of float16: none overflows that float16 can represent.


def _draw() -> np.ndarray:
  """Returns float16 `[8, 900]`: large, small, subnormal, of both signs."""
  rng = np.random.default_rng(0)
  large = rng.uniform(15_000, 65_504, (8, 300))
  small = 2.0 ** rng.uniform(-24, -10, (8, 300))
  mixed = 2.0 ** rng.uniform(-24, 15.99, (8, 300))
  drawn = np.concatenate([large, small, mixed], axis=1)
  # Every other column has one sign, so that its sum is as large as can be.
  drawn[:, ::2] *= rng.choice([-1, 1], (8, 450))
  return drawn.astype(np.float16)


DRAWN = _draw()
WANTED = DRAWN.astype(np.float64).mean(0).astype(np.float16)


def assert_within_one_ulp(got, wanted=WANTED):
  got = np.asarray(got)
  assert got.dtype == np.float16
  assert np.isfinite(got).all()
  error = np.abs(got.astype(np.float64) - wanted.astype(np.float64))
  assert (error <= np.spacing(np.abs(wanted)).astype(np.float64)).all()


def create(wrappers=()):
  return fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.zeros(900, jnp.float16)},
    tx=optax.sgd(1.0),
    wrappers=wrappers,
    strategy=EIGHT,
    batch_stats={"mean": jnp.zeros(900, jnp.float16)},
  )


def take_step(state, row):
  """Applies the gradients `-row`, and replaces the statistics by `row`."""
  stats = {"mean": row[0]}
  return state.apply_gradients(grads={"w": -row[0]}, batch_stats=stats)


def test_float16_sum_of_the_drawn_means_overflows():
  # Otherwise the other tests could not fail.
  with np.errstate(over="ignore"):
    assert np.isinf(DRAWN.sum(0, dtype=np.float16)).sum() > 82


@pytest.mark.parametrize(
  "wrappers",
  [(), [fs.CrossShard("mean")], [fs.AGN(1, commit="mean")]],
  ids=["default", "cross_shard", "agn"],
)
def test_float16_gradients_and_collections_do_not_overflow(wrappers):
  state = EIGHT.run(
    take_step, args=(create(wrappers), EIGHT.shard_batch(DRAWN))
  )
  assert_within_one_ulp(state.params["w"])
  assert_within_one_ulp(state.without_wrappers().batch_stats["mean"])


def test_float16_means_of_values_do_not_overflow():
  def fn(row):
    context = fs.get_replica_context()
    return row[0], context.all_reduce("mean", row[0])

  rows, means = EIGHT.run(fn, args=(EIGHT.shard_batch(DRAWN),))
  assert_within_one_ulp(means[0])
  assert_within_one_ulp(EIGHT.reduce("mean", rows))
  assert_within_one_ulp(rows.mean(axis=0))
  state = create().replace(batch_stats={"mean": rows})
  assert_within_one_ulp(state.without_wrappers().batch_stats["mean"])
  assert_within_one_ulp(
    EIGHT.reduce("mean", fs.PerReplica(DRAWN.reshape(8, 30, 30)), 0),
    DRAWN.reshape(240, 30).astype(np.float64).mean(0).astype(np.float16),
  )


def test_float16_sum_that_overflows_on_the_way_is_exact():
  ends = np.float16([60_000] * 4 + [-60_000] * 3 + [-65_504])
  wanted = [float(ends.astype(np.float64).sum())] * 8
  reduce = lambda x: fs.get_replica_context().all_reduce("sum", x[0])
  sums = EIGHT.run(reduce, args=(EIGHT.shard_batch(ends),))
  assert np.asarray(sums).tolist() == wanted


PAIRS = ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.filterwarnings("ignore:CrossShard. gradients are reduced in")
def test_float16_gradients_of_groups_do_not_overflow():
  state = EIGHT.run(
    take_step,
    args=(
      create([fs.CrossShard("mean", PAIRS)]),
      EIGHT.shard_batch(DRAWN),
    ),
  )
  pair = DRAWN[[0, 4]].astype(np.float64).mean(0).astype(np.float16)
  # Replica 0's copy: the groups differ.
  assert_within_one_ulp(state.params["w"].addressable_data(0), pair)
  assert_within_one_ulp(state.batch_stats["mean"].addressable_data(0), pair)
