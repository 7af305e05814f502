"""Every leaf is restored as it was saved, or an error names it."""

from typing import Any

import checkpoint_states as states
from flax import nnx
import flax.linen as nn
from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import flaxshard as fs


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """Returns a function of a writer's name: the directory and the state."""
  return states.writer_in(tmp_path_factory.mktemp("written"))


# Optimizers, NNX, and leaves that are not JAX arrays.

SCHEDULE = optax.linear_schedule(0.1, 0.0, 100)
OPTIMIZERS = {
  "factored": optax.adafactor(1e-2),
  "hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
  "masked": optax.multi_transform(
    {"train": optax.adam(0.1), "keep": optax.set_to_zero()},
    lambda params: {
      name: "keep" if name == "half" else "train" for name in params
    },
  ),
}


def plain_read(path, target):
  """Reads with Orbax's usual strict call."""
  template = jax.tree.map(ocp.utils.to_shape_dtype_struct, target)
  with ocp.CheckpointManager(path) as manager:
    return manager.restore(states.STEP, args=ocp.args.StandardRestore(template))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_restores_the_state_of_optimizer(name, tmp_path):
  tx = OPTIMIZERS[name]
  plain, ours = (
    states.change_leaves(states.flax_state(tx)),
    states.change_leaves(states.our_state("loss_scale", tx)),
  )
  states.write_v0(tmp_path / "plain", plain)
  states.write_ours(tmp_path / "ours", ours)
  restored = fs.checkpoint.restore(
    tmp_path / "plain", states.our_state("loss_scale", tx)
  )
  states.assert_same(states.plain_fields(restored), states.plain_fields(plain))
  restored = plain_read(tmp_path / "ours", states.flax_state(tx))
  states.assert_same(states.plain_fields(restored), states.plain_fields(ours))


class Net(nnx.Module):
  def __init__(self, rngs):
    self.linear = nnx.Linear(4, 3, rngs=rngs)
    self.norm = nnx.BatchNorm(3, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)


class NNXState(flax_train_state.TrainState):
  batch_stats: Any
  rngs: Any


def nnx_state(pure=True):
  split = nnx.split(Net(nnx.Rngs(1)), nnx.Param, nnx.BatchStat, ...)[1:]
  params, stats, rngs = map(nnx.to_pure_dict, split) if pure else split
  state = NNXState.create(
    apply_fn=None, params=params, tx=states.TX, batch_stats=stats, rngs=rngs
  )
  return state.replace(step=jnp.int32(0))


@pytest.mark.parametrize("pure", [True, False], ids=["dicts", "variables"])
def test_restores_nnx_states(pure, tmp_path):
  ours = fs.create_train_state(
    Net(nnx.Rngs(0)), None, None, states.TX, wrappers=[states.SCALED]
  )
  plain = states.change_leaves(nnx_state(pure))
  states.write_v0(tmp_path / "plain", plain)
  restored = fs.checkpoint.restore(tmp_path / "plain", ours)
  names = ("step", "params", "opt_state", "batch_stats", "rngs")
  for field in names:
    given, wanted = getattr(restored, field), getattr(plain, field)
    if not pure:
      given, wanted = jax.tree.leaves(given), jax.tree.leaves(wanted)
    states.assert_same(
      jax.tree.map(states.as_numpy, given),
      jax.tree.map(states.as_numpy, wanted),
    )


def test_restores_boxed_linen_parameters(tmp_path):
  model = nn.Dense(
    3, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, None))
  )
  x = jnp.ones((1, 2))
  params = model.init(jax.random.key(0), x)["params"]
  plain = flax_train_state.TrainState.create(
    apply_fn=None, params=params, tx=states.TX
  ).replace(step=jnp.int32(5))
  states.write_v0(tmp_path, plain)
  ours = fs.create_train_state(model, jax.random.key(1), x, states.TX)
  restored = fs.checkpoint.restore(tmp_path, ours)
  assert int(restored.step) == 5
  states.assert_same(
    jax.tree.map(states.as_numpy, restored.params),
    jax.tree.map(states.as_numpy, nn.meta.unbox(params)),
  )


def test_restores_numpy_leaves_and_python_numbers(tmp_path):
  # A state that was fetched to the host, whose step has never been traced.
  plain = states.change_leaves(states.flax_state())
  host = jax.tree.map(
    lambda x: (
      x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)
    ),
    plain,
  ).replace(step=7)
  states.write_v0(tmp_path, host)
  restored = fs.checkpoint.restore(tmp_path, states.our_state("both"))
  states.assert_same(
    states.plain_fields(restored),
    states.plain_fields(plain.replace(step=jnp.int32(7))),
  )


# Nothing is cast or filled.


@pytest.mark.parametrize(
  ("collection", "name", "leaf", "facts"),
  [
    ("params", "half", lambda: jnp.ones(3), ["float16", "float32"]),
    ("params", "more", lambda: jnp.ones(3), ["missing", "float32[3]"]),
    ("rngs", "raw", lambda: jax.random.key(0), ["uint32", "key<fry>"]),
    (
      "rngs",
      "dropout",
      lambda: jax.random.key(0, impl="unsafe_rbg"),
      ["key<rbg>", "key<urbg>"],
    ),
    (
      "rngs",
      "dropout",
      lambda: jax.random.PRNGKey(0, impl="rbg"),
      ["key<rbg>", "uint32"],
    ),
  ],
)
def test_leaf_that_differs_raises(written, collection, name, leaf, facts):
  path, _ = written("both")
  state = states.our_state("none")
  tree = {**getattr(state, collection), name: leaf()}
  with pytest.raises(ValueError) as e:
    fs.checkpoint.restore(path, state.replace(**{collection: tree}))
  for fact in (str(path / str(states.STEP)), f"{collection}/{name}: ", *facts):
    assert fact in str(e.value)
