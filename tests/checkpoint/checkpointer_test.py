"""Checkpointer: saves states, restores them, and refuses wrong ones."""

import hashlib
import logging
import pathlib

import flax.linen as nn
from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
from normed_states import assert_plain_equal
from normed_states import create
from normed_states import dynamic
from normed_states import Normed
from normed_states import restore
from normed_states import save
from normed_states import trained
from normed_states import TX
from normed_states import X
import numpy as np
import optax
import pytest
import tiny
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard import train
from flaxshard.core import checks


def hashes(path):
  return {
    str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
    for file in sorted(pathlib.Path(path).rglob("*"))
    if file.is_file()
  }


@pytest.fixture
def path(tmp_path):
  return tmp_path / "checkpoints"


# Saving and restoring.


def test_state_is_restored_bit_for_bit(path):
  wrappers = dynamic()
  state = trained(create(wrappers=wrappers))
  # A skipped step, so that no counter has its initial value.
  grads = jax.tree.map(lambda p: p * jnp.nan, state.params)
  state = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
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
  # The state given to `restore` is not changed.
  assert int(fresh.step) == 0
  assert_plain_equal(trained(restored, 1), trained(state, 1))


def test_all_dtypes_are_restored(path):
  params = {
    "half": jnp.array([1.0, 2.0**-24], jnp.float16),
    "brain": jnp.array([3.0, 1e30], jnp.bfloat16),
    "tiny": jnp.array([0.5, -448.0], jnp.float8_e4m3fn),
    "count": jnp.array([1, -(2**31)], jnp.int32),
    "flag": jnp.array([True, False]),
    "complex": jnp.array(1 + 2j, jnp.complex64),
  }
  create_from = lambda p: fs.TrainState.create(
    apply_fn=None, params=p, tx=optax.set_to_zero(), wrappers=dynamic()
  )
  save(path, create_from(params))
  zeros = jax.tree.map(jnp.zeros_like, params)
  restored = restore(path, create_from(zeros))
  assert_trees_equal(restored.params, params)


def test_state_can_be_donated_once_save_returns(path):
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


def test_leaving_the_context_with_an_error_waits_for_the_save(path):
  with pytest.raises(KeyError), checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(1, create())
    raise KeyError
  assert_plain_equal(restore(path, create(seed=1)), create())


def test_max_to_keep_deletes_older_steps(path):
  with checkpoint.Checkpointer(path, max_to_keep=2) as checkpointer:
    assert checkpointer.latest_step() is None
    assert list(checkpointer.all_steps()) == []
    for step in (1, 2, 10):
      checkpointer.save(step, trained(create(), step))
    checkpointer.wait()
    assert checkpointer.latest_step() == 10
    assert list(checkpointer.all_steps()) == [2, 10]
  assert sorted(p.name for p in path.iterdir()) == ["10", "2"]
  for step in (2, 10):
    assert_plain_equal(restore(path, create(), step), trained(create(), step))
  assert int(restore(path, create()).step) == 10


# Saving a step that exists.


def test_saving_a_step_again_returns_false_and_logs(path, caplog):
  state = create(wrappers=dynamic())
  with checkpoint.Checkpointer(path) as checkpointer:
    assert checkpointer.save(1, state) is True
    # While the first save still runs, and after it.
    with caplog.at_level(logging.INFO, "flaxshard"):
      assert checkpointer.save(1, state) is False
    assert f"step 1 has been saved in {path} already" in caplog.text
  before = hashes(path)
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(2, state)
    # An earlier step, too.
    assert checkpointer.save(1, state) is False
  assert hashes(path / "1") == {
    name.removeprefix("1/"): digest for name, digest in before.items()
  }


@pytest.mark.parametrize(
  ("other", "difference"),
  [
    (lambda: trained(create(wrappers=dynamic())), r"state.step is 3, 0 was"),
    (lambda: create(Normed(4), wrappers=dynamic()), r"params/Dense_0/bias: sh"),
    (lambda: create(), r"loss_scale/\w+: .*where nothing is expected"),
  ],
  ids=["step", "shape", "wrappers"],
)
def test_saving_a_step_again_from_another_state_raises(path, other, difference):
  save(path, create(wrappers=dynamic()), step=1)
  before = hashes(path)
  with checkpoint.Checkpointer(path) as checkpointer:
    with pytest.raises(ValueError, match=rf"{path}/1 .*{difference}"):
      checkpointer.save(1, other())
  assert hashes(path) == before


# Restoring into another state.


@pytest.mark.parametrize(
  ("other", "difference"),
  [
    (
      dict(model=Normed(features=4)),
      r"Dense_0/bias: shape \(3,\), where \(4,\) is expected",
    ),
    (dict(tx=optax.sgd(0.1)), r"opt_state/0/count: int32\[\], where nothing"),
    # One more transformation moves the others.
    (dict(tx=optax.chain(optax.identity(), TX)), r"opt_state/1/0/count: miss"),
  ],
)
def test_restoring_another_model_or_optimizer_raises(path, other, difference):
  save(path, trained(create(wrappers=dynamic())))
  before = hashes(path)
  with pytest.raises(ValueError, match=rf"^{path / '3'} .*({difference})"):
    restore(path, create(wrappers=dynamic(), **other))
  assert hashes(path) == before


