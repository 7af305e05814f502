"""Checkpoints of every writer, optimizer and module are restored as saved."""

import functools
import logging
import pathlib
import subprocess
import sys
from typing import Any

import checkpoint_states as states
import flax
from flax import nnx
from flax import serialization
import flax.linen as nn
from flax.training import checkpoints as flax_checkpoints
from flax.training import train_state as flax_train_state
from flax.training.dynamic_scale import DynamicScale
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


def write_own_manager(path, state):
  with ocp.CheckpointManager(path) as manager:
    manager.save(plain_states.STEP, args=fs.checkpoint.save_args(state))


# The programs that write a checkpoint, and the stack of wrappers of their
# state; None is a state of Flax.
WRITERS = {
  **{name: (write, None) for name, write in plain_states.WRITERS.items()},
  **{stack: (states.write_ours, stack) for stack in states.STACKS},
  "state_item": (
    functools.partial(states.write_ours, plain_item="state"),
    "both",
  ),
  "own_manager": (write_own_manager, "both"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """Returns a function of a writer's name: the directory and the state."""
  root = tmp_path_factory.mktemp("written")

  @functools.cache
  def write_once(name):
    write, stack = WRITERS[name]
    state = plain_states.create() if stack is None else states.our_state(stack)
    state = plain_states.changed(state)
    (root / name).mkdir()
    write(root / name, state)
    return root / name, state

  return write_once


@pytest.mark.parametrize(
  ("writer", "stack"),
  [
    # Wrappers that are added, those that are kept, and those that are dropped.
    *((writer, "both") for writer in plain_states.WRITERS),
    ("state_item", "both"),
    ("own_manager", "agn"),
    ("both", "loss_scale"),
    ("both", "none"),
    ("agn", "loss_scale"),
    ("loss_scale", "agn"),
  ],
)
def test_flaxshard_restores_what_any_writer_wrote(
  written, writer, stack, caplog
):
  path, state = written(writer)
  fresh = states.our_state(stack)
  with caplog.at_level(logging.INFO, "flaxshard"):
    restored = fs.checkpoint.restore(path, fresh)
  assert jax.tree.structure(restored) == jax.tree.structure(fresh)
  plain_states.assert_same_fields(restored, state)
  for x, y in zip(*map(jax.tree.leaves, (restored, fresh)), strict=True):
    assert isinstance(x, jax.Array)
    assert not y.committed or x.sharding == y.sharding
  # A wrapper's state is as saved, or fresh. The log names what differs.
  own = restored.wrapper_states
  saved = getattr(state, "wrapper_states", {})
  for name in own.keys() & saved.keys():
    assert_trees_equal(own[name], saved[name])
  if "loss_scale" in own.keys() - saved.keys():
    assert float(own["loss_scale"].scale) == 2.0**15
  if "agn" in own.keys() - saved.keys():  # every replica begins at the center
    center = np.asarray(state.params["dense"]["kernel"])
    local = own["agn"].local_params["dense"]["kernel"]
    np.testing.assert_array_equal(local, np.stack([center, center]))
  lines = states.messages(caplog, logging.INFO)
  assert len(lines) == len(own.keys() ^ saved.keys())
  for name in own.keys() ^ saved.keys():
    fact = "starts fresh" if name in own else "left alone"
    assert any(f"wrapper '{name}'" in line and fact in line for line in lines)


# Plain readers.


@pytest.mark.parametrize(
  ("writer", "item"),
  [("both", "default"), ("own_manager", "default"), ("state_item", "state")],
)
def test_plain_programs_restore_with_strict_calls(written, writer, item):
  path, state = written(writer)
  for restored in plain_states.read(path, item):
    plain_states.assert_same_fields(restored, state)


_WITHOUT_FLAXSHARD = """
import pathlib, sys
sys.modules["flaxshard"] = None  # as if it were not installed
sys.path.append(sys.argv[1])
import plain_states
wanted = plain_states.changed(plain_states.create())
for restored in plain_states.read(pathlib.Path(sys.argv[2]), "default"):
  plain_states.assert_same_fields(restored, wanted)
assert not [m for m in sys.modules if m.startswith("flaxshard.")]
"""


@pytest.mark.slow
def test_plain_program_restores_without_flaxshard(written):
  path, _ = written("loss_scale")
  subprocess.run(
    [sys.executable, "-I", "-c", _WITHOUT_FLAXSHARD, _TESTS, str(path)],
    check=True,
    timeout=120,
  )


# Optimizers, and modules whose arrays are in boxes.


def test_restores_states_of_nested_optimizers(tmp_path):
  adam = optax.inject_hyperparams(optax.adam)(
    learning_rate=optax.linear_schedule(0.1, 0.0, 100)
  )
  tx = optax.multi_transform(
    {
      "train": optax.chain(optax.scale_by_factored_rms(), adam),
      "keep": optax.set_to_zero(),
    },
    lambda params: {x: "keep" if x == "half" else "train" for x in params},
  )
  fresh, ours = plain_states.create(tx), states.our_state("loss_scale", tx)
  plain_states.write_v0(tmp_path / "plain", plain_states.changed(fresh))
  restored = fs.checkpoint.restore(tmp_path / "plain", ours)
  plain_states.assert_same_fields(restored, plain_states.changed(fresh))
  # Orbax's usual strict call.
  states.write_ours(tmp_path / "ours", plain_states.changed(ours))
  template = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh)
  with ocp.CheckpointManager(tmp_path / "ours") as manager:
    args = ocp.args.StandardRestore(template)
    restored = manager.restore(plain_states.STEP, args=args)
  plain_states.assert_same_fields(restored, plain_states.changed(ours))


class Net(nnx.Module):
  def __init__(self, rngs):
    self.linear = nnx.Linear(4, 3, rngs=rngs)
    self.norm = nnx.BatchNorm(3, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)


class NNXState(flax_train_state.TrainState):
  batch_stats: Any
  rngs: Any


def test_restores_the_variables_of_nnx(tmp_path):
  _, params, stats, rngs = nnx.split(
    Net(nnx.Rngs(1)), nnx.Param, nnx.BatchStat, ...
  )
  variables = dict(params=params, batch_stats=stats, rngs=rngs)
  plain = NNXState.create(apply_fn=None, tx=plain_states.TX, **variables)
  plain = plain_states.changed(plain.replace(step=jnp.int32(0)))
  plain_states.write_v0(tmp_path, plain)
  ours = fs.create_train_state(Net(nnx.Rngs(0)), None, None, plain_states.TX)
  restored = fs.checkpoint.restore(tmp_path, ours)
  for field in ("step", *variables, "opt_state"):
    assert_trees_equal(
      jax.tree.leaves(getattr(restored, field)),
      jax.tree.leaves(getattr(plain, field)),
    )


def test_restores_boxed_linen_parameters(tmp_path):
  model = nn.Dense(
    3, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, None))
  )
  x = jnp.ones((1, 2))
  params = model.init(jax.random.key(0), x)["params"]
  plain = flax_train_state.TrainState.create(
    apply_fn=None, params=params, tx=plain_states.TX
  )
  plain_states.write_v0(tmp_path, plain)
  ours = fs.create_train_state(model, jax.random.key(1), x, plain_states.TX)
  restored = fs.checkpoint.restore(tmp_path, ours)
  assert_trees_equal(restored.params, nn.meta.unbox(params))


