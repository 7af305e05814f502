"""Warnings about a traced step: told once, and never without a mistake.

To lower a step traces it, which is all that a warning needs.
"""

import contextlib
import warnings

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
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
ONE = fs.Strategy(devices=jax.devices()[:1])
KEY = jax.random.key(0)
_FUNCTIONS = []


@contextlib.contextmanager
def no_warning():
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    yield


def new_step(step=train_step):
  """Returns a new function, of which nothing is compiled or told yet."""
  fn = lambda *args: step(*args)
  _FUNCTIONS.append(fn)  # one that dies is another reason to warn
  return fn


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


def test_batch_that_is_not_split_warns_in_jit_and_lower(state):
  with pytest.warns(UserWarning, match="1/x of shape") as caught:
    EIGHT.jit(new_step())(state, batch(0))
    EIGHT.jit(new_step()).lower(state, batch(0))
  assert [w.filename for w in caught] == [__file__] * 2


@pytest.mark.filterwarnings("ignore:AGN")
def test_batch_that_is_not_split_warns_with_agn():
  agn = create(EIGHT, [fs.AGN(2)])
  with pytest.warns(UserWarning, match="1/x of shape"):
    EIGHT.run(new_step(), args=(agn, batch(0)))


def test_evaluation_of_a_batch_that_is_not_split_warns(state):
  evaluate = lambda state, batch: loss_fn(state.params, batch)
  with pytest.warns(UserWarning, match="1/x of shape"):
    EIGHT.run(evaluate, args=(state, batch(0)))


def test_batch_that_is_not_split_warns_in_spite_of_dropout_keys(state):
  def step(state, x, key):
    key = fs.get_replica_context().fold_in(key)
    return drop_and_step(state, x, key)

  with pytest.warns(UserWarning, match="argument 1 of shape") as caught:
    EIGHT.run(step, args=(state, X[0], KEY))
  assert len(caught) == 1


def test_batch_that_is_replicated_on_purpose_does_not_warn(state):
  whole = EIGHT.shard_batch(batch(0), spec=P())
  with no_warning():
    EIGHT.jit(new_step()).lower(state, whole)
    EIGHT.run_steps(new_step(), state, [whole], reduce="mean")


def test_arrays_beside_a_split_batch_do_not_warn(state):
  def step(state, batch, weights):
    return train_step(state, {**batch, "x": batch["x"] * weights})

  with no_warning():
    EIGHT.jit(step).lower(state, sharded(EIGHT, 0), np.ones(8))


def test_arrays_without_a_state_do_not_warn():
  with no_warning():
    EIGHT.jit(lambda x: x.sum()).lower(X[0])


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


def test_data_in_the_state_does_not_warn():
  rows = EIGHT.distribute_values_from_function(
    lambda context: X[0, 2 * context.replica_id_in_sync_group :][:2]
  )
  state = create(EIGHT, rows=rows)

  def step(state, weights):
    loss = lambda p: (state.rows @ p["w1"] @ p["w2"] * weights.sum()).mean()
    return state.minimize(loss)

  with no_warning():
    EIGHT.jit(step).lower(state, np.ones(8))


def test_one_replica_does_not_warn():
  with no_warning():
    ONE.jit(new_step()).lower(create(ONE), batch(0))


def test_shapes_in_lower_do_not_warn(state):
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, batch(0))
  )
  with no_warning():
    EIGHT.jit(new_step()).lower(*shapes)


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


def test_gradients_reduced_by_hand_warn_with_wrappers_and_in_loops():
  state = create(EIGHT, [fs.LossScale("dynamic"), fs.CrossShard("mean")])
  step = reduced_step(SUMS["psum"])
  with pytest.warns(UserWarning, match="already reduced"):
    EIGHT.run_steps(step, state, [sharded(EIGHT, 0)] * 2, reduce="mean")


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


