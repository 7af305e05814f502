"""Mistakes of saving and restoring, and what their errors name."""

import types

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


def later_state():
  return create().replace(step=jnp.int32(5))


def flax_state():
  return flax_train_state.TrainState.create(
    apply_fn=None, params={"w": jnp.ones(3)}, tx=plain_states.TX
  )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """A folder with the workdir `digits`, which has the steps 3 and 12."""
  root = tmp_path_factory.mktemp("runs")
  (root / "digits" / "checkpoints").mkdir(parents=True)
  for step in (3, 12):
    states.write_ours(root / "digits", create(), step=step)
  (root / "empty").mkdir()
  (root / "file").write_text("9")  # a number in msgpack
  return root


def save(make_state, step=20, path="digits", metrics=None, **kwargs):
  def call(runs):
    with fs.Checkpointer(runs / path, **kwargs) as checkpointer:
      checkpointer.save(step, make_state(), metrics=metrics)

  return call


def restore(path="digits", step=None, make=create, **kwargs):
  return lambda runs: fs.checkpoint.restore(runs / path, make(**kwargs), step)


def save_position(data):
  return lambda runs: fs.Checkpointer(runs / "new").save(1, create(), data=data)


def save_after_closing(runs):
  with fs.Checkpointer(runs / "new") as checkpointer:
    pass
  checkpointer.save(1, create())


MISSPELT = dict(metrics={"acuracy": 0.5}, best_metric="accuracy")
DOTS = {"c": {"d": np.ones(2, "f")}, "c.d": np.ones(2, "f")}
BAD_POSITION = types.SimpleNamespace(get_state=lambda: np.int64(1))
OTHER = optax.chain(optax.identity(), plain_states.TX)

MISTAKES = [
  # States that cannot be saved.
  (save(lambda: None), TypeError, "state must be .* None"),
  (save(flax_state), TypeError, "flaxshard.TrainState.create"),
  (save(lambda: {1: create()}), TypeError, r"names of states .*\[1\]"),
  (save_position(iter([1])), TypeError, "data must have .* get_state"),
  (save_position(BAD_POSITION), TypeError, r"data.get_state\(\).*int64"),
  (save(lambda: with_leaf(3)), TypeError, "params/a/b.* 3"),
  (save(lambda: with_leaf(np.ones(2))), TypeError, "x64.* float64"),
  (save(lambda: with_leaf(jnp.ones((0, 3)))), ValueError, r"b\].*\(0, 3\)"),
  (save(lambda: with_leaf(DOTS)), ValueError, r"b/c\.d\] and .*b/c/d\]"),
  # Steps.
  (save(create, 2.0), TypeError, "step must be an integer, got 2.0"),
  (save(create, -1), ValueError, "step.* -1"),
  (save(create, 4), ValueError, "step=4 .* has step 12"),
  (save(later_state, 3), ValueError, "state.step is 5, 0"),
  (save(lambda: create(size=2), 3), ValueError, "params/w: shape"),
  (save(lambda: create(wrappers=[]), 3), ValueError, "loss_scale/"),
  (save_after_closing, ValueError, "/new is closed"),
  # Options.
  (save(create, metrics={"loss": "a"}), TypeError, "'loss'.* 'a'"),
  (save(create, **MISSPELT), ValueError, "'accuracy'.* 'acuracy'"),
  (save(create, max_to_keep=0), ValueError, "max_to_keep.* 0"),
  (save(create, best_mode="min"), ValueError, "best_mode need best_metric"),
  (save(create, keep_best=None), TypeError, "keep_best.* None"),
  (save(create, plain_item="zzz"), ValueError, "plain_item.* 'zzz'"),
  (save(create, config={"a": object()}), TypeError, "config: .*JSON"),
  (save(create, path="digits/checkpoints/3"), ValueError, "one checkpoint"),
  (save(create, path="file/below"), ValueError, "directory.*file/below"),
  # Restoring.
  (restore("digitz"), ValueError, "digitz: there is no such path"),
  (restore("empty"), ValueError, "empty: it has no steps"),
  (lambda _: fs.checkpoint.restore("", create()), ValueError, "is empty"),
  (restore("file"), ValueError, "file is no checkpoint of Flax"),
  (restore(step="latest"), TypeError, "step must be .* 'latest'"),
  (restore(step=4), ValueError, r"step 4 .*\[3, 12\]"),
  (restore("digits/checkpoints/3", 12), ValueError, "checkpoints/3"),
  (restore(size=2), ValueError, r"/12 .*params/w: .*\(3,\).* \(2,\)"),
  (restore(tx=optax.sgd(0.1)), ValueError, "0/count: .* nothing is expected"),
  (restore(make=dict, a=create()), ValueError, "has one state: .* states 'a'"),
  (restore(tx=OTHER), ValueError, "opt_state/1/0/count: missing"),
]


@pytest.mark.parametrize(("call", "error", "words"), MISTAKES)
def test_mistakes(call, error, words, runs):
  before = sorted(map(str, runs.rglob("*")))
  with pytest.raises(error, match=words):
    call(runs)
  assert sorted(map(str, runs.rglob("*"))) == before