# Whole states with their wrappers, saved by calls of other programs.

AGN = fs.AGN(4)


def flax_orbax(path, state):
  flax_checkpoints.save_checkpoint(str(path), jax.device_get(state), 5)


def flax_msgpack(path, state):
  with flax.config.temp_flip_flag("use_orbax_checkpointing", False):
    flax_checkpoints.save_checkpoint(str(path), jax.device_get(state), 5)
  assert (path / "checkpoint_5").is_file()


def clu_checkpoint(path, state):
  # What clu.checkpoint writes; the package itself needs TensorFlow.
  (path / "ckpt-5.flax").write_bytes(serialization.to_bytes(state))
  (path / "ckpt-5.index").write_bytes(b"of TensorFlow")


def to_bytes(path, state):
  """Returns the path that is restored."""
  (path / "state.msgpack").write_bytes(serialization.to_bytes(state))
  return path / "state.msgpack"


@pytest.mark.parametrize(
  "write",
  [plain_states.write_v0, flax_orbax, flax_msgpack, clu_checkpoint, to_bytes],
)
def test_whole_state_is_restored_with_and_without_its_wrappers(
  write, tmp_path, caplog
):
  state = states.weights(wrappers=(states.SCALED, AGN))
  state = plain_states.changed(state)
  where = write(tmp_path, state) or tmp_path
  caplog.set_level(logging.INFO, "flaxshard")
  for wrappers in ((states.SCALED, AGN), (fs.CrossShard("mean"), AGN)):
    restored = fs.checkpoint.restore(where, states.weights(wrappers=wrappers))
    for field in ("step", "params", "opt_state"):
      assert_trees_equal(getattr(restored, field), getattr(state, field))
    own = restored.wrapper_states
    for name in own.keys() & state.wrapper_states.keys():
      assert_trees_equal(own[name], state.wrapper_states[name])
  (left,) = [m for m in states.messages(caplog, logging.INFO) if "left" in m]
  assert "a state of wrapper 'loss_scale': left alone" in left


