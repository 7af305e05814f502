"""The replica context, and what it reduces."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quadratic_states
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard.replicas import context as replica_context

EIGHT = fs.Strategy()
SPATIAL = fs.Strategy(mesh_shape={"replica": 2, "model": 4})


def context_in_run(fn, strategy=EIGHT, args=()):
  """Calls `fn` with the replica context, and with arguments, in `run`."""
  return strategy.run(lambda *x: fn(fs.get_replica_context(), *x), args)


def test_no_context_outside_of_run():
  with pytest.raises(KeyError):
    EIGHT.run(lambda: {}["a"])
  assert not fs.get_replica_context()
  with pytest.raises(AttributeError, match=r"\.all_reduce .* of Strategy\.run"):
    fs.get_replica_context().all_reduce("sum", 1.0)


@pytest.mark.parametrize("strategy", [EIGHT, SPATIAL])
def test_all_reduce_and_all_gather(strategy):
  n = strategy.num_replicas_in_sync

  def fn(context, x):
    mine = x + context.replica_id_in_sync_group
    return {
      "count": context.num_replicas_in_sync,
      "sum": context.all_reduce("sum", mine),
      # XLA's CPU compiler aborts the process on such a sum over replicas of
      # several logical devices.
      "bfloat16": context.all_reduce("sum", mine.astype(jnp.bfloat16)),
      # Of eight replicas the sum does not fit int32.
      "integers": context.all_reduce("mean", mine << 28),
      "small": context.all_reduce("sum", (mine > 0, jnp.int8(100))),
      "tree": context.all_reduce("mean", {"a": mine * 1.5, "b": None}),
      "gathered": context.all_gather(jnp.stack([mine, -mine])[None], -1),
    }

  is_value = lambda x: isinstance(x, fs.PerReplica)
  out = context_in_run(fn, strategy, [np.int32(0)])
  ids = np.arange(n)
  wanted = {
    "count": n,
    "sum": ids.sum(),
    "bfloat16": ids.sum(),
    "integers": ids.mean() * 2**28,
    "small": (n - 1, n * 100),
    "tree": {"a": 1.5 * ids.mean(), "b": None},
    "gathered": [np.stack([ids, -ids], 1).ravel()],
  }
  for i in range(n):
    mine = jax.tree.map(lambda x, i=i: np.asarray(x)[i], out, is_leaf=is_value)
    jax.tree.map(np.testing.assert_array_equal, mine, wanted)
  dtypes = {"integers": "float32", "sum": "int32", "bfloat16": "bfloat16"}
  assert {name: out[name].value.dtype for name in dtypes} == dtypes


def test_fold_in_gives_each_replica_its_own_key():
  key, raw = jax.random.key(3), jax.random.PRNGKey(4)
  many = jax.random.split(key, (2, 3))

  def fold_in(context, *keys):
    # Workers fold other numbers into keys.
    with replica_context.marked(first_replica=16):
      later = fs.get_replica_context().fold_in(key)
    return (*context.fold_in(keys), later)

  out = context_in_run(fold_in, args=[key, raw, many])
  for i, folded in enumerate(EIGHT.local_results(out)):
    fold = lambda key, i=i: jax.random.fold_in(key, i)
    wanted = fold(key), fold(raw), jax.vmap(jax.vmap(fold))(many)
    assert_trees_equal(folded, (*wanted, fold(key, 16 + i)))
  with replica_context.marked(first_replica=16):
    assert not fs.get_replica_context()


def create(wrappers=(), **collections):
  params = {"w": jnp.zeros(600, jnp.float16)}
  return quadratic_states.create(
    wrappers, optax.sgd(1.0), params, **collections
  )


def test_collections_average_floats_and_keep_the_first_of_others():
  key = jax.random.key(5)
  wanted = {
    "mean": np.float32(3.5),
    "half": jnp.bfloat16(7),
    "byte": np.uint8(250),
    "flag": np.bool_(True),
    "key": jax.random.fold_in(key, 0),
  }

  def step(context, state):
    number = context.replica_id_in_sync_group
    statistics = {
      "mean": number * 1.0,
      "half": (number * 2).astype(jnp.bfloat16),
      "byte": (number + 250).astype(jnp.uint8),
      "flag": number == 0,
      "key": jax.random.fold_in(key, number),
    }
    return state.apply_gradients(grads=state.params, batch_stats=statistics)

  state = context_in_run(step, args=[create(batch_stats=wanted)])
  assert_trees_equal(state.batch_stats, wanted)


# -- Means of float16: none overflows that float16 can represent.


def draw():
  """Returns float16 `[8, 600]`, whose sums overflow, or of all magnitudes."""
  rng = np.random.default_rng(0)
  large = rng.uniform(15_000, 65_504, (8, 300))
  mixed = 2.0 ** rng.uniform(-24, 15.99, (8, 300))
  mixed *= rng.choice([-1, 1], (8, 300))
  return np.concatenate([large, mixed], axis=1).astype(np.float16)


DRAWN = draw()


def assert_is_mean(got, rows=DRAWN):
  """Asserts that these are the means of rows, but for one unit at the end."""
  got, wanted = np.asarray(got), rows.astype(np.float64).mean(0).astype("f2")
  assert got.dtype == np.float16 and np.isfinite(got).all()
  error = np.abs(got.astype(np.float64) - wanted)
  assert (error <= np.spacing(np.abs(wanted))).all()


@pytest.mark.parametrize(
  "wrappers", [(), [fs.CrossShard()], [fs.AGN(1, commit="mean")]]
)
def test_float16_means_do_not_overflow(wrappers):
  def fn(context, state, row):
    mean = context.all_reduce("mean", row[0])
    state = state.apply_gradients(
      grads={"w": -row[0]}, batch_stats={"mean": row[0]}
    )
    return state, row[0], mean

  zeros = {"mean": jnp.zeros(600, jnp.float16)}
  state = create(wrappers, strategy=EIGHT, batch_stats=zeros)
  args = state, EIGHT.shard_batch(DRAWN)
  state, rows, means = context_in_run(fn, args=args)
  assert_is_mean(state.params["w"])
  assert_is_mean(state.batch_stats["mean"])
  assert_is_mean(means[0])
  assert_is_mean(EIGHT.reduce("mean", rows))
  assert_is_mean(rows.mean(axis=0))
  state = create(batch_stats={"mean": rows})
  assert_is_mean(state.without_wrappers().batch_stats["mean"])
  matrices = fs.PerReplica(DRAWN.reshape(8, 30, 20))
  assert_is_mean(EIGHT.reduce("mean", matrices, 0), DRAWN.reshape(240, 20))


def test_float16_sum_that_overflows_on_the_way_is_exact():
  ends = np.float16([60_000] * 4 + [-60_000] * 3 + [-65_504])
  fn = lambda context, x: context.all_reduce("sum", x[0])
  sums = context_in_run(fn, args=[EIGHT.shard_batch(ends)])
  assert np.asarray(sums).tolist() == [float(ends.astype(np.float64).sum())] * 8
