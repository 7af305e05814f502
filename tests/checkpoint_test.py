"""Checkpoints: what lies on disk, who reads it, and what comes back."""

import dataclasses
import functools
import hashlib
import json
import logging
import pathlib
import subprocess
import sys
from typing import Any, ClassVar

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
from flaxshard import checkpoint
from flaxshard import data

P = jax.sharding.PartitionSpec
X = np.array([[1.0, 2.0], [-0.5, 0.25]], np.float32)


class Normed(nn.Module):
  features: int = 3

  @nn.compact
  def __call__(self, x, train=True):
    x = nn.BatchNorm(use_running_average=not train)(x)
    return nn.Dense(self.features)(x)


class FlaxState(flax_train_state.TrainState):
  """As in Flax's ImageNet example."""

  batch_stats: Any


MODEL = Normed()
TX = optax.adam(0.125)


@functools.cache
def _initialized(model, tx, wrappers, seed):
  return fs.create_train_state(
    model, jax.random.key(seed), X, tx, wrappers=wrappers
  )


def create(model=MODEL, tx=TX, wrappers=(), seed=0):
  # A copy, for one test donates it.
  return jax.tree.map(jnp.copy, _initialized(model, tx, tuple(wrappers), seed))


def create_flax(seed=0):
  variables = MODEL.init(jax.random.key(seed), X)
  return FlaxState.create(
    apply_fn=MODEL.apply,
    params=variables["params"],
    tx=TX,
    batch_stats=variables["batch_stats"],
  ).replace(step=jnp.zeros((), jnp.int32))


def dynamic():
  return [fs.LossScale("dynamic")]


@functools.partial(jax.jit, static_argnums=1)
def trained(state, steps=3):
  """Takes steps by hand, so that no leaf is what it began with."""
  for _ in range(steps):
    grads = jax.tree.map(lambda p: p + 1.0, state.params)
    batch_stats = jax.tree.map(lambda s: s + 0.5, state.batch_stats)
    state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
  return state


def assert_trees_equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    np.testing.assert_array_equal(x, y)


def assert_plain_equal(a, b):
  """Compares step, parameters, optimizer state and batch statistics."""
  for field in ("step", "params", "opt_state", "batch_stats"):
    assert_trees_equal(getattr(a, field), getattr(b, field))


def save(path, state, step=3, **kwargs):
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(step, state, **kwargs)


def restore(path, state, step=None, **kwargs):
  # A new manager, as in a new process.
  with checkpoint.Checkpointer(path) as checkpointer:
    return checkpointer.restore(state, step, **kwargs)


def save_flax(path, state, step=3):
  """What a plain Flax program does."""
  with ocp.CheckpointManager(path) as manager:
    manager.save(step, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()


def abstract(state):
  return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)


def hashes(path):
  return {
    str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
    for file in sorted(pathlib.Path(path).rglob("*"))
    if file.is_file()
  }


def messages(caplog):
  return [
    r.getMessage() for r in caplog.records if r.name == "flaxshard.checkpoint"
  ]


@pytest.fixture
def path(tmp_path):
  return tmp_path / "checkpoints"


# There and back.


@pytest.mark.parametrize("wrappers", [[], dynamic()], ids=["none", "scaled"])
def test_round_trip(path, wrappers):
  state = trained(create(wrappers=wrappers))
  if wrappers:
    # A step that was skipped, so that no counter is what it began with.
    grads = jax.tree.map(lambda p: p * jnp.nan, state.params)
    state = state.apply_gradients(grads=grads)
    scale = state.wrapper_states["loss_scale"]
    assert (float(scale.scale), int(scale.skipped_steps)) == (2.0**14, 1)
  save(path, state)
  fresh = create(wrappers=wrappers, seed=1)
  restored = restore(path, fresh)
  assert int(restored.step) == 3
  assert type(restored) is type(fresh)
  assert restored.tx is fresh.tx
  assert restored.apply_fn == fresh.apply_fn
  assert restored.wrappers == tuple(wrappers)
  assert_plain_equal(restored, state)
  assert_trees_equal(restored.wrapper_states, state.wrapper_states)
  # The state that one restores into is a template, and stays as it is.
  assert int(fresh.step) == 0
  # And the restored state takes the same next step.
  assert_plain_equal(trained(restored, 1), trained(state, 1))


