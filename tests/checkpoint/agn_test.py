"""Checkpoints of AGN: exact resume, other numbers of replicas, the center."""

import dataclasses
import functools

from agn_problem import strategy_of
import checkpoint_states as states
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tree_equality import assert_trees_equal

import flaxshard as fs

P = jax.sharding.PartitionSpec
X = np.random.default_rng(0).normal(size=(8, 16, 2)).astype(np.float32)


class Normed(nn.Module):
  @nn.compact
  def __call__(self, x, train=True):
    x = nn.BatchNorm(use_running_average=not train)(x)
    return nn.Dense(3)(x)


MODEL = Normed()
TX = optax.adam(0.125)
MEAN = fs.AGN(3, commit="mean")
SCALED = fs.LossScale("dynamic")
OUTER = fs.AGN(
  3,
  commit="mean",
  commit_delta=True,
  outer_tx=optax.sgd(0.7, momentum=0.9, nesterov=True),
)


def create(replicas, *wrappers, seed=0):
  """Returns a state; `replicas=None` is one without a strategy."""
  return fs.create_train_state(
    MODEL,
    jax.random.key(seed),
    X[0],
    TX,
    wrappers=wrappers,
    strategy=replicas and strategy_of(replicas),
  )


def train_step(state, x):
  def loss_fn(params):
    variables = {"params": params, "batch_stats": state.batch_stats}
    out, new = state.apply_fn(variables, x, mutable=["batch_stats"])
    return ((out - 1.0) ** 2).mean(), new["batch_stats"]

  (_, stats), grads = state.value_and_grad(loss_fn, has_aux=True)
  return state.apply_gradients(grads=grads, batch_stats=stats)


@functools.cache
def compiled(replicas):
  if replicas is None:
    return jax.jit(train_step)
  return strategy_of(replicas).jit(train_step)


def trained(state, replicas, steps):
  for x in X[:steps]:
    if replicas is not None:
      x = strategy_of(replicas).shard_batch(x)
    state = compiled(replicas)(state, x)
  return state


def after_seven(*wrappers):
  """Two commits of eight replicas, and one more step."""
  return trained(create(8, *wrappers), 8, 7)


def assert_plain_equal(given, wanted):
  for field in ("step", "params", "opt_state", "batch_stats"):
    assert_trees_equal(getattr(given, field), getattr(wanted, field))


def assert_begins_at_center(state, replicas, *, count, local_step, commits):
  """Every replica of AGN is where `state` is, and has accumulated nothing."""
  agn = state.wrapper_states["agn"]
  adam, center = agn.local_opt_state[0], state.opt_state[0]
  for own, one in (
    (agn.local_params, state.params),
    ((adam.mu, adam.nu), (center.mu, center.nu)),
    (agn.grad_accum, jax.tree.map(jnp.zeros_like, state.params)),
    (agn.collections["batch_stats"], state.batch_stats),
  ):
    spread = lambda x: np.broadcast_to(x, (replicas, *x.shape))
    assert_trees_equal(own, jax.tree.map(spread, jax.device_get(one)))
  assert adam.count.tolist() == [count] * replicas
  assert (int(agn.local_step), int(agn.commits)) == (local_step, commits)


def test_resuming_in_mid_period_is_exact(tmp_path, caplog):
  state = after_seven(SCALED, OUTER)
  agn = state.wrapper_states["agn"]
  assert (int(agn.local_step), int(agn.commits)) == (7, 2)
  for tree in (agn.local_params, agn.grad_accum, agn.collections):
    last = np.asarray(jax.tree.leaves(tree)[-1])
    assert not (last[0] == last[1]).any()  # the replicas differ
  states.write_ours(tmp_path, state)
  fresh = create(8, SCALED, OUTER, seed=1)
  restored = fs.checkpoint.restore(tmp_path, fresh)
  assert_trees_equal(restored, state)
  states.assert_lies_like(restored, fresh)
  assert_trees_equal(trained(restored, 8, 3), trained(state, 8, 3))
  assert states.messages(caplog) == []


def test_restores_eight_replicas_as_one_and_back(tmp_path, caplog):
  state = after_seven(SCALED, MEAN)
  states.write_ours(tmp_path, state)
  fresh = create(None, SCALED, MEAN, seed=1)
  one = fs.checkpoint.restore(tmp_path, fresh)
  assert_plain_equal(one, state)
  assert_begins_at_center(one, 1, count=7, local_step=6, commits=2)
  assert "shape (8, 2), where (1, 2) is" in states.messages(caplog)[0]
  one = trained(one, None, 5)
  assert int(one.wrapper_states["agn"].commits) == 3
  states.write_ours(tmp_path / "one", one)
  fresh = states.abstract(create(8, SCALED, MEAN))
  eight = fs.checkpoint.restore(tmp_path / "one", fresh)
  states.assert_lies_like(eight, fresh)
  assert_begins_at_center(eight, 8, count=12, local_step=9, commits=3)


@dataclasses.dataclass(frozen=True)
class CountsPerReplica(fs.wrappers.Base):
  """Counts the steps of each replica; has no `restart`."""

  def init(self, params, tx):
    del params, tx
    return {"steps": jnp.zeros((), jnp.int32)}

  def specs(self, state):
    return jax.tree.map(lambda _: P("replica"), state)


def test_wrapper_without_restart_on_other_replicas_raises(tmp_path):
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, create(8, CountsPerReplica()))
    checkpointer.restore(create(8, CountsPerReplica()))
    with pytest.raises(
      ValueError,
      match=r"/1 .*'counts_per_replica'.* `restart` .*: shape \(8,\), .*\(4,\)",
    ):
      checkpointer.restore(create(4, CountsPerReplica()))
