"""Who writes a checkpoint, and who reads it: all pairs."""

import functools
import logging
import pickle
import subprocess
import sys
from typing import Any

from flax import nnx
import flax.linen as nn
from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from orbax.checkpoint import v1 as ocp_v1
import pytest

import flaxshard as fs

STEP = 1200
TX = optax.adam(0.125)


class FlaxState(flax_train_state.TrainState):
  """As in Flax's ImageNet example, with more of its own."""

  batch_stats: Any
  rngs: Any
  counters: Any


def variables():
  """What models have: every kind of leaf, and subtrees without any."""
  return dict(
    params={
      "dense": {"kernel": jnp.ones((4, 2)), "bias": jnp.zeros(2)},
      "half": jnp.ones(3, jnp.float16),
      "brain": jnp.ones((2, 2), jnp.bfloat16),
      "empty": {},
    },
    batch_stats={"norm": {"mean": jnp.zeros(2), "var": jnp.ones(2)}},
    rngs={
      "dropout": jax.random.key(0, impl="rbg"),
      "each": jax.random.split(jax.random.key(1), 3),
      "raw": jax.random.PRNGKey(2),
    },
    counters={"seen": jnp.int32(0), "mask": jnp.array([True, False])},
  )


def flax_state(tx=TX):
  state = FlaxState.create(apply_fn=None, tx=tx, **variables())
  return state.replace(step=jnp.int32(0))


AGN = fs.AGN(4, commit="mean")
SCALED = fs.LossScale("dynamic")
STACKS = {
  "none": (),
  "loss_scale": (SCALED,),
  "agn": (AGN,),
  "both": (SCALED, AGN),
}


@functools.cache
def our_state(stack, tx=TX):
  strategy = fs.Strategy(devices=jax.devices()[:2]) if "agn" in stack else None
  if stack == "both":
    strategy = fs.Strategy(devices=jax.devices()[:2])
  return fs.TrainState.create(
    apply_fn=None,
    tx=tx,
    wrappers=STACKS[stack],
    strategy=strategy,
    **variables(),
  )


def stirred(tree):
  """Returns a tree in which no leaf is what it began with."""

  def one(number, x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      fold = lambda key: jax.random.fold_in(key, number)
      for _ in x.shape:
        fold = jax.vmap(fold)
      new = fold(x)
    elif x.dtype == bool:
      new = ~x
    else:
      new = x + jnp.arange(number, x.size + number).reshape(x.shape)
      new = new.astype(x.dtype)
    return jax.device_put(new, x.sharding)

  leaves, treedef = jax.tree.flatten(tree)
  return treedef.unflatten([one(i + 1, x) for i, x in enumerate(leaves)])


def plain_of(state):
  """Returns the fields of a plain program by name, with NumPy leaves."""
  names = ("step", "params", "opt_state", "batch_stats", "rngs", "counters")
  return {n: jax.tree.map(as_numpy, getattr(state, n)) for n in names}


def as_numpy(x):
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return str(jax.random.key_impl(x)), np.asarray(jax.random.key_data(x))
  return np.asarray(x)


def assert_same(given, wanted):
  assert jax.tree.structure(given) == jax.tree.structure(wanted)
  for x, y in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
    if isinstance(x, str):
      assert x == y
      continue
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    np.testing.assert_array_equal(x, y)


# The writers: each leaves a directory of steps.


def write_v0(path, state):
  with ocp.CheckpointManager(path) as manager:
    manager.save(STEP, args=ocp.args.StandardSave(state))


def write_v0_flat(path, state):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path / str(STEP), state)


def write_v1_pytree(path, state):
  ocp_v1.save_pytree(path / str(STEP), state)


def write_v1_checkpointables(path, state):
  ocp_v1.save_checkpointables(
    path / str(STEP), {"pytree": state, "a": {"x": jnp.ones(2)}}
  )


def write_v1_training(path, state):
  with ocp_v1.training.Checkpointer(path) as checkpointer:
    checkpointer.save_pytree(STEP, state)


