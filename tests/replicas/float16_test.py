"""Means of float16 over replicas: none overflows that float16 can represent."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs

EIGHT = fs.Strategy()
SGD = optax.sgd(1.0)


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
    tx=SGD,
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