def test_dtypes_come_back(path):
  params = {
    "half": jnp.array([1.0, 2.0**-24], jnp.float16),
    "brain": jnp.array([3.0, 1e30], jnp.bfloat16),
    "tiny": jnp.array([0.5, -448.0], jnp.float8_e4m3fn),
    "count": jnp.array([1, -(2**31)], jnp.int32),
    "flag": jnp.array([True, False]),
    "complex": jnp.array(1 + 2j, jnp.complex64),
  }
  make = lambda p: fs.TrainState.create(
    apply_fn=None, params=p, tx=optax.set_to_zero(), wrappers=dynamic()
  )
  save(path, make(params))
  restored = restore(path, make(jax.tree.map(jnp.zeros_like, params)))
  assert_trees_equal(restored.params, params)


def test_a_state_may_be_donated_once_save_returns(path):
  state = create(wrappers=dynamic())
  wanted = jax.device_get((state.params, state.batch_stats))
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(1, state)
    overwrite = jax.jit(
      lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0
    )
    jax.block_until_ready(overwrite(state))
  restored = restore(path, create(wrappers=dynamic(), seed=1))
  assert_trees_equal((restored.params, restored.batch_stats), wanted)


def test_leaving_the_context_waits_for_the_save(path):
  with pytest.raises(KeyError), checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(1, create())
    raise KeyError
  assert_plain_equal(restore(path, create(seed=1)), create())


def test_several_steps(path):
  states = {step: trained(create(), step) for step in (1, 2, 10)}
  with checkpoint.Checkpointer(path) as checkpointer:
    assert checkpointer.latest_step() is None
    assert list(checkpointer.all_steps()) == []
    for step, state in states.items():
      checkpointer.save(step, state)
    checkpointer.wait()
    assert checkpointer.latest_step() == 10
    assert list(checkpointer.all_steps()) == [1, 2, 10]
  for step, state in states.items():
    assert_plain_equal(restore(path, create(), step), state)
  assert int(restore(path, create()).step) == 10


def test_max_to_keep(path):
  with checkpoint.Checkpointer(path, max_to_keep=2) as checkpointer:
    for step in (1, 2, 3, 4):
      checkpointer.save(step, trained(create(), step))
    checkpointer.wait()
    assert list(checkpointer.all_steps()) == [3, 4]
  assert sorted(p.name for p in path.iterdir() if p.is_dir()) == ["3", "4"]
  assert int(restore(path, create(), 3).step) == 3


@pytest.mark.parametrize("bad", [0, -1])
def test_bad_max_to_keep(path, bad):
  with pytest.raises(ValueError, match=rf"max_to_keep must be .* got {bad}"):
    checkpoint.Checkpointer(path, max_to_keep=bad)
  assert not path.exists()


def test_saving_a_step_twice_leaves_it(path):
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(1, create())
    # Whether the first is on disk already or not.
    checkpointer.save(1, trained(create()))
    checkpointer.wait()
    checkpointer.save(1, trained(create()))
  before = hashes(path)
  save(path, trained(create()), step=1)
  assert hashes(path) == before
  assert_plain_equal(restore(path, create(seed=1)), create())


# What lies on disk.


def test_layout(path):
  state = create(wrappers=dynamic())
  splits = make_splits()
  iterator = data.train_iterator(splits, batch_size=4, seed=0)
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(1, state)
    checkpointer.save(2, create())
    # "auto" finds nothing to scale in float32: a wrapper without a state.
    checkpointer.save(3, create(wrappers=[fs.LossScale("auto")]))
    checkpointer.save(4, state, data=iterator)
  items = {
    step: sorted(p.name for p in (path / step).iterdir() if p.is_dir())
    for step in ("1", "2", "3", "4")
  }
  assert items == {
    "1": ["default", "wrappers"],
    "2": ["default"],
    "3": ["default"],
    "4": ["default", "input_iterator", "wrappers"],
  }