class FlaxState(flax_train_state.TrainState):
  """As in Flax's ImageNet and WMT examples."""

  dynamic_scale: Any = None


@pytest.mark.parametrize(
  ("write", "scale"),
  [
    (
      plain_states.write_v0,
      DynamicScale(fin_steps=jnp.int32(2), scale=jnp.float32(2.0**15)),
    ),
    # Its counter and scale are Python numbers until it is used.
    (flax_msgpack, DynamicScale(scale=1024.0)),
    (plain_states.write_v0, DynamicScale(scale=1024.0)),
  ],
)
def test_dynamic_scale_becomes_loss_scale(write, scale, tmp_path, caplog):
  params = {"w": jnp.arange(3.0)}
  plain = FlaxState.create(apply_fn=None, params=params, tx=plain_states.TX)
  # The step is a Python number too until it is traced.
  plain = plain.replace(step=3, dynamic_scale=scale)
  write(tmp_path, plain)
  caplog.set_level(logging.INFO, "flaxshard")
  restored = fs.checkpoint.restore(tmp_path, states.weights())
  wanted = plain.replace(step=jnp.int32(3))
  for field in ("step", "params", "opt_state"):
    assert_trees_equal(getattr(restored, field), getattr(wanted, field))
  own = restored.wrapper_states["loss_scale"]
  count = int(scale.fin_steps)
  values = (jnp.float32(scale.scale), *map(jnp.int32, (count, 0, 0)))
  assert_trees_equal(own, type(own)(*values))
  # Training continues from there.
  step = jax.jit(lambda s: s.minimize(lambda p: (p["w"] ** 2).sum())[0])
  new = step(restored)
  assert int(new.wrapper_states["loss_scale"].good_steps) == count + 1
  # Without the wrapper, the field is left alone; a state may have it as well.
  fs.checkpoint.restore(tmp_path, states.weights(wrappers=[]))
  zero = DynamicScale(scale=jnp.float32(0), fin_steps=jnp.int32(0))
  both = states.weights(wrappers=[], dynamic_scale=zero)
  restored = fs.checkpoint.restore(tmp_path, both)
  assert_trees_equal(
    (restored.dynamic_scale.scale, restored.dynamic_scale.fin_steps), values[:2]
  )
  taken, left = states.messages(caplog, logging.INFO)
  assert "'dynamic_scale' becomes the state of wrapper 'loss_scale'" in taken
  assert "'dynamic_scale': left alone" in left
  # Without float16 the field of those examples is None.
  write(tmp_path / "none", plain.replace(dynamic_scale=None))
  restored = fs.checkpoint.restore(tmp_path / "none", states.weights())
  assert float(restored.wrapper_states["loss_scale"].scale) == 2.0**15
  *_, fresh = states.messages(caplog, logging.INFO)
  assert "no state of wrapper 'loss_scale': that starts fresh" in fresh


# Numbers.


