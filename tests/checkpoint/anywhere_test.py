"""Restoring on other meshes than the one that was saved on."""

import checkpoint_states as states
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tree_equality import assert_trees_equal

import flaxshard as fs

P = jax.sharding.PartitionSpec
TX = optax.adam(0.125)
SCALED = fs.LossScale("dynamic")

# A layer split over the model axis, one over the replicas (FSDP), one over
# both, and the kinds of leaves that are easily spoiled.
SPECS = {
  "tensor": P(None, "model"),
  "fsdp": P("replica"),
  "both": P("replica", "model"),
  "brain": P("model"),
  "half": P("replica"),
}


def arrays():
  rng = np.random.default_rng(0)
  return dict(
    params={
      "tensor": rng.normal(size=(4, 8)).astype(np.float32),
      "fsdp": rng.normal(size=(8, 4)).astype(np.float32),
      "both": rng.normal(size=(8, 8)).astype(np.float32),
      "brain": np.asarray(jnp.asarray(rng.normal(size=8), jnp.bfloat16)),
      "half": np.asarray([2.0**-24, 0.25] * 4, np.float16),
      "empty": {},
    },
    rngs={
      "dropout": jax.random.key(5, impl="rbg"),
      "each": jax.random.split(jax.random.key(6), 8),
      "unsafe": jax.random.key(7, impl="unsafe_rbg"),
    },
    counters={
      "seen": np.int32(2**31 - 1),
      "small": np.asarray([-128, 127], np.int8),
      "mask": np.array([True, False]),
      "tiny": np.asarray([0.5, -448.0], jnp.float8_e4m3fn),
      "complex": np.complex64(1 + 2j),
      "none": {},
    },
  )


def mesh_of(shape):
  """Returns a strategy with a mesh of that shape, or None."""
  if shape is None:
    return None
  count = int(np.prod(shape))
  return fs.Strategy(
    devices=jax.devices()[:count],
    mesh_shape=dict(zip(("replica", "model"), shape, strict=True)),
  )


def create(shape, zeros=False):
  fields = arrays()
  if zeros:
    fields = jax.tree.map(
      lambda x: (
        jax.random.clone(x)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        else np.zeros_like(x)
      ),
      fields,
    )
  strategy = mesh_of(shape)
  if strategy is not None:
    put = lambda x, *spec: jax.device_put(
      x, jax.sharding.NamedSharding(strategy.mesh, P(*spec))
    )
    fields["params"] = {
      name: put(x, *SPECS[name]) if name in SPECS else x
      for name, x in fields["params"].items()
    }
    fields["rngs"]["each"] = put(fields["rngs"]["each"], "replica")
  else:
    fields = jax.tree.map(jnp.asarray, fields)
  return fs.TrainState.create(
    apply_fn=None, tx=TX, wrappers=[SCALED], strategy=strategy, **fields
  )


@jax.jit
def step(state):
  loss = lambda p: sum(
    jnp.sum(jnp.asarray(x, jnp.float32) ** 2) for x in jax.tree.leaves(p)
  )
  return state.minimize(loss)[0]


def assert_lies_like(given, wanted):
  for x, y in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
    assert x.dtype == y.dtype and x.committed == y.committed
    assert x.sharding == y.sharding
    assert [s.data.shape for s in x.addressable_shards] == [
      s.data.shape for s in y.addressable_shards
    ]


SHAPES = [pytest.param((2, 4), marks=pytest.mark.slow), None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Returns the path of a saved state on 4x2 devices, and the state."""
  state = create((4, 2))
  taken = step(state)
  # The compiled step may choose other shardings.
  state = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), taken, state)
  path = tmp_path_factory.mktemp("anywhere") / "checkpoints"
  states.write_ours(path, state)
  return path, state


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_restores_on_another_mesh_and_back(saved, shape, tmp_path):
  path, state = saved
  fresh = create(shape, zeros=True)
  restored = fs.checkpoint.restore(path, fresh)
  assert_trees_equal(
    restored, state.replace(wrapper_states=restored.wrapper_states)
  )
  assert_trees_equal(restored.wrapper_states, state.wrapper_states)
  if shape is not None:
    assert_lies_like(restored, fresh)
    replicas, model = shape
    parts = {
      name: restored.opt_state[0].mu[name].addressable_shards[0].data.shape
      for name in ("tensor", "fsdp", "both")
    }
    assert parts == {
      "tensor": (4, 8 // model),
      "fsdp": (8 // replicas, 4),
      "both": (8 // replicas, 8 // model),
    }
  # Back on the first mesh.
  states.write_ours(tmp_path / "back", restored)
  again = fs.checkpoint.restore(tmp_path / "back", create((4, 2), zeros=True))
  assert_trees_equal(again, state)
  assert_lies_like(again, state)
