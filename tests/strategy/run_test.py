"""Strategy.run and run_steps: what arrives, and what comes back."""

import functools

import compilations
from flax import linen as nn
from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from regression import batch
from regression import create
from regression import loss_fn
from regression import sharded
from regression import split
from regression import train_step
from regression import X
from tree_equality import assert_trees_close
from tree_equality import assert_trees_equal

import flaxshard as fs

P = jax.sharding.PartitionSpec
NamedSharding = jax.sharding.NamedSharding

EIGHT = fs.Strategy()
SPLIT = fs.Strategy(mesh_shape={"replica": 2, "model": 4})
SGD = optax.sgd(0.1)


def replica_id():
  return fs.get_replica_context().replica_id_in_sync_group


ROWS = np.arange(64.0, dtype=np.float32).reshape(8, 8)


@pytest.mark.parametrize(
  ("strategy", "spec", "wanted"),
  [
    (EIGHT, P("replica"), ROWS[:, None]),
    (EIGHT, P(None, "replica"), ROWS.T[:, :, None]),
    (EIGHT, None, np.stack([ROWS] * 8)),
    # Split over both axes, it stays so over the logical devices.
    (SPLIT, P("replica", "model"), ROWS.reshape(2, 4, 8)),
    (SPLIT, P(("model", "replica")), ROWS.reshape(2, 4, 8)),
    (SPLIT, P("model", "replica"), ROWS.reshape(8, 2, 4).swapaxes(0, 1)),
  ],
)
def test_sharded_array_arrives_in_parts(strategy, spec, wanted):
  x = jax.device_put(ROWS, spec and NamedSharding(strategy.mesh, spec))
  for is_disabled in (False, True):
    with jax.disable_jit(is_disabled):
      got = strategy.run(lambda x: x, args=(x,))
    np.testing.assert_array_equal(got, wanted)


# -- Results.


def test_results_keep_their_structure():
  def fn(x):
    number = replica_id()
    moments = optax.TraceState(x + number)
    return {"a": moments, "list": [number > 3, 1, None], "b": jnp.bfloat16(2)}

  got = EIGHT.run(fn, args=(0.5,))
  assert np.asarray(got["a"].trace).tolist() == [0.5 + i for i in range(8)]
  assert np.asarray(got["list"][0]).tolist() == [i > 3 for i in range(8)]
  assert np.asarray(got["list"][1]).tolist() == [1] * 8
  assert got["list"][2] is None
  assert got["b"].value.dtype == jnp.bfloat16
  assert EIGHT.run(lambda: None) is None


def test_flax_train_state():
  def step(state, batch):
    grads = jax.grad(loss_fn)(state.params, batch)
    grads = fs.get_replica_context().all_reduce("mean", grads)
    return state.apply_gradients(grads=grads)

  state = flax_train_state.TrainState.create(
    apply_fn=None, params=create().params, tx=SGD
  )
  new = EIGHT.run(step, args=(state, sharded(EIGHT, 0)))
  assert type(new) is flax_train_state.TrainState
  wanted, _ = jax.jit(train_step)(create(tx=SGD), batch(0))
  assert_trees_close(new.params, wanted.params)


def test_two_states_keep_their_shardings():
  student = create(SPLIT)
  teacher = split(create(SPLIT), SPLIT.mesh, P(None, "model"))

  def fn(teacher, student, batch):
    student, _ = student.minimize(loss_fn, batch)
    average = lambda a, b: 0.5 * (a + b)
    params = jax.tree.map(average, teacher.params, student.params)
    teacher = teacher.replace(params=params)
    return teacher, student, teacher.replace(tx=SGD)

  new = SPLIT.run(fn, args=(teacher, student, sharded(SPLIT, 0)))
  for before, after in zip((teacher, student, teacher), new, strict=True):
    assert after.params["w1"].sharding == before.params["w1"].sharding


def normalize(x, axis_name="replica"):
  norm = nn.BatchNorm(use_running_average=False, axis_name=axis_name)
  # The initialization does not look at the other replicas.
  variables = norm.init(jax.random.key(0), x)
  return norm.apply(variables, x, mutable=True)[0]


def test_batch_norm_over_the_axis_of_the_replicas():
  x = X[0, :, :3]
  got = np.asarray(EIGHT.run(normalize, args=(EIGHT.shard_batch(x),)))
  wanted = jax.jit(normalize, static_argnums=1)(x, None)
  np.testing.assert_allclose(got.reshape(16, 3), wanted, rtol=1e-4, atol=1e-5)


# -- States with per-replica leaves.


def each_its_own(tree):
  return jax.tree.map(lambda x: fs.PerReplica(np.stack([x] * 8)), tree)


def step_with_statistics(state, batch):
  old, x = state.batch_stats, batch["x"]
  stats = {
    "mean": 0.5 * old["mean"] + 0.5 * x.mean(0),
    "var": 0.5 * old["var"] + 0.5 * x.var(0),
  }
  loss, grads = state.value_and_grad(loss_fn, batch)
  return state.apply_gradients(grads=grads, batch_stats=stats), loss