def test_number_without_a_field_is_passed_over_and_named(tmp_path, caplog):
  saved = {**serialization.to_state_dict(states.weights()), "epoch": 3}
  saved["meta"] = {"rate": 0.5}
  with ocp.CheckpointManager(tmp_path / "orbax") as manager:
    manager.save(5, args=ocp.args.StandardSave(saved))
  (tmp_path / "msgpack").write_bytes(serialization.msgpack_serialize(saved))
  for name in ("orbax", "msgpack"):
    caplog.clear()
    with caplog.at_level(logging.INFO, "flaxshard"):
      fs.checkpoint.restore(tmp_path / name, states.weights())
    assert "'epoch'" in caplog.text and "'meta/rate'" in caplog.text
  # An array may be a part of the model.
  saved["epoch"] = np.int32(3)
  (tmp_path / "msgpack").write_bytes(serialization.msgpack_serialize(saved))
  with pytest.raises(ValueError, match=r"epoch: .*where nothing is expected"):
    fs.checkpoint.restore(tmp_path / "msgpack", states.weights())


@pytest.mark.parametrize("write", [plain_states.write_v0, to_bytes])
def test_step_of_64_bits_is_restored_if_it_fits(write, tmp_path):
  def restored_step(name, step):
    (tmp_path / name).mkdir()
    state = states.weights()
    with jax.enable_x64(True):
      state = state.replace(step=jnp.int64(step))
      path = write(tmp_path / name, state) or tmp_path / name
    restored = fs.checkpoint.restore(path, states.weights())
    # The step of the state to restore into may be a number, too.
    again = fs.checkpoint.restore(path, states.weights().replace(step=0))
    assert_trees_equal(again, restored)
    return restored.step

  assert_trees_equal(restored_step("fits", 7), jnp.int32(7))
  with pytest.raises(ValueError, match=rf"step: {2**31} is .* int32"):
    restored_step("large", 2**31)


# Nothing is cast or filled.

unsafe_key = functools.partial(jax.random.key, 0, impl="unsafe_rbg")


@pytest.mark.parametrize(
  ("collection", "name", "leaf", "facts"),
  [
    ("params", "half", lambda: jnp.ones(3), ["float16", "float32"]),
    ("params", "more", lambda: jnp.ones(3), ["missing", "float32[3]"]),
    ("rngs", "raw", lambda: jax.random.key(0), ["uint32", "key<fry>"]),
    ("rngs", "dropout", unsafe_key, ["key<rbg>", "key<urbg>"]),
  ],
)
def test_leaf_that_differs_raises(written, collection, name, leaf, facts):
  path, _ = written("both")
  state = states.our_state("none")
  tree = {**getattr(state, collection), name: leaf()}
  with pytest.raises(ValueError) as e:
    fs.checkpoint.restore(path, state.replace(**{collection: tree}))
  step_dir = path / str(plain_states.STEP)
  for fact in (str(step_dir), f"{collection}/{name}: ", *facts):
    assert fact in str(e.value)


# Directories of Flax's files.


def write_flax(path, step):
  state = states.weights().replace(step=jnp.int32(step)).without_wrappers()
  path.write_bytes(serialization.to_bytes(state))


def test_checkpointer_continues_from_flax_files(tmp_path, caplog):
  for step in (2, 10, 11):
    write_flax(tmp_path / f"checkpoint_{step}", step)
  cut = tmp_path / "checkpoint_11"
  cut.write_bytes(cut.read_bytes()[:40])
  with fs.Checkpointer(tmp_path, max_to_keep=1) as checkpointer:
    assert checkpointer.all_steps() == [2, 10, 11]
    state = checkpointer.restore(states.weights())
    assert int(state.step) == checkpointer.restored_step == 10
    assert f"step 11 is damaged, passed over: {cut}" in caplog.text
    assert int(checkpointer.restore(states.weights(), 2).step) == 2
    restored = fs.checkpoint.restore(tmp_path / "checkpoint_2", state)
    assert int(restored.step) == 2
    with pytest.raises(ValueError, match=r"step=3 .* which has step 10"):
      checkpointer.save(3, state)
    assert not checkpointer.save(10, state)  # is there
    for step in (12, 13):
      checkpointer.save(step, state.replace(step=jnp.int32(step)))
    # Of two with the same number, that of a manager.
    write_flax(tmp_path / "checkpoint_13", 99)
    assert int(checkpointer.restore(states.weights()).step) == 13
    assert checkpointer.all_steps() == [2, 10, 13]
  # No file of Flax is renamed or deleted.
  names = sorted(path.name for path in tmp_path.iterdir())
  theirs = [f"checkpoint_{step}" for step in (10, 11, 13, 2)]
  assert names == ["13", *theirs]