def metadata(path, item="default"):
  return json.loads((path / "3" / item / "_METADATA").read_text())


@pytest.mark.parametrize("wrappers", [[], dynamic()], ids=["none", "scaled"])
def test_the_plain_item_is_that_of_a_plain_program(tmp_path, wrappers):
  save(tmp_path / "ours", trained(create(wrappers=wrappers)))
  save_flax(tmp_path / "plain", trained(create_flax()))
  assert metadata(tmp_path / "ours") == metadata(tmp_path / "plain")


def test_wrapper_states_have_their_names(path):
  save(path, create(wrappers=dynamic()))
  with ocp.StandardCheckpointer() as checkpointer:
    restored = checkpointer.restore(path / "3" / "wrappers")
  assert sorted(restored) == ["loss_scale"]
  assert float(restored["loss_scale"]["scale"]) == 2.0**15


def test_a_plain_program_reads_ours(path):
  state = trained(create(wrappers=dynamic()))
  save(path, state)
  target = abstract(create_flax(seed=1))
  with ocp.CheckpointManager(path) as manager:
    restored = manager.restore(3, args=ocp.args.StandardRestore(target))
  assert type(restored) is FlaxState
  assert_plain_equal(restored, state)
  with ocp.StandardCheckpointer() as checkpointer:
    restored = checkpointer.restore(path / "3" / "default", target)
  assert_plain_equal(restored, state)
  # Its next step is ours.
  assert_plain_equal(trained(restored, 1), trained(state.without_wrappers(), 1))


def test_ours_reads_a_plain_one(path, caplog):
  plain = trained(create_flax())
  save_flax(path, plain)
  fresh = create(wrappers=dynamic(), seed=1)
  with caplog.at_level(logging.INFO, "flaxshard"):
    restored = restore(path, fresh)
  assert_plain_equal(restored, plain)
  assert_trees_equal(restored.wrapper_states, fresh.wrapper_states)
  (message,) = messages(caplog)
  assert "'loss_scale'" in message and "starts fresh" in message
  assert str(path / "3") in message
  assert_plain_equal(restore(path, create(seed=1)), plain)


def test_a_wrapper_may_be_dropped_between_runs(path, caplog):
  state = trained(create(wrappers=dynamic()))
  save(path, state)
  before = hashes(path)
  with caplog.at_level(logging.INFO, "flaxshard"):
    restored = restore(path, create(seed=1))
  assert_plain_equal(restored, state)
  assert dict(restored.wrapper_states) == {}
  (message,) = messages(caplog)
  assert "'loss_scale'" in message and "left alone" in message
  assert hashes(path) == before


@dataclasses.dataclass(frozen=True)
class Another(fs.LossScale):
  """A second wrapper, beside LossScale."""

  name: ClassVar[str] = "another"


def test_one_wrapper_of_two_is_kept(path, caplog):
  both = trained(create(wrappers=[*dynamic(), Another(4.0)]))
  save(path, both)
  with caplog.at_level(logging.INFO, "flaxshard"):
    restored = restore(path, create(wrappers=dynamic(), seed=1))
  assert sorted(restored.wrapper_states) == ["loss_scale"]
  assert_trees_equal(
    restored.wrapper_states["loss_scale"], both.wrapper_states["loss_scale"]
  )
  (message,) = messages(caplog)
  assert "'another'" in message and "left alone" in message


def test_a_wrapper_is_added_beside_another(path, caplog):
  state = trained(create(wrappers=dynamic()))
  save(path, state)
  fresh = create(wrappers=[*dynamic(), Another(4.0)], seed=1)
  with caplog.at_level(logging.INFO, "flaxshard"):
    restored = restore(path, fresh)
  assert_trees_equal(
    dict(restored.wrapper_states),
    {
      "loss_scale": state.wrapper_states["loss_scale"],
      "another": fresh.wrapper_states["another"],
    },
  )
  assert int(restored.wrapper_states["loss_scale"].good_steps) == 3
  (message,) = messages(caplog)
  assert "'another'" in message and "starts fresh" in message


# What does not fit.


