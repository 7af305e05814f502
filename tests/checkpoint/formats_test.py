"""Checkpoints of every writer, optimizer and module are restored as saved."""

import logging
import pathlib
import subprocess
import sys
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
import plain_states
import pytest
from tree_equality import assert_trees_equal

import flaxshard as fs

_TESTS = str(pathlib.Path(__file__).parents[1])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """Returns a function of a writer's name: the directory and the state."""
  return states.writer_in(tmp_path_factory.mktemp("written"))


def assert_same_fields(given, wanted):
  """Compares what a plain program has, with the kinds of PRNG keys."""
  assert_trees_equal(*map(plain_states.fields_of, (given, wanted)))


# Every writer with both wrappers; then each wrapper alone kept, added, dropped.
PAIRS = [
  *((writer, "both") for writer in states.WRITERS),
  ("v0", "none"),
  ("both", "none"),
  ("both", "loss_scale"),
  ("agn", "agn"),
  ("agn", "loss_scale"),
  ("loss_scale", "agn"),
]
_SLOW = {
  ("v0", "both"),
  ("v0_flat", "both"),
  ("own_manager", "both"),
  ("agn", "both"),
}


@pytest.mark.parametrize(
  ("writer", "stack"),
  [
    pytest.param(*pair, marks=pytest.mark.slow) if pair in _SLOW else pair
    for pair in PAIRS
  ],
)
def test_flaxshard_restores_what_any_writer_wrote(
  written, writer, stack, caplog
):
  path, state = written(writer)
  fresh = states.our_state(stack)
  with caplog.at_level(logging.INFO, "flaxshard"):
    restored = fs.checkpoint.restore(path, fresh)
  assert type(restored) is type(fresh)
  assert jax.tree.structure(restored) == jax.tree.structure(fresh)
  assert_same_fields(restored, state)
  for x, y in zip(*map(jax.tree.leaves, (restored, fresh)), strict=True):
    assert isinstance(x, jax.Array)
    if y.committed:
      assert x.sharding == y.sharding
  # A wrapper's state is as saved, or fresh. The log names what differs.
  has, wants = (set(getattr(s, "wrapper_states", {})) for s in (state, fresh))
  for name in wants & has:
    assert_trees_equal(
      restored.wrapper_states[name], state.wrapper_states[name]
    )
  if "loss_scale" in wants - has:
    assert float(restored.wrapper_states["loss_scale"].scale) == 2.0**15
  if "agn" in wants - has:  # every replica begins at the center
    local = restored.wrapper_states["agn"].local_params["dense"]["kernel"]
    center = np.asarray(state.params["dense"]["kernel"])
    np.testing.assert_array_equal(local, np.stack([center, center]))
  messages = states.messages(caplog, logging.INFO)
  assert len(messages) == len(wants ^ has)
  for name in wants ^ has:
    (line,) = [m for m in messages if f"'{name}'" in m]
    assert line.startswith(f"{path / str(plain_states.STEP)}: ")
    assert ("starts fresh" if name in wants else "left alone") in line


# The plain reader, in a process without flaxshard.

_READER = """
import sys
sys.modules["flaxshard"] = None  # as if it were not installed
tests, root, *names = sys.argv[1:]
sys.path.append(tests)
import jax
jax.config.update("jax_num_cpu_devices", 2)
import orbax.checkpoint as ocp
from orbax.checkpoint import v1 as ocp_v1
import plain_states
from plain_states import STEP
from tree_equality import assert_trees_equal

one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
target = jax.tree.map(
  lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one),
  plain_states.create())
wanted = plain_states.changed(plain_states.create())

def check(restored):
  assert type(restored) is plain_states.FlaxState
  fields = plain_states.fields_of(restored)
  assert len(jax.tree.leaves(fields)) == len(jax.tree.leaves(restored))
  assert_trees_equal(fields, plain_states.fields_of(wanted))

for name in names:
  path = f"{root}/{name}"
  item = "state" if name == "state_item" else "default"
  check(ocp_v1.load(f"{path}/{STEP}", target))
  with ocp.StandardCheckpointer() as checkpointer:
    check(checkpointer.restore(f"{path}/{STEP}/{item}", target))
  if item == "state":
    with ocp_v1.training.Checkpointer(path) as checkpointer:
      assert checkpointer.latest.step == STEP
      check(checkpointer.load(STEP, target))
    continue
  with ocp.CheckpointManager(path) as manager:
    assert manager.latest_step() == STEP
    check(manager.restore(STEP, args=ocp.args.StandardRestore(target)))
  with ocp.CheckpointManager(path) as manager:
    assert {"params", "opt_state"} < set(manager.restore(STEP))
assert not [m for m in sys.modules if m.startswith("flaxshard.")]
print("read", *names)
"""