def test_one_leaf_of_a_collection_may_be_per_replica(tmp_path):
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
  means, var = np.zeros((8, 8), np.float32), np.ones(8, np.float32)
  stats = {"mean": each_its_own(means[0]), "var": var}
  state = create(EIGHT, [fs.LossScale("dynamic")], SGD, batch_stats=stats)
  for i in range(2):
    state, _ = EIGHT.run(step_with_statistics, (state, sharded(EIGHT, i)))
    parts = X[i].reshape(8, 2, 8)
    means = 0.5 * means + 0.5 * parts.mean(1)
    var = 0.5 * var + 0.5 * parts.var(1).mean(0)
    assert isinstance(state.batch_stats["mean"], fs.PerReplica)
    close(np.asarray(state.batch_stats["mean"]), means)
    close(state.batch_stats["var"], var)
  # They are averaged when they are saved.
  close(state.without_wrappers().batch_stats["mean"], means.mean(0))
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(2, state)
    restored = checkpointer.restore(state)
  close(np.asarray(restored.batch_stats["mean"]), [means.mean(0)] * 8)
  args = restored, sharded(EIGHT, 2)
  with compilations.count() as compiled:
    EIGHT.run(step_with_statistics, args=args)
  assert compiled.total == 0


def test_per_replica_keys():
  keys = jax.vmap(jax.random.key)(jnp.arange(8))
  state = create(EIGHT, tx=SGD, rngs=np.zeros((), np.float32))
  state = state.replace(rngs=fs.PerReplica({"dropout": keys}))

  def step(state):
    key, mine = jax.random.split(state.rngs["dropout"])
    return state.replace(rngs={"dropout": key}), jax.random.uniform(mine)

  new, drawn = EIGHT.run(step, args=(state,))
  assert jax.tree.structure(new) == jax.tree.structure(state)
  # Without replicas, the first key counts.
  assert state.without_wrappers().rngs["dropout"] == keys[0]
  for i in (0, 5):
    key, mine = jax.random.split(keys[i])
    assert new.rngs[i]["dropout"] == key
    assert float(drawn[i]) == float(jax.random.uniform(mine))


def test_parameters_with_per_replica_moments_must_be_per_replica():
  # Updates computed from per-replica moments differ between replicas.
  state = create(EIGHT)
  state = state.replace(opt_state=each_its_own(state.opt_state))
  args = state, sharded(EIGHT, 0)
  of_both = (
    r"differ, .*: 0/params/w1 \(.*own data\), 0/params/w2 \(.*own data\)\. "
  )
  with pytest.raises(ValueError, match=of_both):
    EIGHT.run(train_step, args=args)
  state = state.replace(params=each_its_own(state.params))
  new, _ = EIGHT.run(train_step, args=(state, args[1]))
  wanted, _ = jax.jit(train_step)(create(), batch(0))
  assert jax.tree.structure(new) == jax.tree.structure(state)
  np.testing.assert_allclose(
    new.params["w1"][3], wanted.params["w1"], atol=1e-6
  )


# -- Several steps in one program.


def with_outputs(state, batch):
  state, loss = state.minimize(loss_fn, batch)
  key = jax.random.fold_in(jax.random.key(0), replica_id())
  outputs = {"loss": loss, "count": replica_id() + 1, "positive": loss > 0}
  return state, {**outputs, "key": key, "number": 1.5, "row": batch["x"][0]}


def test_run_steps_equals_run_and_reduces_each_output():
  # The second step is skipped.
  batches = [sharded(EIGHT, i, bad=9 if i == 1 else None) for i in range(3)]
  dynamic = [fs.LossScale("dynamic")]
  donated, state = create(EIGHT, dynamic), create(EIGHT, dynamic)
  reduce = {"loss": "mean", "count": "sum", "positive": "sum"}
  reduce |= {"key": None, "number": "sum", "row": None}
  got, outputs = EIGHT.run_steps(
    with_outputs, donated, batches, reduce=reduce, donate_state=True
  )
  assert all(x.is_deleted() for x in jax.tree.leaves(donated))
  for one in batches:
    state, wanted = EIGHT.run(with_outputs, args=(state, one))
  assert_trees_close(got, state, 0, 1e-7)
  assert (int(got.step), float(got.metrics()["skipped_steps"])) == (2, 1)
  np.testing.assert_allclose(outputs["loss"], wanted["loss"].mean(), rtol=1e-6)
  sums = [float(outputs[k]) for k in ("count", "positive", "number")]
  assert sums == [36, 8, 12]
  kept = [(x["key"], x["row"]) for x in (outputs, wanted)]
  assert_trees_equal(*kept)


def test_run_steps_with_per_replica_batches():
  # As many steps as replicas: sizes do not show which dimension is which.
  batches = [fs.PerReplica(10.0 * i + jnp.arange(8.0)) for i in range(8)]

  def step(state, x):
    count = jax.lax.pmax(x, "replica").astype(jnp.int32)
    return state.replace(step=10 * state.step + count // 10), x

  state, last = EIGHT.run_steps(step, create(EIGHT), batches)
  assert int(state.step) == 1234567
  assert np.asarray(last).tolist() == [70.0 + i for i in range(8)]
