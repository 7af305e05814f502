"""Checkpoints: what lies on disk, who reads it, and what comes back."""

import functools
import hashlib
import pathlib
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard import train

X = np.array([[1.0, 2.0], [-0.5, 0.25]], np.float32)


class Normed(nn.Module):
  features: int = 3

  @nn.compact
  def __call__(self, x, train=True):
    x = nn.BatchNorm(use_running_average=not train)(x)
    return nn.Dense(self.features)(x)


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


def hashes(path):
  return {
    str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
    for file in sorted(pathlib.Path(path).rglob("*"))
    if file.is_file()
  }


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
    with pytest.raises(ValueError, match="no checkpoint in .* no steps"):
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


@pytest.mark.parametrize("bucket", ["gs://bucket/run", "s3://bucket/run"])
def test_a_bucket_is_refused(bucket, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  message = f"'{bucket}' must be a directory of a file system; mount"
  with pytest.raises(ValueError, match=f"directory={message}"):
    checkpoint.Checkpointer(bucket)
  with pytest.raises(ValueError, match=f"workdir={message}"):
    train.train_and_evaluate(tiny.config(), bucket)
  assert not list(tmp_path.iterdir())


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