PLAIN_WRITERS = {
  "v0": write_v0,
  "v0_flat": write_v0_flat,
  "v1_pytree": write_v1_pytree,
  "v1_checkpointables": write_v1_checkpointables,
  "v1_training": write_v1_training,
}


def write_ours(path, state, **kwargs):
  with fs.Checkpointer(path, **kwargs) as checkpointer:
    checkpointer.save(STEP, state)


def write_own_manager(path, state):
  with ocp.CheckpointManager(path) as manager:
    manager.save(STEP, args=fs.checkpoint.save_args(state))


WRITERS = [
  *PLAIN_WRITERS,
  *STACKS,
  "state_item",
  "own_manager",
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """Returns a function of a writer's name: the directory and the state."""
  root = tmp_path_factory.mktemp("table")

  @functools.cache
  def write(writer):
    path = root / writer
    path.mkdir()
    if writer in PLAIN_WRITERS:
      state = stirred(flax_state())
      PLAIN_WRITERS[writer](path, state)
    elif writer == "state_item":
      state = stirred(our_state("both"))
      write_ours(path, state, plain_item="state")
    elif writer == "own_manager":
      state = stirred(our_state("both"))
      write_own_manager(path, state)
    else:
      state = stirred(our_state(writer))
      write_ours(path, state)
    return path, state

  return write


def told(caplog):
  return [
    r.getMessage()
    for r in caplog.records
    if r.name.startswith("flaxshard") and "no digests" not in r.getMessage()
  ]


@pytest.mark.parametrize("stack", list(STACKS))
@pytest.mark.parametrize("writer", WRITERS)
def test_flaxshard_reads(written, writer, stack, caplog):
  path, state = written(writer)
  fresh = our_state(stack)
  with caplog.at_level(logging.INFO, "flaxshard"):
    if writer in ("v0", "state_item", *STACKS):
      with fs.Checkpointer(path) as checkpointer:
        restored = checkpointer.restore(fresh)
    elif writer == "state_item":
      state = stirred(our_state("both"))
      write_ours(path, state, plain_item="state")
    elif writer == "own_manager":
      with ocp.CheckpointManager(path) as manager:
        restored = fs.checkpoint.restore(manager, fresh)
    else:
      restored = fs.checkpoint.restore(path, fresh)
  assert type(restored) is type(fresh)
  assert jax.tree.structure(restored) == jax.tree.structure(fresh)
  assert_same(plain_of(restored), plain_of(state))
  for x, y in zip(
    jax.tree.leaves(restored), jax.tree.leaves(fresh), strict=True
  ):
    assert isinstance(x, jax.Array)
    if y.committed:
      assert x.sharding == y.sharding
  # The wrappers: as saved, else fresh; that, and what is left alone, is told.
  has = set(getattr(state, "wrapper_states", {}))
  wants = {"none": set(), "both": {"agn", "loss_scale"}}.get(stack, {stack})
  for name in wants & has:
    assert_same(
      *(
        jax.tree.map(as_numpy, s.wrapper_states[name])
        for s in (restored, state)
      )
    )
  if "loss_scale" in wants - has:
    assert float(restored.wrapper_states["loss_scale"].scale) == 2.0**15
  if "agn" in wants - has:  # every replica begins at the center
    local = restored.wrapper_states["agn"].local_params["dense"]["kernel"]
    center = np.asarray(state.params["dense"]["kernel"])
    np.testing.assert_array_equal(local, np.stack([center, center]))
  messages = told(caplog)
  where = str(path / str(STEP))
  assert len(messages) == len(wants ^ has)
  for name in wants - has:
    (line,) = [m for m in messages if f"'{name}'" in m]
    assert line.startswith(f"{where} has no state of wrapper")
    assert "starts fresh" in line
  for name in has - wants:
    (line,) = [m for m in messages if f"'{name}'" in m]
    assert line == f"{where} has a state of wrapper '{name}': left alone"


# The plain reader, in a process that has no flaxshard.

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
  count += 1
assert not [m for m in sys.modules if m.startswith("flaxshard.")]
try:
  import flaxshard
except ImportError:
  print("read", count)
"""


def test_a_plain_program_reads_without_flaxshard(written, tmp_path):
  names = ["v0", *STACKS, "state_item", "own_manager"]
  states = {name: written(name)[1] for name in names}
  template = lambda x: (
    " ".join(map(str, (jax.random.key_impl(x), *x.shape)))
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    else np.zeros_like(x)
  )
  fresh = flax_state()
  fields = ("step", "params", "batch_stats", "rngs", "counters")
  given = tmp_path / "given"
  given.write_bytes(
    pickle.dumps(
      (
        {name: str(written(name)[0]) for name in names},
        {name: jax.tree.leaves(plain_of(s)) for name, s in states.items()},
        {n: jax.tree.map(template, getattr(fresh, n)) for n in fields},
        STEP,
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


# Other optimizers, NNX, and what a plain program may have for arrays.

SCHEDULE = optax.linear_schedule(0.1, 0.0, 100)
OPTIMIZERS = {
  "sgd": optax.sgd(0.1),
  "momentum": optax.sgd(SCHEDULE, momentum=0.9, nesterov=True),
  "chain": optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE, weight_decay=0.01)
  ),
  "lion": optax.lion(1e-3, mu_dtype=jnp.bfloat16),
  "factored": optax.adafactor(1e-2),
  "hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
  "masked": optax.multi_transform(
    {"train": optax.adam(0.1), "keep": optax.set_to_zero()},
    lambda params: {
      name: "keep" if name == "half" else "train" for name in params
    },
  ),
  "accumulated": optax.MultiSteps(optax.adam(0.1), 3),
}


def plain_read(path, target):
  """Reads with Orbax's usual strict call."""
  template = jax.tree.map(ocp.utils.to_shape_dtype_struct, target)
  with ocp.CheckpointManager(path) as manager:
    return manager.restore(STEP, args=ocp.args.StandardRestore(template))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizers(name, tmp_path):
  tx = OPTIMIZERS[name]
  plain, ours = stirred(flax_state(tx)), stirred(our_state("loss_scale", tx))
  write_v0(tmp_path / "plain", plain)
  write_ours(tmp_path / "ours", ours)
  restored = fs.checkpoint.restore(
    tmp_path / "plain", our_state("loss_scale", tx)
  )
  assert_same(plain_of(restored), plain_of(plain))
  restored = plain_read(tmp_path / "ours", flax_state(tx))
  assert_same(plain_of(restored), plain_of(ours))


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
    apply_fn=None, params=params, tx=TX, batch_stats=stats, rngs=rngs
  )
  return state.replace(step=jnp.int32(0))