@pytest.mark.slow
def test_plain_program_restores_without_flaxshard(written, tmp_path):
  names = ["v0", *states.STACKS, "state_item", "own_manager"]
  root = written("v0")[0].parent
  for name in names:
    written(name)
  done = subprocess.run(
    [sys.executable, "-I", "-c", _READER, _TESTS, str(root), *names],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert done.stdout.split() == ["read", *names]


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
    return manager.restore(
      plain_states.STEP, args=ocp.args.StandardRestore(template)
    )


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_restores_the_state_of_optimizer(name, tmp_path):
  tx = OPTIMIZERS[name]
  plain, ours = (
    plain_states.changed(plain_states.create(tx)),
    plain_states.changed(states.our_state("loss_scale", tx)),
  )
  plain_states.write_v0(tmp_path / "plain", plain)
  states.write_ours(tmp_path / "ours", ours)
  restored = fs.checkpoint.restore(
    tmp_path / "plain", states.our_state("loss_scale", tx)
  )
  assert_same_fields(restored, plain)
  restored = plain_read(tmp_path / "ours", plain_states.create(tx))
  assert_same_fields(restored, ours)


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
    apply_fn=None,
    params=params,
    tx=plain_states.TX,
    batch_stats=stats,
    rngs=rngs,
  )
  return state.replace(step=jnp.int32(0))


@pytest.mark.parametrize("pure", [True, False], ids=["dicts", "variables"])
def test_restores_nnx_states(pure, tmp_path):
  ours = fs.create_train_state(
    Net(nnx.Rngs(0)), None, None, plain_states.TX, wrappers=[states.SCALED]
  )
  plain = plain_states.changed(nnx_state(pure))
  plain_states.write_v0(tmp_path / "plain", plain)
  restored = fs.checkpoint.restore(tmp_path / "plain", ours)
  names = ("step", "params", "opt_state", "batch_stats", "rngs")
  for field in names:
    given, wanted = getattr(restored, field), getattr(plain, field)
    if not pure:
      given, wanted = jax.tree.leaves(given), jax.tree.leaves(wanted)
    assert_trees_equal(given, wanted)


def test_restores_boxed_linen_parameters(tmp_path):
  model = nn.Dense(
    3, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, None))
  )
  x = jnp.ones((1, 2))
  params = model.init(jax.random.key(0), x)["params"]
  plain = flax_train_state.TrainState.create(
    apply_fn=None, params=params, tx=plain_states.TX
  ).replace(step=jnp.int32(5))
  plain_states.write_v0(tmp_path, plain)
  ours = fs.create_train_state(model, jax.random.key(1), x, plain_states.TX)
  restored = fs.checkpoint.restore(tmp_path, ours)
  assert int(restored.step) == 5
  assert_trees_equal(restored.params, nn.meta.unbox(params))


def test_restores_numpy_leaves_and_python_numbers(tmp_path):
  # A state that was fetched to the host, whose step has never been traced.
  plain = plain_states.changed(plain_states.create())
  host = jax.tree.map(
    lambda x: (
      x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)
    ),
    plain,
  ).replace(step=7)
  plain_states.write_v0(tmp_path, host)
  restored = fs.checkpoint.restore(tmp_path, states.our_state("both"))
  assert_same_fields(restored, plain.replace(step=jnp.int32(7)))


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
  for fact in (
    str(path / str(plain_states.STEP)),
    f"{collection}/{name}: ",
    *facts,
  ):
    assert fact in str(e.value)
