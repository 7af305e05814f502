"""The compiled AGN step: place and size of its collectives, its memory."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard import plans

P = jax.sharding.PartitionSpec
SIZE = 64
PARAMS = {
  f"layer{i}": {
    "w": np.eye(SIZE, dtype=np.float32),
    "b": np.zeros(SIZE, np.float32),
  }
  for i in range(3)
}
BYTES = 4 * sum(p.size for p in jax.tree.leaves(PARAMS))
ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def loss_fn(params, x):
  for layer in params.values():
    x = jnp.tanh(x @ layer["w"] + layer["b"])
  return (x**2).mean()


def step(state, x):
  return state.minimize(loss_fn, x)


@functools.cache
def all_devices():
  return fs.Strategy()


def create(strategy, wrappers, tx=ADAM, params=PARAMS):
  """Returns the step, a state, and a batch."""
  state = fs.TrainState.create(
    apply_fn=None, params=params, tx=tx, wrappers=wrappers, strategy=strategy
  )
  x = strategy.shard_batch(np.ones((16, SIZE), np.float32))
  return strategy.jit(step, donate_argnums=0), state, x


@functools.cache
def compile_step(*wrappers, tx=ADAM):
  run, state, x = create(all_devices(), wrappers, tx)
  return run.lower(state, x).compile()


def collectives(compiled):
  """Returns `{kind: bytes}` of all collectives, which commits alone have."""
  kinds = collections.Counter()
  for found in plans.collectives(compiled, all_devices().mesh):
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
    pytest.param(
      "sequential", CLIPPED, {"all-reduce": BYTES}, marks=pytest.mark.slow
    ),
  ],
)
def test_a_commit_communicates_inside_the_conditional_alone(commit, tx, wanted):
  compiled = compile_step(fs.AGN(10, commit), tx=tx)
  assert collectives(compiled) == wanted
  if commit == "mean":
    assert len(plans.collectives(compiled, all_devices().mesh)) == 1


@pytest.mark.slow
def test_loss_scaling_adds_the_reduction_of_one_scalar():
  compiled = compile_step(fs.LossScale("dynamic"), fs.AGN(10, "mean"))
  found = plans.collectives(compiled, all_devices().mesh)
  outside = [c for c in found if not c.in_conditional]
  assert [(c.kind, c.result_bytes) for c in outside] == [("all-reduce", 4)]


def test_memory_of_the_state_and_of_a_commit():
  plain = compile_step().memory_analysis()
  for commit, temporary in (("mean", 0.5), ("sequential", 2.5)):
    stats = compile_step(fs.AGN(10, commit)).memory_analysis()
    # Center, two slots, local parameters, two slots, accumulator: seven.
    assert stats.argument_size_in_bytes < 7.1 * BYTES
    assert stats.alias_size_in_bytes > 7 * BYTES
    more = stats.temp_size_in_bytes - plain.temp_size_in_bytes
    assert more < temporary * BYTES


SPLIT = {"w": [P(None, "model"), P("model", None)], "b": [P("model"), P()]}


def split_params(strategy):
  return {
    name: {
      key: jax.device_put(
        x, jax.sharding.NamedSharding(strategy.mesh, SPLIT[key][i % 2])
      )
      for key, x in layer.items()
    }
    for i, (name, layer) in enumerate(PARAMS.items())
  }


@pytest.mark.parametrize(
  "commit", ["mean", pytest.param("sequential", marks=pytest.mark.slow)]
)
def test_logical_devices_exchange_their_shards(commit):
  strategy = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  run, state, x = create(
    strategy, [fs.AGN(3, commit=commit)], params=split_params(strategy)
  )
  agn = state.wrapper_states["agn"]
  assert agn.local_params["layer1"]["w"].sharding.spec == P("replica", "model")
  found = plans.collectives(run.lower(state, x).compile(), strategy.mesh)
  total = sum(c.result_bytes for c in found if "replica" in c.axes)
  per_device = sum(
    p.addressable_shards[0].data.nbytes for p in jax.tree.leaves(state.params)
  )
  assert total == per_device * (1 if commit == "mean" else 5)
  if commit == "mean":
    return
  # The values are those of replicas with one device.
  whole = fs.Strategy(devices=jax.devices()[:4])
  run2, state2, x2 = create(whole, [fs.AGN(3, commit=commit)])
  for _ in range(4):
    state, _ = run(state, x)
    state2, _ = run2(state2, x2)
  agn, agn2 = state.wrapper_states["agn"], state2.wrapper_states["agn"]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    (state.params, agn.local_params, agn.grad_accum),
    (state2.params, agn2.local_params, agn2.grad_accum),
  )
  assert agn.local_params["layer1"]["w"].sharding.spec == P("replica", "model")