def test_restoring_an_unknown_collection_raises(path):
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


def test_restoring_a_wrapper_state_of_another_shape_raises(path):
  state = create(wrappers=dynamic())
  scale = state.wrapper_states["loss_scale"]
  other = state.replace(
    wrapper_states={"loss_scale": scale._replace(scale=jnp.ones(2))}
  )
  save(path, other)
  with pytest.raises(
    ValueError, match=r"loss_scale/scale: shape \(2,\), where \(\)"
  ):
    restore(path, state)


def test_restoring_a_missing_step_raises(path):
  state = create()
  with checkpoint.Checkpointer(path) as checkpointer:
    with pytest.raises(ValueError, match=rf"{path}.*"):
      checkpointer.restore(state)
    for step in (3, 5):
      checkpointer.save(step, state)
    checkpointer.wait()
    with pytest.raises(ValueError, match=rf"step 4.*{path}|{path}.*step 4"):
      checkpointer.restore(state, 4)


# Invalid arguments.


def test_unwritable_directory_raises(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "file").write_text("content")
  for directory in (str(tmp_path / "file" / "below"), "hdfs://host/run"):
    with pytest.raises(ValueError, match=rf"directory.*'{directory}'"):
      checkpoint.Checkpointer(directory)
    with pytest.raises(ValueError, match=rf"workdir.*'{directory}'"):
      train.train_and_evaluate(tiny.config(), directory)
  assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
  "step",
  [2.0, True, -1, np.float32(2), np.array([2]), jnp.float32(2), 2**31, None],
)
def test_invalid_step_raises(path, step):
  with checkpoint.Checkpointer(path) as checkpointer:
    with pytest.raises((TypeError, ValueError), match="step must be") as e:
      checkpointer.save(step, create())
    got = {repr(step), str(step), checks.describe(step)}
    assert any(x in str(e.value) for x in got)
    if step is not None:
      with pytest.raises(ValueError, match="step must be"):
        checkpointer.restore(create(), step)
  assert not path.exists()


@pytest.mark.parametrize("step", [np.int64(2), np.array(2), jnp.int32(2)])
def test_integer_of_an_array_is_saved_under_its_number(path, step):
  with checkpoint.Checkpointer(path) as checkpointer:
    assert checkpointer.save(step, create())
  assert [p.name for p in path.iterdir()] == ["2"]


def test_state_of_another_type_raises(path):
  with checkpoint.Checkpointer(path) as checkpointer:
    with pytest.raises(TypeError, match=r"state must be .*None"):
      checkpointer.save(1, None)
    checkpointer.save(1, create())
    with pytest.raises(TypeError, match=r"state must be .*None"):
      checkpointer.restore(None)


def test_plain_flax_state_is_refused_with_the_remedy(path):
  plain = flax_train_state.TrainState.create(
    apply_fn=None, params={"w": jnp.ones(2)}, tx=TX
  )
  with checkpoint.Checkpointer(path) as checkpointer:
    for call in (
      lambda: checkpointer.save(1, plain),
      lambda: checkpointer.restore(plain),
      lambda: checkpoint.save_args(plain),
    ):
      with pytest.raises(TypeError, match=r"flax.training.*TrainState") as e:
        call()
      assert "flaxshard.TrainState.create" in str(e.value)
  assert not path.exists()


def test_saving_after_close_raises(path):
  checkpointer = checkpoint.Checkpointer(path)
  checkpointer.save(1, create())
  checkpointer.close()
  with pytest.raises(ValueError, match=rf"{path} is closed"):
    checkpointer.save(2, create())
  assert list(checkpointer.all_steps()) == [1]
  checkpointer.close()
  # Neither a lock nor a part of step 2.
  assert [p.name for p in path.iterdir()] == ["1"]
  unused = checkpoint.Checkpointer(path / "new")
  unused.close()
  with pytest.raises(ValueError, match="is closed"):
    unused.save(1, create())
  assert not (path / "new").exists()


def test_leaf_that_is_not_an_array_raises(path):
  state = create(wrappers=dynamic())
  for leaf in ("text", object()):
    params = {**state.params, "Dense_0": {"kernel": leaf}}
    with checkpoint.Checkpointer(path) as checkpointer:
      with pytest.raises(TypeError) as e:
        checkpointer.save(1, state.replace(params=params))
      assert "params/Dense_0/kernel" in str(e.value)
      assert repr(leaf) in str(e.value)
      # Nothing is left of it, and the next save works.
      assert checkpointer.latest_step() is None
  save(path, state, step=1)
  assert_plain_equal(restore(path, create(wrappers=dynamic(), seed=1)), state)


def test_leaf_without_elements_raises_before_orbax_hangs(path):
  state = create()
  params = {**state.params, "empty": jnp.zeros((0, 3))}
  with checkpoint.Checkpointer(path) as checkpointer:
    with pytest.raises(ValueError, match="params/empty"):
      checkpointer.save(1, state.replace(params=params))
