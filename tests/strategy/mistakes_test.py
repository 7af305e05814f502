"""Warnings about a traced step: told once, and never without a mistake.

To lower a step traces it, which is all that a warning needs.
"""

import contextlib
import warnings

from flax import linen as nn
import jax
import jax.numpy as jnp
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


@contextlib.contextmanager
def no_warning():
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    yield


def new_step(step=train_step):
  """Returns a new function, of which nothing is compiled or told yet."""
  return lambda *args: step(*args)


@pytest.fixture(scope="module")
def state():
  return create(EIGHT)


# -- A batch that is not split (mistake 16).


@pytest.mark.parametrize("move", [np.asarray, jnp.asarray])
def test_batch_that_is_not_split_warns_once(state, move):
  whole = jax.tree.map(move, batch(0))
  step = new_step()
  with pytest.warns(UserWarning) as caught:
    EIGHT.run(step, args=(state, whole))
    EIGHT.run(step, args=(state, whole))
    # Another shape is traced again, but says nothing new.
    EIGHT.run(step, args=(state, jax.tree.map(lambda x: x[:8], whole)))
  (warning,) = caught
  message = str(warning.message)
  assert "argument 1/x of shape (16, 8)" in message
  assert "8 replicas" in message and "strategy.shard_batch" in message
  assert warning.filename == __file__


def test_batches_of_run_steps_that_are_not_split_warn(state):
  with pytest.warns(UserWarning, match=r"1/x of shape \(2, 16, 8\)") as caught:
    EIGHT.run_steps(new_step(), state, [batch(0), batch(1)], reduce="mean")
  assert [w.filename for w in caught] == [__file__]


def test_batch_that_is_not_split_warns_in_spite_of_dropout_keys(state):
  drop = nn.Dropout(0.5, deterministic=False)

  def step(state, x, key):
    key = fs.get_replica_context().fold_in(key)

    def loss(params):
      kept = drop.apply({}, x, rngs={"dropout": key})
      return ((kept @ params["w1"]) @ params["w2"]).mean()

    return state.minimize(loss)

  with pytest.warns(UserWarning, match="argument 1 of shape") as caught:
    EIGHT.run(step, args=(state, X[0], KEY))
  assert len(caught) == 1


def test_batch_that_is_replicated_on_purpose_does_not_warn(state):
  whole = EIGHT.shard_batch(batch(0), spec=P())
  with no_warning():
    EIGHT.jit(new_step()).lower(state, whole)
    EIGHT.run_steps(new_step(), state, [whole], reduce="mean")


def test_small_arrays_numbers_and_keys_do_not_warn(state):
  step = lambda state, *args: state.minimize(lambda p: p["w2"].sum())
  keys = jax.random.split(KEY, 16), jax.random.PRNGKey(0)
  with no_warning():
    EIGHT.jit(step).lower(state, np.ones(3), 0.1, *keys)
    EIGHT.run_steps(new_step(step), state, np.ones(16))


def test_replica_that_takes_its_part_by_itself_does_not_warn(state):
  def step(state, batch):
    number = fs.get_replica_context().replica_id_in_sync_group
    part = lambda x: jax.lax.dynamic_slice_in_dim(x, 2 * number, 2)
    return train_step(state, jax.tree.map(part, batch))

  with no_warning():
    EIGHT.jit(step).lower(state, batch(0))


def test_replica_that_samples_from_all_data_does_not_warn(state):
  def gather(state, batch, key):
    key = fs.get_replica_context().fold_in(key)
    rows = jax.random.randint(key, (2,), 0, 16)
    return train_step(state, jax.tree.map(lambda x: x[rows], batch))

  def slice_window(state, batch, key):
    key = fs.get_replica_context().fold_in(key)
    start = jax.random.randint(key, (), 0, 14)
    window = lambda x: jax.lax.dynamic_slice_in_dim(x, start, 2)
    return train_step(state, jax.tree.map(window, batch))

  with no_warning():
    for step in (gather, slice_window):
      EIGHT.jit(step).lower(state, batch(0), KEY)


# -- Gradients that are reduced by hand (mistake 27).


def reduced_step(reduce, **options):
  def step(state, batch):
    loss, grads = state.value_and_grad(loss_fn, batch)
    return state.apply_gradients(grads=reduce(grads), **options), loss

  return step


SUMS = {
  "psum": lambda grads: jax.lax.psum(grads, "replica"),
  "pmean": lambda grads: jax.lax.pmean(grads, "replica"),
  "all_reduce": lambda g: fs.get_replica_context().all_reduce("sum", g),
}


@pytest.mark.parametrize("name", SUMS)
def test_gradients_reduced_by_hand_warn_once(state, name):
  step = reduced_step(SUMS[name])
  with pytest.warns(UserWarning) as caught:
    for _ in range(2):
      EIGHT.run(step, args=(state, sharded(EIGHT, 0)))
  (warning,) = caught
  message = str(warning.message)
  assert "already reduced" in message and "8 times" in message
  assert "skip_gradients_aggregation=True" in message
  assert warning.filename == __file__


def test_gradients_reduced_by_hand_and_said_so_do_not_warn(state):
  step = reduced_step(SUMS["pmean"], skip_gradients_aggregation=True)
  with no_warning():
    EIGHT.jit(step).lower(state, sharded(EIGHT, 0))


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
  with no_warning():
    EIGHT.jit(new_step()).lower(state, sharded(EIGHT, 0))
    EIGHT.run_steps(new_step(), state, [sharded(EIGHT, 0)] * 2)


def test_constant_gradients_do_not_warn(state):
  def constant(state, batch):
    loss, grads = state.value_and_grad(loss_fn, batch)
    grads = {**grads, "w1": jnp.zeros_like(grads["w1"]), "w2": None}
    return state.apply_gradients(grads=grads), loss

  def zero(state, batch):
    grads = jax.tree.map(jnp.zeros_like, state.params)
    return state.apply_gradients(grads=grads), loss_fn(state.params, batch)

  def decayed(state, batch):
    loss, grads = state.value_and_grad(loss_fn, batch)
    # Only the first depends on the batch.
    return state.apply_gradients(
      grads={**grads, "w2": state.params["w2"]}
    ), loss

  with no_warning():
    for step in (constant, zero, decayed):
      EIGHT.jit(step).lower(state, sharded(EIGHT, 0))
