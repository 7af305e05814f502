"""CrossShard: values of the reduction, and the collectives it compiles to."""

import dataclasses
import warnings

import grouped
import jax
import numpy as np
import optax
import pytest

import flaxshard as fs

pytestmark = pytest.mark.filterwarnings("ignore:CrossShard")


@pytest.fixture(scope="module")
def strategy():
  return fs.Strategy()


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
  ("name", "reduction"),
  [
    ("all", "sum"),
    ("one group, reordered", "mean"),
    ("strided", "mean"),
    ("interleaved", "sum"),
    ("reordered", "mean"),
    ("irregular", "sum"),
    ("alone", "mean"),
  ],
)
def test_reduced_values_and_collectives(strategy, name, reduction) -> None:
  """Values as in NumPy; one collective with the bytes of the gradients."""
  groups = grouped.GROUPINGS[name]
  state = grouped.create(strategy, fs.CrossShard(reduction, groups))
  step = strategy.jit(grouped.train_step)
  x = strategy.shard_batch(grouped.X)
  new, _ = step(state, x)
  local = grouped.local_gradients()
  combine = {"mean": np.mean, "sum": np.sum}[reduction]
  for key, before in grouped.make_params().items():
    for i, held in enumerate(grouped.on_each(new.params[key])):
      grads = [local[j][key] for j in grouped.group_of(i, groups)]
      wanted = before - combine(grads, axis=0)
      np.testing.assert_allclose(held, wanted, rtol=1e-5, atol=1e-6)
  assert int(new.step) == 1

  (one,) = grouped.collectives(step.lower(state, x).compile().as_text())
  assert (one.kind, one.nbytes) == ("all-reduce", grouped.GRADIENT_BYTES)
  everyone = (tuple(range(8)),)
  if groups is None or len(groups) == 1:
    assert one.groups in (None, everyone)
  else:
    assert sorted(map(sorted, one.groups)) == sorted(map(sorted, groups))


@pytest.mark.parametrize(
  "groups", [pytest.param(None, marks=pytest.mark.slow), grouped.HALVES]
)
def test_mean_equals_one_replica_with_the_whole_batch(strategy, groups) -> None:
  """At the same learning rate, with momentum, in each group."""
  tx = optax.adam(0.1)
  state = grouped.create(strategy, fs.CrossShard("mean", groups), tx=tx)
  batches = [grouped.X, grouped.X[::-1].copy(), 2 * grouped.X]
  for x in batches:
    state, _ = strategy.run(
      grouped.train_step, args=(state, strategy.shard_batch(x))
    )
  for i in range(8):
    mine = [2 * j + k for j in grouped.group_of(i, groups) for k in (0, 1)]
    wanted = grouped.trained(
      grouped.make_params(), [x[mine] for x in batches], tx
    )
    held = {key: grouped.on_each(p)[i] for key, p in state.params.items()}
    grouped.assert_close(held, wanted, rtol=1e-4)


def test_sum_equals_the_mean_with_n_times_the_learning_rate(strategy) -> None:
  x = strategy.shard_batch(grouped.X)
  of_sum, _ = strategy.run(
    grouped.train_step,
    args=(
      grouped.create(strategy, fs.CrossShard("sum"), tx=optax.sgd(0.01)),
      x,
    ),
  )
  of_mean, _ = strategy.run(
    grouped.train_step,
    args=(
      grouped.create(strategy, fs.CrossShard("mean"), tx=optax.sgd(0.08)),
      x,
    ),
  )
  grouped.assert_close(of_sum.params, of_mean.params)


def test_mean_equals_the_default_reduction(strategy) -> None:
  x = strategy.shard_batch(grouped.X)
  bare, _ = strategy.run(grouped.train_step, args=(grouped.create(strategy), x))
  state = grouped.create(strategy, fs.CrossShard())
  wrapped, _ = strategy.run(grouped.train_step, args=(state, x))
  assert_equal(jax.device_get(bare.params), jax.device_get(wrapped.params))
  assert wrapped.wrapper_states == {"cross_shard": ()}


