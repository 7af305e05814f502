"""Warnings about a traced step: once for each trace, and only of mistakes.

To lower a step traces it, which is all that a warning needs.
"""

import warnings

from flax import linen as nn
import jax
import numpy as np
import pytest
from regression import batch
from regression import create
from regression import loss_fn
from regression import sharded
from regression import train_step
from regression import X

import flaxshard as fs

P = jax.sharding.PartitionSpec

EIGHT = fs.Strategy()
KEY = jax.random.key(0)


def new_step(step=train_step):
  """Returns a new function, of which nothing is compiled or told yet."""
  return lambda *args: step(*args)


@pytest.fixture(scope="module")
def state():
  return create(EIGHT)


def dropout_step(state, x, key):
  key = fs.get_replica_context().fold_in(key)
  drop = nn.Dropout(0.5, deterministic=False)

  def loss(params):
    kept = drop.apply({}, x, rngs={"dropout": key})
    return ((kept @ params["w1"]) @ params["w2"]).mean()

  return state.minimize(loss)


def reduced_step(reduce, **options):
  def step(state, batch):
    loss, grads = state.value_and_grad(loss_fn, batch)
    return state.apply_gradients(grads=reduce(grads), **options), loss

  return step


def pmean(grads):
  return jax.lax.pmean(grads, "replica")


def all_reduce(grads):
  return fs.get_replica_context().all_reduce("sum", grads)


WHOLE = "of shape (16, 8)", "8 replicas", "strategy.shard_batch"
REDUCED = "already reduced", "8 times", "skip_gradients_aggregation=True"


@pytest.mark.parametrize(
  ("step", "args", "facts"),
  [
    # A batch that is not split (mistake 16), in spite of keys for dropout.
    (new_step(), [batch(0)], ("argument 1/x ", *WHOLE)),
    (dropout_step, [X[0], KEY], ("argument 1 ", *WHOLE)),
    # Gradients that are reduced by hand (mistake 27).
    (reduced_step(pmean), [sharded(EIGHT, 0)], REDUCED),
    (reduced_step(all_reduce), [sharded(EIGHT, 0)], REDUCED),
  ],
  ids=["whole batch", "dropout", "pmean", "all_reduce"],
)
def test_mistakes_warn_once(state, step, args, facts):
  with pytest.warns(UserWarning) as caught:
    for _ in range(2):
      EIGHT.run(step, args=(state, *args))
  (warning,) = caught
  assert all(fact in str(warning.message) for fact in facts)
  assert warning.filename == __file__


def test_batches_of_run_steps_that_are_not_split_warn(state):
  with pytest.warns(UserWarning, match=r"1/0/x of shape \(16, 8\)") as caught:
    EIGHT.run_steps(new_step(), state, [batch(0), batch(1)], reduce="mean")
  assert [w.filename for w in caught] == [__file__]


# -- Steps without a mistake.


def take_part(state, batch):
  number = fs.get_replica_context().replica_id_in_sync_group
  part = lambda x: jax.lax.dynamic_slice_in_dim(x, 2 * number, 2)
  return train_step(state, jax.tree.map(part, batch))


def sample_rows(state, batch):
  key = fs.get_replica_context().fold_in(KEY)
  rows = jax.random.randint(key, (2,), 0, 16)
  return train_step(state, jax.tree.map(lambda x: x[rows], batch))


def small_arguments(state, *args):
  return state.minimize(lambda p: p["w2"].sum())


@pytest.mark.parametrize(
  ("step", "args"),
  [
    # The whole batch on every replica, on purpose.
    (train_step, [EIGHT.shard_batch(batch(0), spec=P())]),
    (take_part, [batch(0)]),
    (sample_rows, [batch(0)]),
    (
      small_arguments,
      [np.ones(3), 0.1, jax.random.split(KEY, 16), jax.random.PRNGKey(0)],
    ),
    (
      reduced_step(pmean, skip_gradients_aggregation=True),
      [sharded(EIGHT, 0)],
    ),
    # Of the gradients, only some depend on the batch.
    (reduced_step(lambda g: {**g, "w2": g["w2"] * 0}), [sharded(EIGHT, 0)]),
  ],
)
def test_right_steps_do_not_warn(state, step, args):
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    EIGHT.jit(step).lower(state, *args)


@pytest.mark.parametrize(
  "wrappers",
  [
    [fs.CrossShard("sum")],
    [fs.LossScale("dynamic")],
    [fs.AGN(1, commit="mean")],
  ],
)
def test_gradients_that_a_wrapper_reduces_do_not_warn(wrappers):
  state = create(EIGHT, wrappers)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    EIGHT.jit(new_step()).lower(state, sharded(EIGHT, 0))
    EIGHT.run_steps(new_step(), state, [sharded(EIGHT, 0)] * 2)
