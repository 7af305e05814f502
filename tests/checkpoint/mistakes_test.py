"""Mistakes, and the facts that their errors name."""

import os

import checkpoint_states as states
from flax.training import train_state as flax_train_state
import jax.numpy as jnp
import numpy as np
import optax
import plain_states
import pytest

import flaxshard as fs

create = states.weights


def with_leaf(leaf):
  return create().replace(params={"a": {"b": leaf}})


def deleted():
  array = jnp.ones(3)
  array.delete()
  return array


def flax_state():
  return flax_train_state.TrainState.create(
    apply_fn=None, params={"w": jnp.ones(3)}, tx=plain_states.TX
  )


def closed(path):
  with fs.Checkpointer(path) as checkpointer:
    pass
  return checkpointer


@pytest.fixture
def runs(tmp_path):
  """A folder with the workdir `digits`, which has the steps 3 and 12."""
  state = create()
  for step in (3, 12):
    with fs.Checkpointer(tmp_path / "digits" / "checkpoints") as checkpointer:
      checkpointer.save(step, state)
  (tmp_path / "empty").mkdir()
  (tmp_path / "file").write_text("content")
  return tmp_path


def save(state, step=20, **kwargs):
  def call(runs):
    with fs.Checkpointer(runs / "digits") as checkpointer:
      checkpointer.save(step, state() if callable(state) else state, **kwargs)

  return call


def open_with(metrics=None, **kwargs):
  def call(runs):
    with fs.Checkpointer(runs / "digits", **kwargs) as checkpointer:
      checkpointer.save(20, create(), metrics=metrics)

  return call


def restore(path="digits", step=None, state=create):
  return lambda runs: fs.checkpoint.restore(runs / path, state(), step)


def restore_by_checkpointer(runs):
  fs.Checkpointer(runs / "digits").restore(create(), 4)


MISTAKES = [
  (save(None), TypeError, ["state", "None"]),
  (save(flax_state), TypeError, ["flaxshard.TrainState.create"]),
  (save(lambda: with_leaf("text")), TypeError, ["params/a/b", "'text'"]),
  (save(lambda: with_leaf(3)), TypeError, ["params/a/b", "3"]),
  (save(lambda: with_leaf(np.array([1, None]))), TypeError, ["object"]),
  (save(lambda: with_leaf(np.ones(2))), TypeError, ["float64", "x64"]),
  (save(lambda: with_leaf(deleted())), RuntimeError, ["deleted"]),
  (save(lambda: with_leaf(jnp.ones((0, 3)))), ValueError, ["(0, 3)"]),
  (save(create, 2.0), TypeError, ["float"]),
  (save(create, -1), ValueError, ["step", "-1"]),
  (save(create, 4), ValueError, ["step=4", "12"]),
  (
    save(lambda: create().replace(step=jnp.int32(5)), 3),
    ValueError,
    ["state.step is 5, 0"],
  ),
  (save(lambda: create(size=2), 3), ValueError, ["params/w"]),
  (save(lambda: create(wrappers=[]), 3), ValueError, ["loss_scale/"]),
  (save(create, metrics={"loss": "a"}), TypeError, ["['loss']", "'a'"]),
  (open_with(max_to_keep=0), ValueError, ["max_to_keep", "0"]),
  (open_with(max_to_keep=1, keep_every=2.0), ValueError, ["keep_every", "2.0"]),
  (open_with(best_mode="min"), ValueError, ["best_metric"]),
  (open_with(best_metric="a", best_mode="most"), ValueError, ["'most'"]),
  (
    open_with({"acuracy": 0.5}, best_metric="accuracy"),
    ValueError,
    ["'accuracy'", "'acuracy'"],
  ),
  (save(create, data=3), AttributeError, ["get_state"]),
  (
    lambda runs: fs.Checkpointer(runs / "digits/checkpoints/3"),
    ValueError,
    ["checkpoints/3", "one checkpoint"],
  ),
  (
    lambda runs: closed(runs / "new").save(1, create()),
    ValueError,
    ["new", "closed"],
  ),
  (
    lambda runs: fs.Checkpointer(runs / "file" / "below"),
    ValueError,
    ["directory", "file/below"],
  ),
  (lambda runs: fs.Checkpointer(None), TypeError, ["NoneType"]),
  (
    lambda runs: fs.Checkpointer(runs, plain_item="zzz"),
    ValueError,
    ["plain_item", "zzz"],
  ),
  (
    lambda runs: fs.Checkpointer(runs, config={"a": object()}),
    TypeError,
    ["object", "JSON"],
  ),
  (restore("digitz"), ValueError, ["digitz", "no such path"]),
  (restore("empty"), ValueError, ["empty", "no steps"]),
  (restore("file"), ValueError, ["file"]),
  (restore(step=4), ValueError, ["step 4", "[3, 12]"]),
  (restore_by_checkpointer, ValueError, ["step 4", "[3, 12]"]),
  (restore(step=-1), ValueError, ["step", "-1"]),
  (restore("digits/checkpoints/3", 12), ValueError, ["checkpoints/3"]),
  (
    restore(state=lambda: create(size=2)),
    ValueError,
    ["checkpoints/12", "params/w", "(3,)", "(2,)"],
  ),
  (
    restore(state=lambda: create(tx=optax.sgd(0.1))),
    ValueError,
    ["opt_state/0/count", "nothing is expected"],
  ),
  (
    restore(
      state=lambda: create(tx=optax.chain(optax.identity(), plain_states.TX))
    ),
    ValueError,
    ["opt_state/1/0/count", "missing"],
  ),
]


@pytest.mark.parametrize(("call", "error", "facts"), MISTAKES)
def test_mistakes(call, error, facts, runs):
  before = sorted(map(str, runs.rglob("*")))
  with pytest.raises(error) as e:
    call(runs)
  for fact in facts:
    assert fact in str(e.value)
  assert sorted(map(str, runs.rglob("*"))) == before


def test_reading_a_missing_directory_creates_nothing(tmp_path):
  with fs.Checkpointer(tmp_path / "typo") as checkpointer:
    assert checkpointer.latest_step() is None
    assert list(checkpointer.all_steps()) == []
    assert checkpointer.best_step() is None
    checkpointer.check()
    checkpointer.wait()
  assert os.listdir(tmp_path) == []


def test_integer_of_an_array_is_saved_under_its_number(tmp_path):
  with fs.Checkpointer(tmp_path) as checkpointer:
    for step in (np.int64(2), np.array(3), jnp.int32(4)):
      assert checkpointer.save(step, create())
  assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3", "4"]