class Wide(nn.Module):
  @nn.compact
  def __call__(self, x, train=True):
    x = nn.BatchNorm(use_running_average=not train)(x)
    return nn.Dense(3)(nn.Dense(3, name="extra")(x))


@pytest.mark.parametrize(
  ("other", "difference"),
  [
    (
      dict(model=Normed(features=4)),
      r"params/Dense_0/bias: shape \(3,\), where \(4,\) is expected",
    ),
    (
      dict(model=Wide()),
      r"params/Dense_0/kernel: shape \(2, 3\), where \(3, 3\)|"
      r"params/extra/bias: missing, where float32\[3\] is expected",
    ),
    (dict(tx=optax.sgd(0.1)), r"opt_state/0/count: int32\[\], where nothing"),
    (
      dict(tx=optax.sgd(0.1, momentum=0.9)),
      r"opt_state/0/trace/BatchNorm_0/bias: missing, where float32\[2\]",
    ),
    (
      dict(tx=optax.adam(0.1, mu_dtype=jnp.bfloat16)),
      r"opt_state/0/mu/BatchNorm_0/bias: dtype float32, where bfloat16",
    ),
    # One more transformation moves the others.
    (dict(tx=optax.chain(optax.identity(), TX)), r"opt_state/1/0/count: miss"),
    (dict(model=nn.Dense(3)), r"params/bias: missing, where float32\[3\]"),
  ],
)
def test_another_model_or_optimizer(path, other, difference):
  save(path, trained(create(wrappers=dynamic())))
  before = hashes(path)
  with pytest.raises(ValueError, match=rf"\b({difference})") as e:
    restore(path, create(wrappers=dynamic(), **other))
  message = str(e.value)
  assert message.startswith(
    f"{path / '3'} was written by another model or optimizer"
  )
  assert "'default'" in message
  assert hashes(path) == before