@pytest.mark.slow
def test_clipping_before_and_after_the_reduction(strategy) -> None:
  limit = 0.05
  clip = optax.clip_by_global_norm(limit)
  local = grouped.local_gradients()

  def clipped(grads):
    return clip.update(grads, clip.init(grads))[0]

  def clip_first(state, x):
    _, grads = state.value_and_grad(grouped.loss_fn, x)
    return state.apply_gradients(grads=clipped(grads))

  def mean(trees):
    return jax.tree.map(lambda *g: np.mean(g, axis=0), *trees)

  assert min(optax.tree.norm(g) for g in local) > limit
  x = strategy.shard_batch(grouped.X)
  wanted = {
    "reduce, then clip": clipped(mean(local)),
    "clip, then reduce": mean([clipped(g) for g in local]),
  }
  after = grouped.create(
    strategy, fs.CrossShard(), tx=optax.chain(clip, optax.sgd(1))
  )
  before = grouped.create(strategy, fs.CrossShard())
  outside = grouped.create(strategy, Clip(limit), fs.CrossShard())
  found = {
    "reduce, then clip": strategy.run(grouped.train_step, args=(after, x))[0],
    "clip, then reduce": strategy.run(clip_first, args=(before, x)),
    "a wrapper": strategy.run(grouped.train_step, args=(outside, x))[0],
  }
  wanted["a wrapper"] = wanted["clip, then reduce"]
  for name, new in found.items():
    update = jax.tree.map(np.subtract, grouped.make_params(), new.params)
    grouped.assert_close(update, wanted[name], rtol=1e-4)
  with pytest.raises(AssertionError):  # they differ
    grouped.assert_close(
      wanted["reduce, then clip"], wanted["clip, then reduce"]
    )


@dataclasses.dataclass(frozen=True)
class Clip(fs.wrappers.Base):
  """Clips gradients by their norm, as a wrapper."""

  limit: float

  def apply(self, state, target, grads, next):
    clip = optax.clip_by_global_norm(self.limit)
    return next(target, clip.update(grads, clip.init(grads))[0]), state


def test_skip_gradients_aggregation_reduces_nothing(strategy) -> None:
  state = grouped.create(strategy, fs.CrossShard("sum"))

  def step(state, x):
    _, grads = state.value_and_grad(grouped.loss_fn, x)
    grads = fs.get_replica_context().all_reduce("mean", grads)
    return state.apply_gradients(grads=grads, skip_gradients_aggregation=True)

  x = strategy.shard_batch(grouped.X)
  new = strategy.run(step, args=(state, x))
  wanted, _ = strategy.run(
    grouped.train_step,
    args=(grouped.create(strategy, fs.CrossShard("mean")), x),
  )
  grouped.assert_close(new.params, wanted.params)


def test_one_replica_is_not_reduced() -> None:
  strategy = fs.Strategy(devices=jax.devices()[:1])
  for groups in (None, ((0,),)):
    state = grouped.create(strategy, fs.CrossShard("sum", groups))
    new, _ = strategy.run(grouped.train_step, args=(state, grouped.X))
    grouped.assert_close(
      new.params,
      grouped.trained(grouped.make_params(), [grouped.X], optax.sgd(1.0)),
    )


def test_outside_run_warns_and_does_not_reduce() -> None:
  state = grouped.create(
    None, fs.CrossShard("sum", grouped.HALVES), fs.LossScale(2.0)
  )
  step = jax.jit(grouped.train_step)
  with pytest.warns(UserWarning, match="outside of Strategy.run") as record:
    new, _ = step(state, grouped.X)
  assert len(record) == 1
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    step(new, grouped.X)  # compiled: nothing is said again
  grouped.assert_close(
    new.params,
    grouped.trained(grouped.make_params(), [grouped.X], optax.sgd(1.0)),
  )
