"""Strategy.run: arguments, results, and the errors about them."""

import functools

import compilations
from flax import linen as nn
from flax import nnx
from flax import struct
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

import flaxshard as fs

P = jax.sharding.PartitionSpec
NamedSharding = jax.sharding.NamedSharding

EIGHT = fs.Strategy()
SPLIT = fs.Strategy(mesh_shape={"replica": 2, "model": 4})


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
    (SPLIT, P(("replica", "model")), ROWS.reshape(2, 4, 8)),
    (SPLIT, P(("model", "replica")), ROWS.reshape(2, 4, 8)),
    (SPLIT, P("model", "replica"), ROWS.reshape(8, 2, 4).swapaxes(0, 1)),
  ],
)
def test_sharded_array_arrives_in_parts(strategy, spec, wanted):
  x = ROWS
  if spec is not None:
    x = jax.device_put(x, NamedSharding(strategy.mesh, spec))
  got = strategy.run(lambda x: x, args=(x,))
  np.testing.assert_array_equal(got, wanted)


# -- Results.


@struct.dataclass
class Output:
  loss: jax.Array
  other: jax.Array | None = None


def test_results_keep_their_structure():
  def fn(x):
    number = replica_id()
    out = Output(x + number)
    return {"out": out, "list": [number > 3, 1, None], "half": jnp.bfloat16(2)}

  got = EIGHT.run(fn, args=(0.5,))
  assert got["out"].other is None and got["list"][2] is None
  assert np.asarray(got["out"].loss).tolist() == [0.5 + i for i in range(8)]
  assert np.asarray(got["list"][0]).tolist() == [i > 3 for i in range(8)]
  assert np.asarray(got["list"][1]).tolist() == [1] * 8
  assert got["half"].value.dtype == jnp.bfloat16
  assert EIGHT.run(lambda: None) is None


def test_flax_train_state():
  tx = optax.sgd(0.1)

  def step(state, batch):
    grads = jax.grad(loss_fn)(state.params, batch)
    grads = fs.get_replica_context().all_reduce("mean", grads)
    return state.apply_gradients(grads=grads)

  state = flax_train_state.TrainState.create(
    apply_fn=None, params=create().params, tx=tx
  )
  new = EIGHT.run(step, args=(state, sharded(EIGHT, 0)))
  assert type(new) is flax_train_state.TrainState
  wanted = state.apply_gradients(
    grads=jax.grad(loss_fn)(state.params, batch(0))
  )
  assert_trees_close(new.params, wanted.params)


def test_two_states_keep_their_shardings():
  student = create(SPLIT)
  teacher = split(create(SPLIT), SPLIT.mesh, P(None, "model"))

  def fn(teacher, student, batch):
    student, _ = student.minimize(loss_fn, batch)
    average = lambda a, b: 0.5 * (a + b)
    params = jax.tree.map(average, teacher.params, student.params)
    return teacher.replace(params=params), student

  new = SPLIT.run(fn, args=(teacher, student, sharded(SPLIT, 0)))
  for before, after in zip((teacher, student), new, strict=True):
    assert after.params["w1"].sharding == before.params["w1"].sharding


def normalize(x, axis_name="replica"):
  norm = nn.BatchNorm(use_running_average=False, axis_name=axis_name)
  # The initialization does not look at the other replicas.
  variables = norm.init(jax.random.key(0), x)
  return norm.apply(variables, x, mutable=True)[0]


def test_batch_norm_over_the_axis_of_the_replicas():
  x = X[0, :, :3]
  got = np.asarray(EIGHT.run(normalize, args=(EIGHT.shard_batch(x),)))
  wanted = normalize(x, axis_name=None)
  np.testing.assert_allclose(got.reshape(16, 3), wanted, rtol=1e-4, atol=1e-5)


# -- States with per-replica leaves.


