"""The compiled AGN step: place and size of its collectives, its memory."""

import collections
import functools

import agn_problem
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tree_equality import assert_trees_close

import flaxshard as fs
from flaxshard import plans

P = jax.sharding.PartitionSpec
SIZE = 64
LAYER = {"w": np.eye(SIZE, dtype=np.float32), "b": np.zeros(SIZE, np.float32)}
PARAMS = {f"layer{i}": LAYER for i in range(3)}
BYTES = 4 * sum(p.size for p in jax.tree.leaves(PARAMS))
ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def loss_fn(params, x):
  for layer in params.values():
    x = jnp.tanh(x @ layer["w"] + layer["b"])
  return (x**2).mean()


def step(state, x):
  return state.minimize(loss_fn, x)


EIGHT = agn_problem.strategy_of(8)


def create(strategy, wrappers, tx=ADAM, params=PARAMS):
  """Returns the step, a state, and a batch."""
  state = fs.TrainState.create(
    apply_fn=None, params=params, tx=tx, wrappers=wrappers, strategy=strategy
  )
  x = strategy.shard_batch(np.ones((16, SIZE), np.float32))
  return strategy.jit(step, donate_argnums=0), state, x


@functools.cache
def compile_step(*wrappers, tx=ADAM):
  run, state, x = create(EIGHT, wrappers, tx)
  return run.lower(state, x).compile()


def collectives(compiled):
  """Returns `{kind: bytes}` of all collectives, which commits alone have."""
  kinds = collections.Counter()
  for found in plans.collectives(compiled, EIGHT.mesh):
    assert found.in_commit
    kinds[found.kind] += found.result_bytes
  return kinds


@pytest.mark.parametrize(
  ("commit", "tx", "wanted"),
  [
    ("mean", ADAM, {"all-reduce": BYTES}),
    # Eight divides every leaf. The all-gather is of the center and its slots.
    ("sequential", ADAM, {"all-to-all": 2 * BYTES, "all-gather": 3 * BYTES}),
    # It mixes elements. The loop runs eight times.
    ("sequential", CLIPPED, {"all-reduce": BYTES}),
  ],
)
def test_a_commit_communicates_inside_the_conditional_alone(commit, tx, wanted):
  compiled = compile_step(fs.AGN(10, commit), tx=tx)
  assert collectives(compiled) == wanted
  if commit == "mean":
    assert len(plans.collectives(compiled, EIGHT.mesh)) == 1


def test_memory_of_the_state_and_of_a_commit():
  plain = compile_step().memory_analysis()
  for commit, temporary in (("mean", 0.5), ("sequential", 2.5)):
    stats = compile_step(fs.AGN(10, commit)).memory_analysis()
    # Center, two slots, local parameters, two slots, accumulator: seven.
    assert stats.argument_size_in_bytes < 7.1 * BYTES
    assert stats.alias_size_in_bytes > 7 * BYTES
    more = stats.temp_size_in_bytes - plain.temp_size_in_bytes
    assert more < temporary * BYTES


@pytest.mark.parametrize(
  "commit", [pytest.param("mean", marks=pytest.mark.slow), "sequential"]
)
def test_logical_devices_exchange_their_shards(commit):
  strategy = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  sharding = jax.sharding.NamedSharding(strategy.mesh, P("model"))
  split = jax.tree.map(lambda x: jax.device_put(x, sharding), LAYER)
  wrapper = fs.AGN(3, commit=commit)
  run, state, x = create(strategy, [wrapper], params={"layer": split})
  found = plans.collectives(run.lower(state, x).compile(), strategy.mesh)
  total = sum(c.result_bytes for c in found if "replica" in c.axes)
  # Half of one of the three layers.
  assert total == BYTES // 6 * {"mean": 1, "sequential": 5}[commit]
  # The values are those of replicas with one device.
  run_whole, whole, x_whole = create(
    agn_problem.strategy_of(4), [wrapper], params={"layer": LAYER}
  )
  for _ in range(4):
    state, _ = run(state, x)
    whole, _ = run_whole(whole, x_whole)
  agn, wanted = state.wrapper_states["agn"], whole.wrapper_states["agn"]
  assert_trees_close(
    (state.params, agn.local_params, agn.grad_accum),
    (whole.params, wanted.local_params, wanted.grad_accum),
    rtol=1e-4,
    atol=1e-5,
  )
  assert agn.local_params["layer"]["w"].sharding.spec == P("replica", "model")