@pytest.mark.parametrize("pure", [True, False], ids=["dicts", "variables"])
def test_nnx(pure, tmp_path):
  ours = fs.create_train_state(
    Net(nnx.Rngs(0)), None, None, TX, wrappers=[SCALED]
  )
  plain = stirred(nnx_state(pure))
  write_v0(tmp_path / "plain", plain)
  restored = fs.checkpoint.restore(tmp_path / "plain", ours)
  names = ("step", "params", "opt_state", "batch_stats", "rngs")
  for field in names:
    given, wanted = getattr(restored, field), getattr(plain, field)
    if not pure:
      given, wanted = jax.tree.leaves(given), jax.tree.leaves(wanted)
    assert_same(jax.tree.map(as_numpy, given), jax.tree.map(as_numpy, wanted))
  if pure:
    write_ours(tmp_path / "ours", stirred(ours))
    restored = plain_read(tmp_path / "ours", plain)
    for field in names:
      assert_same(
        jax.tree.map(as_numpy, getattr(restored, field)),
        jax.tree.map(as_numpy, getattr(stirred(ours), field)),
      )


def test_linen_with_boxes(tmp_path):
  model = nn.Dense(
    3, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, None))
  )
  x = jnp.ones((1, 2))
  params = model.init(jax.random.key(0), x)["params"]
  plain = flax_train_state.TrainState.create(
    apply_fn=None, params=params, tx=TX
  ).replace(step=jnp.int32(5))
  write_v0(tmp_path, plain)
  ours = fs.create_train_state(model, jax.random.key(1), x, TX)
  restored = fs.checkpoint.restore(tmp_path, ours)
  assert int(restored.step) == 5
  assert_same(
    jax.tree.map(as_numpy, restored.params),
    jax.tree.map(as_numpy, nn.meta.unbox(params)),
  )


