"""Mistakes in arguments and steps: errors, and warnings of what would run."""

import functools
import warnings

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from regression import batch
from regression import create
from regression import loss_fn
from regression import sharded
from regression import split
from regression import train_step
from regression import X
from regression import Y
import sparse_states

import flaxshard as fs

P = jax.sharding.PartitionSpec

EIGHT = fs.Strategy()
REVERSED = fs.Strategy(devices=jax.devices()[::-1])
KEY = jax.random.key(0)
NORM = fs.PerReplica(nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
SHORTER = {**batch(1), "y": Y[1][:8]}


echo = EIGHT.jit(lambda x: x)
rows = lambda n: fs.PerReplica(EIGHT.shard_batch(np.ones(n)))


def run_split_agn():
  """Replicas that step alone need whole parameters."""
  state = split(local_state(), EIGHT.mesh, P("replica"))
  EIGHT.run(lambda s: s, [state])


pmean = functools.partial(jax.lax.pmean, axis_name="replica")


def step_with(reduce, **options):
  def step(state, batch):
    loss, grads = state.value_and_grad(loss_fn, batch)
    return state.apply_gradients(grads=reduce(grads), **options), loss

  return step


UNREDUCED = step_with(lambda g: g, skip_gradients_aggregation=True)
REDUCED_BY_HAND = step_with(pmean, skip_gradients_aggregation=True)


def own_sums():
  return create(EIGHT, [fs.Accumulate(2, per_replica=True)])


def steps(batches, step=train_step, **options):
  return EIGHT.run_steps(step, create(), batches, **options)


def good(step=train_step, **options):
  return steps([sharded(EIGHT, 0)], step, **options)


def changes_a_shape(state, batch):
  return state.replace(params={**state.params, "w1": state.params["w2"]})


@pytest.mark.parametrize(
  ("call", "error", "facts"),
  [
    (lambda: EIGHT.jit(3), TypeError, "run: fn must be .* got 3"),
    (lambda: EIGHT.run(jnp.sum, 3.0), TypeError, r"args=\(state, batch\), got"),
    (lambda: echo("a"), TypeError, "argument 0.*'a'"),
    (lambda: echo({"n": 2**31}), ValueError, rf"argument 0/n .*{2**31}.*int32"),
    (lambda: echo(fs.PerReplica(np.ones(4))), ValueError, r"shape \(4,\)"),
    # Also if rows of the right number were compiled before.
    (lambda: [echo(rows(n)) for n in (8, 16)], ValueError, r"shape \(16,\)"),
    (lambda: echo(sharded(REVERSED, 0)), ValueError, "argument 0/x"),
    (run_split_agn, ValueError, "0/params/w1 is split over 'replica'"),
    (lambda: jax.jit(lambda x: echo(X))(1.0), TypeError, "argument 0"),
    (
      lambda: echo([{"a": NORM}]),
      TypeError,
      r"argument 0/0/a/value is a BatchNorm .*nnx\.jit",
    ),
    (lambda: EIGHT.jit(jnp.sum, donate_argnums=-1)(1.0), ValueError, "num.*-1"),
    # What a function does and returns.
    (lambda: EIGHT.run(lambda: {"a": "x"}), TypeError, r"\[a\]"),
    (lambda: EIGHT.run(lambda: fs.PerReplica(X)), TypeError, "PerReplica"),
    (
      lambda: EIGHT.run(lambda: jax.lax.pmean(1.0, "batch")),
      ValueError,
      "batch.* axis_name='replica'",
    ),
    (
      lambda: EIGHT.run(UNREDUCED, [create(EIGHT), sharded(EIGHT, 0)]),
      ValueError,
      r"params/w1 \(a replica's own data\).*opt_state/0/nu/w2 \([^,]*\. ",
    ),
    (
      lambda: EIGHT.run(UNREDUCED, [own_sums(), sharded(EIGHT, 0)]),
      ValueError,
      "skip_gradients_aggregation: .*'accumulate' .*per_replica=False",
    ),
    # Batches of run_steps; one in place of several: its examples are no steps.
    (lambda: steps([]), ValueError, r"batches.*\[\]"),
    (lambda: steps({"x": X[:0]}), ValueError, "batches"),
    (lambda: steps({"x": X, "y": Y[:2]}), ValueError, r"\[\(2,\), \(3,\)\]"),
    (lambda: steps([batch(0), SHORTER]), ValueError, "same shape"),
    (
      lambda: steps(sharded(EIGHT, 0)),
      ValueError,
      r"batches\[x\] .*\(16, 8\).* list",
    ),
    (lambda: good(reduce="max"), ValueError, "reduce .*'max'"),
    (lambda: good(changes_a_shape), TypeError, r"carry.*params\['w1'\]"),
  ],
)
def test_mistakes(call, error, facts):
  with pytest.raises(error, match=facts):
    call()


# -- Warnings, once for each trace. To lower a step traces it.


def new_step(step=train_step):
  """Returns a new function, of which nothing is compiled or told yet."""
  return lambda *args: step(*args)


def dense_state():
  return create(EIGHT)


def local_state():
  return create(EIGHT, [fs.AGN(9)])


def sparse_state():
  return sparse_states.create(EIGHT, sparse_states.ADAGRAD)


def dropout_step(state, x, key):
  key = fs.get_replica_context().fold_in(key)
  drop = nn.Dropout(0.5, deterministic=False)

  def loss(params):
    kept = drop.apply({}, x, rngs={"dropout": key})
    return ((kept @ params["w1"]) @ params["w2"]).mean()

  return state.minimize(loss)


def sparse_step(state, batch):
  loss, grads = state.value_and_grad(sparse_states.loss_fn, batch)
  grads = fs.get_replica_context().all_reduce("sum", grads)
  return state.apply_gradients(grads=grads), loss


WHOLE = "of shape (16, 8)", "8 replicas", "strategy.shard_batch"
REDUCED = "already reduced", "8 times", "skip_gradients_aggregation=True"
ROWS = EIGHT.shard_batch(sparse_states.batch(0))
CAPTURING = [
  functools.partial(train_step, batch=x) for x in (batch(0), sharded(EIGHT, 0))
]


@pytest.mark.parametrize(
  ("new_state", "step", "args", "facts"),
  [
    # A batch that is not split (mistake 16), in spite of keys for dropout.
    (dense_state, new_step(), [batch(0)], ("argument 1/x ", *WHOLE)),
    (local_state, new_step(), [batch(0)], ("argument 1/x ", *WHOLE)),
    (dense_state, dropout_step, [X[0], KEY], ("argument 1 ", *WHOLE)),
    *[(dense_state, f, [], ("a captured array ", *WHOLE)) for f in CAPTURING],
    # Gradients that are reduced by hand (mistake 27).
    (dense_state, step_with(pmean), [sharded(EIGHT, 0)], REDUCED),
    (sparse_state, sparse_step, [ROWS], REDUCED),
  ],
)
def test_mistakes_in_steps_warn_once(new_state, step, args, facts):
  args, step = (new_state(), *args), EIGHT.jit(step)
  with pytest.warns(UserWarning) as caught:
    for _ in range(2):
      step.lower(*args)
  (warning,) = caught
  assert all(fact in str(warning.message) for fact in facts)
  assert warning.filename == __file__


def test_batches_of_run_steps_that_are_not_split_warn():
  step = new_step()
  with pytest.warns(UserWarning, match=r"1/0/x of shape \(16, 8\)") as caught:
    for n in (2, 16):  # fewer examples than replicas are hardly a batch
      steps([{"x": X[0][:n], "y": Y[0][:n]}] * 2, step)
  assert [w.filename for w in caught] == [__file__]


def take_part(state, batch):
  number = fs.get_replica_context().replica_id_in_sync_group
  part = lambda x: jax.lax.dynamic_slice_in_dim(x, 2 * number, 2)
  return train_step(state, jax.tree.map(part, batch))


def sample_rows(state, batch):
  key = fs.get_replica_context().fold_in(KEY)
  rows = jax.random.randint(key, (2,), 0, 16)
  return train_step(state, jax.tree.map(lambda x: x[rows], batch))


def small_arguments(state, keys, *args):
  # Random inputs of each replica beside a table that is captured.
  noise = jax.random.normal(fs.get_replica_context().fold_in(keys[0]), (16,))
  return state.minimize(lambda p: (p["w2"].sum() * (noise @ X[0])).sum())


@pytest.mark.parametrize(
  ("step", "wrappers", "args"),
  [
    # The whole batch on every replica, on purpose.
    (train_step, [], [EIGHT.shard_batch(batch(0), spec=P())]),
    (take_part, [], [batch(0)]),
    (sample_rows, [], [batch(0)]),
    (small_arguments, [], [jax.random.split(KEY, 16), np.ones(3), 0.1]),
    (small_arguments, [], [jax.random.split(jax.random.PRNGKey(0), 16)]),
    (REDUCED_BY_HAND, [], [sharded(EIGHT, 0)]),
    # Of the gradients, only some depend on the batch.
    (step_with(lambda g: {**g, "w2": g["w2"] * 0}), [], [sharded(EIGHT, 0)]),
    # A wrapper reduces them.
    (train_step, [fs.CrossShard("sum")], [sharded(EIGHT, 0)]),
    (train_step, [fs.AGN(1, commit="mean")], [sharded(EIGHT, 0)]),
  ],
)
def test_right_steps_do_not_warn(step, wrappers, args):
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    EIGHT.jit(new_step(step)).lower(create(EIGHT, wrappers), *args)