def test_a_collection_that_the_model_does_not_have(path):
  class Plain(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
      del train
      return nn.Dense(3, name="Dense_0")(x)

  plain = fs.create_train_state(Plain(), jax.random.key(0), X, optax.sgd(0.1))
  stats = create(tx=optax.sgd(0.1)).batch_stats
  more = fs.TrainState.create(
    apply_fn=None, params=plain.params, tx=optax.sgd(0.1), batch_stats=stats
  )
  save(path, more)
  with pytest.raises(
    ValueError, match=r"batch_stats/BatchNorm_0/mean: float32\[2\], where noth"
  ):
    restore(path, plain)


def test_a_wrapper_state_of_another_shape(path):
  state = create(wrappers=dynamic())
  scale = state.wrapper_states["loss_scale"]
  other = state.replace(
    wrapper_states={"loss_scale": scale._replace(scale=jnp.ones(2))}
  )
  save(path, other)
  with pytest.raises(
    ValueError, match=r"'wrappers', loss_scale/scale: shape \(2,\), where \(\)"
  ):
    restore(path, state)


def test_a_missing_step(path):
  state = create()
  with checkpoint.Checkpointer(path) as checkpointer:
    with pytest.raises(ValueError, match=r"no checkpoint .*there are \[\]"):
      checkpointer.restore(state)
    for step in (3, 5):
      checkpointer.save(step, state)
    checkpointer.wait()
    with pytest.raises(ValueError) as e:
      checkpointer.restore(state, 4)
  assert str(e.value) == (
    f"no checkpoint of step 4 in {path}; there are [3, 5]."
  )


def test_an_unwritable_directory(tmp_path):
  file = tmp_path / "file"
  file.write_text("content")
  for directory in (file, file / "below", file / "far" / "below"):
    with pytest.raises(ValueError) as e:
      checkpoint.Checkpointer(directory)
    message = str(e.value)
    assert message.startswith(f"directory='{directory}' cannot be written: ")
  assert file.read_text() == "content"


def test_check_writable_leaves_nothing_behind(path):
  checkpoint.check_writable("workdir", str(path))
  assert list(path.iterdir()) == []


def test_a_leaf_that_is_not_an_array(path):
  state = create(wrappers=dynamic())
  for leaf in ("text", "float32", object()):
    params = {**state.params, "Dense_0": {"kernel": leaf}}
    with checkpoint.Checkpointer(path) as checkpointer:
      with pytest.raises(TypeError) as e:
        checkpointer.save(1, state.replace(params=params))
      assert "params/Dense_0/kernel" in str(e.value)
      assert repr(leaf) in str(e.value)
      # Nothing is left of it, and the next save is as good as any.
      assert checkpointer.latest_step() is None
  save(path, state, step=1)
  assert_plain_equal(restore(path, create(wrappers=dynamic(), seed=1)), state)


_EMPTY_LEAF = """
import sys
import jax.numpy as jnp
import optax
import flaxshard as fs
from flaxshard import checkpoint

params = {"a": jnp.ones(2), "empty": jnp.zeros((0, 3))}
state = fs.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
with checkpoint.Checkpointer(sys.argv[1]) as checkpointer:
  checkpointer.save(1, state)
"""


def test_a_leaf_without_elements(path):
  # Orbax cannot save one. If it is left to find out, the process hangs for
  # minutes when it exits, so this is in a process of its own.
  done = subprocess.run(
    [sys.executable, "-c", _EMPTY_LEAF, str(path)],
    capture_output=True,
    text=True,
    timeout=30,
  )
  last_line = done.stderr.strip().splitlines()[-1]
  assert last_line.startswith("ValueError: ")
  assert "params/empty" in last_line
  assert done.returncode == 1


# Shardings.


def test_replicated_over_a_mesh(path):
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("replica",))
  assert mesh.size == 8
  everywhere = jax.sharding.NamedSharding(mesh, P())
  put = lambda state: jax.device_put(state, everywhere)
  state = trained(put(create(wrappers=dynamic())))
  save(path, state)
  restored = restore(path, put(create(wrappers=dynamic(), seed=1)))
  assert_plain_equal(restored, state)
  assert_trees_equal(restored.wrapper_states, state.wrapper_states)
  for leaf in jax.tree.leaves(restored):
    assert leaf.sharding == everywhere
    assert leaf.committed
  assert int(restored.opt_state[0].count) == 3
  # A batch that is committed to the same mesh goes with it.
  step = jax.jit(lambda s, x: trained(s, 1).replace(step=s.step + x.sum()))
  batch = jax.device_put(
    np.ones(8, np.int32), jax.sharding.NamedSharding(mesh, P("replica"))
  )
  assert int(step(restored, batch).step) == 11


def test_leaves_that_nothing_has_placed_go_to_the_mesh_of_the_others(path):
  # An optimizer's count, say, in a state whose parameters alone were sharded:
  # restored, it is committed, and must not be to the first device.
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("replica",))
  split = jax.sharding.NamedSharding(mesh, P("replica"))
  params = {"w": jax.device_put(jnp.arange(16.0), split)}
  make = lambda p: fs.TrainState.create(
    apply_fn=None, params=p, tx=TX, wrappers=dynamic()
  )
  state = make(params).apply_gradients(grads=params)
  save(path, state)
  fresh = make(jax.tree.map(jnp.zeros_like, params))
  restored = restore(path, fresh)
  assert restored.params["w"].sharding == split
  assert (
    restored.opt_state[0]
    .mu["w"]
    .sharding.is_equivalent_to(fresh.opt_state[0].mu["w"].sharding, 1)
  )
  for leaf in jax.tree.leaves(restored):
    assert len(leaf.devices()) == 8
  new_state = jax.jit(lambda s: s.apply_gradients(grads=s.params))(restored)
  wanted = state.apply_gradients(grads=state.params)
  np.testing.assert_allclose(new_state.params["w"], wanted.params["w"])
  assert int(new_state.opt_state[0].count) == 2
  assert int(new_state.wrapper_states["loss_scale"].good_steps) == 2