def test_numpy_leaves_and_numbers(tmp_path):
  # A state that was fetched to the host, whose step has never been traced.
  plain = stirred(flax_state())
  host = jax.tree.map(
    lambda x: (
      x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)
    ),
    plain,
  ).replace(step=7)
  write_v0(tmp_path, host)
  restored = fs.checkpoint.restore(tmp_path, our_state("both"))
  assert_same(plain_of(restored), plain_of(plain.replace(step=jnp.int32(7))))


def test_a_number_that_does_not_fit(tmp_path):
  write_v0(tmp_path, flax_state().replace(step=2**40))
  with pytest.raises(
    ValueError, match="step: 1099511627776 is not exact in int32"
  ):
    fs.checkpoint.restore(tmp_path, our_state("none"))
  write_v0(tmp_path / "float", flax_state().replace(step=1.0))
  with pytest.raises(ValueError, match="step: dtype float64, where int32 is"):
    fs.checkpoint.restore(tmp_path / "float", our_state("none"))


# Nothing is cast or filled.


def swapped(collection, name, leaf):
  state = our_state("none")
  tree = {**getattr(state, collection), name: leaf}
  return state.replace(**{collection: tree})


@pytest.mark.parametrize(
  ("state", "difference"),
  [
    (
      lambda: swapped("params", "half", jnp.ones(3)),
      "params/half: dtype float16, where float32 is expected",
    ),
    (
      lambda: swapped("counters", "seen", jnp.float32(0)),
      "counters/seen: dtype int32, where float32 is expected",
    ),
    (
      lambda: swapped("params", "more", jnp.ones(3)),
      r"params/more: missing, where float32\[3\] is expected",
    ),
    (
      lambda: swapped("rngs", "raw", jax.random.key(0)),
      r"rngs/raw: dtype uint32, where key<fry> is expected",
    ),
    (
      lambda: swapped("rngs", "dropout", jax.random.key(0, impl="unsafe_rbg")),
      r"rngs/dropout: dtype key<rbg>, where key<urbg> is expected",
    ),
    (
      lambda: swapped("rngs", "dropout", jax.random.PRNGKey(0, impl="rbg")),
      r"rngs/dropout: dtype key<rbg>, where uint32 is expected",
    ),
    (
      lambda: swapped("rngs", "dropout", jax.random.key(0)),
      r"rngs/dropout: shape \(4,\), where \(2,\) is expected",
    ),
  ],
)
@pytest.mark.parametrize("writer", ["v0", "v1_pytree", "both"])
def test_what_differs_is_an_error(written, writer, state, difference):
  path, _ = written(writer)
  with pytest.raises(ValueError, match=difference) as e:
    fs.checkpoint.restore(path, state())
  assert str(path / str(STEP)) in str(e.value)


# Arguments.