def test_a_second_state_without_data_does_not_warn(state):
  other = create(EIGHT)

  def step(state, other, batch):
    state, loss = train_step(state, batch)
    # Its gradient is the same on all replicas: it follows from the parameters.
    gap = lambda p: ((p["w2"] - state.params["w2"]) ** 2).sum()
    return state, other.minimize(gap)[0], loss

  with no_warning():
    EIGHT.jit(step).lower(state, other, sharded(EIGHT, 0))


def test_a_loss_divided_by_a_sum_over_replicas_does_not_warn(state):
  def loss(params, batch):
    total = fs.get_replica_context().all_reduce("mean", jnp.sum(batch["y"]))
    return loss_fn(params, batch) / total

  with no_warning():
    step = lambda state, batch: state.minimize(loss, batch)
    EIGHT.jit(step).lower(state, sharded(EIGHT, 0))


# -- One dropout key for all replicas (mistake 28).


def drop_and_step(state, x, key):
  drop = nn.Dropout(0.5, deterministic=False)

  def loss(params):
    kept = drop.apply({}, x, rngs={"dropout": key})
    return ((kept @ params["w1"]) @ params["w2"]).mean()

  return state.minimize(loss)


@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(0)])
def test_one_dropout_key_for_all_replicas_warns_once(state, key):
  def step(state, x, key):
    return drop_and_step(state, x, jax.random.fold_in(key, state.step))

  with pytest.warns(UserWarning) as caught:
    for _ in range(2):
      EIGHT.run(step, args=(state, EIGHT.shard_batch(X[0]), key))
  (warning,) = caught
  message = str(warning.message)
  assert "argument 2" in message and "(2, 8)" in message
  assert "fold_in" in message
  assert warning.filename == __file__


def test_one_dropout_key_in_run_steps_warns(state):
  batches = [{"x": EIGHT.shard_batch(X[i]), "key": KEY} for i in range(2)]
  step = lambda state, b: drop_and_step(state, b["x"], b["key"])
  with pytest.warns(UserWarning, match=r"1/key.*fold_in"):
    EIGHT.run_steps(step, state, batches, reduce="mean")


@pytest.mark.parametrize(
  "own_key",
  [
    lambda c, key: c.fold_in(key),
    lambda c, key: jax.random.fold_in(key, c.replica_id_in_sync_group),
    # The same on purpose.
    lambda c, key: c.assume_replicated(key),
  ],
)
def test_dropout_key_of_each_replica_does_not_warn(state, own_key):
  def step(state, x, key):
    return drop_and_step(state, x, own_key(fs.get_replica_context(), key))

  with no_warning():
    EIGHT.jit(step).lower(state, EIGHT.shard_batch(X[0]), KEY)


def test_noise_that_is_the_same_on_purpose_does_not_warn(state):
  def noise_on_parameters(state, batch, key):
    # 8 rows, as each replica's part of the batch: the shape alone says nothing.
    state, loss = train_step(state, batch)
    noise = jax.random.normal(key, (8, 3)).sum()
    w1 = state.params["w1"] + noise
    return state.replace(params={**state.params, "w1": w1}), loss

  def noise_on_local_gradients(state, batch, key):
    _, grads = state.value_and_grad(loss_fn, batch)
    noise = jax.random.normal(key, grads["w1"].shape)
    return state.apply_gradients(grads={**grads, "w1": grads["w1"] + noise})

  def mixup(state, batch, key):
    share = jax.random.beta(key, 0.2, 0.2)
    x = share * batch["x"] + (1 - share) * batch["x"][::-1]
    return train_step(state, {**batch, "x": x})

  whole = jax.tree.map(lambda x: np.concatenate([x] * 4), batch(0))
  with no_warning():
    for step in (noise_on_parameters, noise_on_local_gradients, mixup):
      EIGHT.jit(step).lower(state, EIGHT.shard_batch(whole), KEY)


@pytest.mark.filterwarnings("ignore:Specifying a key")
def test_noise_of_the_optimizer_does_not_warn():
  state = create(EIGHT, tx=optax.noisy_sgd(0.1))
  with no_warning():
    EIGHT.jit(new_step()).lower(state, sharded(EIGHT, 0))
