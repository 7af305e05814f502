"""Checkpoints of every writer, optimizer and module are restored as saved."""

import logging
import pickle
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
import pytest

import flaxshard as fs


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """Returns a function of a writer's name: the directory and the state."""
  return states.writer_in(tmp_path_factory.mktemp("written"))


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
  states.assert_same(states.plain_fields(restored), states.plain_fields(state))
  for x, y in zip(
    jax.tree.leaves(restored), jax.tree.leaves(fresh), strict=True
  ):
    assert isinstance(x, jax.Array)
    if y.committed:
      assert x.sharding == y.sharding
  # A wrapper's state is as saved, or fresh. The log names what differs.
  has = set(getattr(state, "wrapper_states", {}))
  wants = {"none": set(), "both": {"agn", "loss_scale"}}.get(stack, {stack})
  for name in wants & has:
    states.assert_same(
      *(
        jax.tree.map(states.as_numpy, s.wrapper_states[name])
        for s in (restored, state)
      )
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
    assert line.startswith(f"{path / str(states.STEP)}: ")
    assert ("starts fresh" if name in wants else "left alone") in line


# The plain reader, in a process without flaxshard.

_READER = """
import pickle, sys
from typing import Any
sys.modules["flaxshard"] = None  # as if it were not installed
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training import train_state
from orbax.checkpoint import v1 as ocp_v1

class FlaxState(train_state.TrainState):
  batch_stats: Any
  rngs: Any
  counters: Any

paths, wanted, templates, step = pickle.loads(open(sys.argv[1], "rb").read())
one = jax.sharding.SingleDeviceSharding(jax.devices()[0])

def template(x):
  if isinstance(x, str):  # a PRNG key: kind and shape
    impl, *shape = x.split()
    key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    return jax.ShapeDtypeStruct(tuple(map(int, shape)), key.dtype, sharding=one)
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one)

fields = jax.tree.map(template, templates)
opt_state = jax.tree.map(
  lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one),
  jax.eval_shape(optax.adam(0.125).init, fields["params"]),
)
target = FlaxState(
  apply_fn=None, tx=optax.adam(0.125), opt_state=opt_state, **fields
)

def as_numpy(x):
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return str(jax.random.key_impl(x)), np.asarray(jax.random.key_data(x))
  return np.asarray(x)

def check(name, restored):
  assert type(restored) is FlaxState, (name, type(restored))
  names = ("step", "params", "opt_state", "batch_stats", "rngs", "counters")
  fields = {n: getattr(restored, n) for n in names}
  assert len(jax.tree.leaves(fields)) == len(jax.tree.leaves(restored))
  mine = jax.tree.leaves(jax.tree.map(as_numpy, fields))
  for x, y in zip(mine, wanted[name], strict=True):
    if isinstance(x, str):
      assert x == y, (name, x, y)
    else:
      assert (x.dtype, x.shape) == (y.dtype, y.shape), (name, x, y)
      np.testing.assert_array_equal(x, y)

count = 0
for name, path in paths.items():
  item = "state" if name == "state_item" else "default"
  check(name, ocp_v1.load(f"{path}/{step}", target))
  with ocp.StandardCheckpointer() as checkpointer:
    check(name, checkpointer.restore(f"{path}/{step}/{item}", target))
  if item == "state":
    with ocp_v1.training.Checkpointer(path) as checkpointer:
      assert checkpointer.latest.step == step
      check(name, checkpointer.load(step, target))
  else:
    with ocp.CheckpointManager(path) as manager:
      assert manager.latest_step() == step
      check(name, manager.restore(step, args=ocp.args.StandardRestore(target)))
    with ocp.CheckpointManager(path) as manager:
      assert {"params", "opt_state"} < set(manager.restore(step))
  count += 1
assert not [m for m in sys.modules if m.startswith("flaxshard.")]
try:
  import flaxshard
except ImportError:
  print("read", count)
"""


@pytest.mark.slow
def test_plain_program_restores_without_flaxshard(written, tmp_path):
  names = ["v0", *states.STACKS, "state_item", "own_manager"]
  saved = {name: written(name)[1] for name in names}
  template = lambda x: (
    " ".join(map(str, (jax.random.key_impl(x), *x.shape)))
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    else np.zeros_like(x)
  )
  fresh = states.flax_state()
  fields = ("step", "params", "batch_stats", "rngs", "counters")
  given = tmp_path / "given"
  given.write_bytes(
    pickle.dumps(
      (
        {name: str(written(name)[0]) for name in names},
        {
          name: jax.tree.leaves(states.plain_fields(s))
          for name, s in saved.items()
        },
        {n: jax.tree.map(template, getattr(fresh, n)) for n in fields},
        states.STEP,
      )
    )
  )
  done = subprocess.run(
    [sys.executable, "-I", "-c", _READER, str(given)],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert done.stdout.split() == ["read", str(len(names))]


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