def test_arguments_that_are_wrong(written, tmp_path):
  path, _ = written("v0")
  with pytest.raises(TypeError, match="state must be a flaxshard TrainState"):
    fs.checkpoint.restore(path, flax_state())
  with pytest.raises(TypeError, match="state must be a flaxshard TrainState"):
    fs.checkpoint.save_args(flax_state())
  with pytest.raises(TypeError, match="manager must be an Orbax Checkpoint"):
    fs.checkpoint.restore(3, our_state("none"))
  with pytest.raises(
    ValueError, match=r"no checkpoint of step 7 .* are .1200."
  ):
    fs.checkpoint.restore(path, our_state("none"), 7)
  with pytest.raises(ValueError, match=r"no checkpoint .* there are \[\]"):
    fs.checkpoint.restore(tmp_path / "nowhere", our_state("none"))
  for call in (
    lambda name: fs.checkpoint.save_args(our_state("none"), plain_item=name),
    lambda name: fs.Checkpointer(tmp_path, plain_item=name),
  ):
    with pytest.raises(ValueError, match="plain_item='zzz'; allowed: 'defa"):
      call("zzz")


def test_the_item_of_the_train_state(tmp_path):
  state = stirred(flax_state())
  with ocp.CheckpointManager(tmp_path) as manager:
    manager.save(
      3,
      args=ocp.args.Composite(
        train=ocp.args.StandardSave(state),
        other=ocp.args.StandardSave({"x": jnp.ones(1)}),
      ),
    )
  restored = fs.checkpoint.restore(
    tmp_path, our_state("none"), plain_item="train"
  )
  assert_same(plain_of(restored), plain_of(state))
  with pytest.raises(
    ValueError,
    match=r"3 has no train state in an item 'default' or 'state' or"
    r" 'pytree'; there are \['other', 'train'\]",
  ):
    fs.checkpoint.restore(tmp_path, our_state("none"))


def test_save_args_checks_before_orbax_would_hang():
  state = our_state("none")
  with pytest.raises(TypeError, match=r"params/half.* must be an array"):
    fs.checkpoint.save_args(state.replace(params={"half": "text"}))
  with pytest.raises(ValueError, match=r"params/half.* has no elements"):
    fs.checkpoint.save_args(state.replace(params={"half": jnp.ones((0, 2))}))


# Managers of one's own.


def test_a_manager_of_ones_own(tmp_path):
  state, target = stirred(our_state("both")), our_state("both")
  options = ocp.CheckpointManagerOptions(
    step_prefix="step", step_format_fixed_length=6
  )
  with ocp.CheckpointManager(tmp_path, options=options) as manager:
    for step in (1, 20):
      manager.save(
        step,
        args=ocp.args.Composite(
          **fs.checkpoint.save_args(state.replace(step=jnp.int32(step))),
          more=ocp.args.JsonSave({"a": 1}),
        ),
      )
      # The newest may still be on its way.
      restored = fs.checkpoint.restore(manager, target)
      assert int(restored.step) == step
    assert int(fs.checkpoint.restore(manager, target, 1).step) == 1
  assert (tmp_path / "step_000020" / "wrappers").is_dir()
  assert int(fs.checkpoint.restore(str(tmp_path), target).step) == 20


def test_a_manager_with_handlers_also_reads_by_orbax_itself(tmp_path):
  state = stirred(our_state("loss_scale"))
  write_own_manager(tmp_path, state)
  template = jax.tree.map(
    ocp.utils.to_shape_dtype_struct, state.without_wrappers()
  )
  handlers = fs.checkpoint.item_handlers()
  with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as manager:
    assert sorted(manager.item_metadata(STEP).keys()) == ["default", "wrappers"]
    read = manager.restore(
      STEP,
      args=ocp.args.Composite(
        default=ocp.args.StandardRestore(template),
        wrappers=ocp.args.PyTreeRestore(),
      ),
    )
    assert_same(plain_of(read["default"]), plain_of(state))
    scale = read["wrappers"]["loss_scale"]["scale"]
    assert scale == state.wrapper_states["loss_scale"].scale
    manager.save(STEP + 1, args=fs.checkpoint.save_args(state))
  assert (tmp_path / str(STEP + 1) / "wrappers").is_dir()


def test_a_training_checkpointer_of_v1(tmp_path):
  state = stirred(flax_state())
  with ocp_v1.training.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(STEP, state)
    restored = fs.checkpoint.restore(checkpointer, our_state("loss_scale"))
  assert_same(plain_of(restored), plain_of(state))