def test_another_sharding_than_it_was_saved_in(path):
  devices = np.array(jax.devices())
  x = jnp.arange(16.0)

  def make(size, spec, value):
    mesh = jax.sharding.Mesh(devices[:size], ("replica",))
    sharding = jax.sharding.NamedSharding(mesh, spec)
    state = fs.TrainState.create(
      apply_fn=None, params={"w": value}, tx=TX, wrappers=dynamic()
    )
    everywhere = jax.sharding.NamedSharding(mesh, P())
    return jax.tree.map(
      lambda a: jax.device_put(a, sharding if a.ndim else everywhere), state
    )

  save(path, make(8, P("replica"), x))
  for size, spec in ((2, P("replica")), (4, P()), (1, P())):
    target = make(size, spec, x * 0)
    restored = restore(path, target)
    np.testing.assert_array_equal(restored.params["w"], x)
    for a, b in zip(
      jax.tree.leaves(restored), jax.tree.leaves(target), strict=True
    ):
      assert a.sharding == b.sharding


def test_onto_one_device(path):
  state = trained(create(wrappers=dynamic()))
  save(path, state)
  restored = restore(path, create(wrappers=dynamic(), seed=1))
  assert_plain_equal(
    jax.jit(lambda s: trained(s, 1))(restored), trained(state, 1)
  )


# Random keys.


class Dropped(nnx.Module):
  def __init__(self, rngs):
    self.linear = nnx.Linear(2, 3, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.dropout(self.linear(x))


def test_random_streams(path):
  def make(seed):
    module = Dropped(nnx.Rngs(seed))
    return fs.create_train_state(module, None, None, TX, wrappers=dynamic())

  def draw(state):
    variables = {"params": state.params, "rngs": state.rngs}
    output, new = state.apply_fn(variables, X, mutable=["rngs"], mode="train")
    return output, state.replace(rngs=new["rngs"])

  _, state = draw(make(0))
  keys = [
    leaf
    for leaf in jax.tree.leaves(state.rngs)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  ]
  assert keys
  save(path, state)
  restored = restore(path, make(1))
  assert_trees_equal(restored.rngs, state.rngs)
  np.testing.assert_array_equal(draw(restored)[0], draw(state)[0])


def make_keyed(key):
  return fs.TrainState.create(
    apply_fn=None, params={"w": jnp.ones(2)}, tx=TX, keys={"dropout": key}
  )


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys(path, impl):
  state = make_keyed(jax.random.split(jax.random.key(3, impl=impl), 4))
  save(path, state)
  fresh = make_keyed(jax.random.split(jax.random.key(0, impl=impl), 4))
  restored = restore(path, fresh)
  assert restored.keys["dropout"].dtype == state.keys["dropout"].dtype
  assert_trees_equal(restored.keys, state.keys)


def test_a_key_of_another_kind(path):
  save(path, make_keyed(jax.random.key(3, impl="threefry2x32")))
  with pytest.raises(ValueError, match=r"keys/dropout: "):
    restore(path, make_keyed(jax.random.key(3, impl="rbg")))


# Where the data stands.


def make_splits():
  numbers = np.arange(12)
  source = data.Arrays(numbers * 2.0, numbers)
  return data.Splits(source, source, num_classes=12)


def take(iterator, count):
  return [next(iterator)["labels"].tolist() for _ in range(count)]


def make_iterator(seed=0):
  return data.train_iterator(make_splits(), batch_size=5, seed=seed)


def test_the_data_goes_on_where_it_stood(path):
  whole = take(make_iterator(), 9)
  iterator = make_iterator()
  iterator.start_prefetch()
  assert take(iterator, 4) == whole[:4]
  state = create(wrappers=dynamic())
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(4, state, data=iterator)
    # The save is asynchronous, its position that of the call.
    assert take(iterator, 2) == whole[4:6]
  fresh = make_iterator()
  restored = restore(path, create(wrappers=dynamic(), seed=1), data=fresh)
  assert take(fresh, 5) == whole[4:]
  assert_plain_equal(restored, state)
  # The state alone, too.
  assert_plain_equal(restore(path, create(seed=1)), state)


def test_a_checkpoint_without_a_position(path):
  save(path, create())
  before = hashes(path)
  iterator = make_iterator()
  with pytest.raises(ValueError, match=r"/3 has no input_iterator"):
    restore(path, create(), data=iterator)
  assert hashes(path) == before
  # It stands where it stood.
  assert take(iterator, 2) == take(make_iterator(), 2)