class Model(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.BatchNorm(use_running_average=False, momentum=0.5)(x)
    return nn.Dense(1)(x)[:, 0]


SGD = optax.sgd(0.1)


@functools.cache
def batch_norm_state():
  return fs.TrainState.create(
    apply_fn=Model().apply,
    **Model().init(jax.random.key(0), X[0]),
    tx=SGD,
    wrappers=[fs.LossScale("dynamic")],
  )


def each_its_own(tree):
  return EIGHT.distribute_values_from_function(lambda _: tree)


def batch_norm_step(state, batch):
  def loss_fn(params):
    variables = {"params": params, "batch_stats": state.batch_stats}
    out, replaced = state.apply_fn(
      variables, batch["x"], mutable=["batch_stats"]
    )
    return ((out - batch["y"]) ** 2).mean(), replaced

  (loss, replaced), grads = state.value_and_grad(loss_fn, has_aux=True)
  return state.apply_gradients(grads=grads, **replaced), loss


@pytest.mark.slow
def test_per_replica_statistics_stay_apart_and_are_averaged_when_saved(
  tmp_path,
):
  strategy, n, state = EIGHT, 8, batch_norm_state()
  state = state.replace(batch_stats=each_its_own(state.batch_stats))
  parts = X.reshape(3, n, 16 // n, 8)
  wanted = np.zeros((n, 8))
  for i in range(2):
    state, _ = strategy.run(batch_norm_step, args=(state, sharded(strategy, i)))
    mean = state.batch_stats["BatchNorm_0"]["mean"]
    wanted = 0.5 * wanted + 0.5 * parts[i].mean(1)
    assert isinstance(mean, fs.PerReplica)
    np.testing.assert_allclose(np.asarray(mean), wanted, rtol=1e-4, atol=1e-6)
  plain = state.without_wrappers()
  mean = plain.batch_stats["BatchNorm_0"]["mean"]
  np.testing.assert_allclose(mean, wanted.mean(0), rtol=1e-4, atol=1e-6)

  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(2, state)
    restored = checkpointer.restore(state)
  args = restored, sharded(strategy, 2)
  mean = restored.batch_stats["BatchNorm_0"]["mean"]
  np.testing.assert_allclose(
    np.asarray(mean), [wanted.mean(0)] * n, rtol=1e-4, atol=1e-6
  )
  with compilations.count() as compiled:
    strategy.run(batch_norm_step, args=args)
  assert compiled.total == 0


def test_per_replica_keys():
  keys = jax.vmap(jax.random.key)(jnp.arange(8))
  state = create(EIGHT, tx=SGD, rngs=jnp.zeros(()))
  state = state.replace(rngs=fs.PerReplica({"dropout": keys}))

  def step(state):
    key, mine = jax.random.split(state.rngs["dropout"])
    return state.replace(rngs={"dropout": key}), jax.random.uniform(mine)

  new, drawn = EIGHT.run(step, args=(state,))
  assert jax.tree.structure(new) == jax.tree.structure(state)
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


def test_one_leaf_of_a_collection_may_be_per_replica():
  statistics = dict(batch_norm_state().batch_stats["BatchNorm_0"])
  statistics["mean"] = each_its_own(statistics["mean"])
  state = batch_norm_state().replace(batch_stats={"BatchNorm_0": statistics})
  new, _ = EIGHT.run(batch_norm_step, args=(state, sharded(EIGHT, 0)))
  assert jax.tree.structure(new) == jax.tree.structure(state)
  got = new.batch_stats["BatchNorm_0"]
  parts = X[0].reshape(8, 2, 8)
  np.testing.assert_allclose(
    np.asarray(got["mean"]), 0.5 * parts.mean(1), rtol=1e-4, atol=1e-6
  )
  wanted = 0.5 + 0.5 * parts.var(1).mean(0)
  np.testing.assert_allclose(got["var"], wanted, rtol=1e-4, atol=1e-6)


# -- Mistakes.


echo = lambda x: EIGHT.run(lambda x: x, args=(x,))
SPLIT_OTHERWISE = jax.device_put(X[0], NamedSharding(SPLIT.mesh, P("model")))


def run_split_agn():
  """Replicas that step alone need whole parameters."""
  state = create(EIGHT, [fs.AGN(9)])
  EIGHT.run(lambda s: s, [split(state, EIGHT.mesh, P("replica"))])


def donate(argnums):
  return EIGHT.jit(jnp.sum, donate_argnums=argnums)(1.0)


@pytest.mark.parametrize(
  ("call", "error", "facts"),
  [
    (lambda: EIGHT.run(jnp.sum, 3.0), TypeError, r"args=\(state, batch\), got"),
    (lambda: EIGHT.run(loss_fn, create(), batch(0)), TypeError, "TrainState"),
    (lambda: echo("a"), TypeError, "argument 0.*'a'"),
    (lambda: echo({"n": 2**31}), ValueError, rf"argument 0/n .*{2**31}.*int32"),
    (lambda: echo({"a": fs.PerReplica(np.ones((4, 2)))}), ValueError, "0/a"),
    (lambda: echo(fs.PerReplica(np.ones(16))), ValueError, r"shape \(16,\)"),
    (lambda: echo(SPLIT_OTHERWISE), ValueError, "argument 0"),
    (run_split_agn, ValueError, "0/params/w1 is split over 'replica'"),
    (lambda: EIGHT.run(lambda: {"a": "x"}), TypeError, r"\[a\]"),
    (
      lambda: EIGHT.run(lambda: normalize(jnp.ones((2, 3)), "batch")),
      ValueError,
      "batch.* axis_name='replica'",
    ),
    (lambda: EIGHT.run(lambda: fs.PerReplica(X)), TypeError, "PerReplica"),
    (
      lambda: EIGHT.run(lambda: create().replace(params=fs.PerReplica(X))),
      TypeError,
      "PerReplica",
    ),
    (lambda: jax.jit(lambda x: echo(X))(1.0), TypeError, "argument 0"),
    (
      lambda: echo({"a": nnx.BatchNorm(2, rngs=nnx.Rngs(0))}),
      TypeError,
      r"argument 0/a is a BatchNorm .*nnx\.jit",
    ),
    (lambda: echo(nnx.Rngs(0)), TypeError, "argument 0 is a Rngs"),
    (lambda: EIGHT.run(lambda: echo(1.0)), TypeError, "run"),
    (lambda: donate(-1), ValueError, "donate_argnums.*-1"),
    (lambda: donate(1), ValueError, "donate_argnums"),
  ],
)
def test_mistakes(call, error, facts):
  with pytest.raises(error, match=facts):
    call()
