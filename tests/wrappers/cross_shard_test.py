"""CrossShard: reduced values, their collectives, and mistakes."""

import re
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

  found = grouped.collectives(step.lower(state, x).compile(), strategy)
  size = len(groups[0]) if groups else 8
  assert found == [("all-reduce", grouped.GRADIENT_BYTES, size)]


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


@pytest.mark.parametrize(
  ("arguments", "error", "fact"),
  [
    (("max",), ValueError, "'max'"),
    (("mean", ()), ValueError, r"group_assignment=\(\)"),
    (("mean", ((0, 1), ())), ValueError, "empty"),
    (("mean", ((0, 1), (2,))), ValueError, r"sizes are \[2, 1\]"),
    (("mean", ((0, 1), (1, 2))), ValueError, "each replica, 0 to 3, once"),
    (("mean", ((0, 1), (2, 4))), ValueError, "each replica, 0 to 3, once"),
    (("mean", 3), TypeError, "group_assignment=3"),
    (("mean", ("01", "23")), TypeError, "group_assignment="),
    (("mean", ((0, 1.0), (2, 3))), TypeError, "group_assignment="),
  ],
)
def test_mistakes(arguments, error, fact) -> None:
  with pytest.raises(error, match=fact):
    fs.CrossShard(*arguments)


def test_groups_of_another_number_of_replicas_raise(strategy) -> None:
  wrapper = fs.CrossShard("mean", ((0, 1), (2, 3)))
  message = "the 8 replicas, 0 to 7"
  with pytest.raises(ValueError, match=message):
    grouped.create(strategy, wrapper)
  state = grouped.create(
    None, wrapper, batch_stats={"m": np.zeros(5, np.float32)}
  )
  with pytest.raises(ValueError, match=message):
    strategy.run(
      grouped.train_step, args=(state, strategy.shard_batch(grouped.X))
    )


def test_groups_become_tuples_of_int() -> None:
  wanted = fs.CrossShard("mean", grouped.HALVES)
  lists = [list(group) for group in grouped.HALVES]
  for groups in (lists, np.array(lists), [np.array(g) for g in lists]):
    wrapper = fs.CrossShard("mean", groups)
    assert wrapper == wanted and hash(wrapper) == hash(wanted)
    assert {type(i) for g in wrapper.group_assignment for i in g} == {int}


def test_groups_that_diverge_warn(strategy, capsys) -> None:
  message = r"2 groups of 4 .* replica 0, \(0, 2, 4, 6\)"
  with pytest.warns(UserWarning, match=message):
    state = grouped.create(strategy, fs.CrossShard("mean", grouped.HALVES))
  with pytest.warns(UserWarning, match=message):
    strategy.run(
      grouped.train_step, args=(state, strategy.shard_batch(2 * grouped.X))
    )
  description = strategy.describe(state)
  assert re.search(message, capsys.readouterr().out.splitlines()[-1])
  assert re.search(message, description.note)

  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for groups in (None, grouped.GROUPINGS["one group, reordered"]):
      state = grouped.create(strategy, fs.CrossShard("mean", groups))
      strategy.run(
        grouped.train_step, args=(state, strategy.shard_batch(grouped.X))
      )
      assert strategy.describe(state).note is None
