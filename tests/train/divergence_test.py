"""A run that diverges stops, and keeps its good checkpoints."""

import os

import jax.numpy as jnp
import optax
import pytest
import tiny

import flaxshard as fs
from flaxshard import train
from flaxshard.train import divergence
from flaxshard.train import steps

_FLOOR = ("loss_scale", {"scale": {"type": "dynamic", "initial_scale": 1.0}})


def diverging(learning_rate: float, num_train_steps: int):
  """Returns a schedule whose sixth update breaks the parameters."""
  del num_train_steps
  return lambda count: jnp.where(count == 5, 1e30, learning_rate)


def diverging_config(**fields):
  values = dict(
    schedule={"name": f"{__name__}:diverging"},
    optimizer={"name": "sgd"},
    wrappers=(_FLOOR,),
    num_train_steps=40,
    log_every_steps=4,
    checkpoint_every_steps=4,
    eval_every_steps=100,
  )
  return tiny.config(**{**values, **fields})


@pytest.mark.slow
def test_a_run_whose_steps_are_all_skipped_stops_and_keeps_checkpoints(
  tmp_path,
):
  config = diverging_config(checkpoint_every_steps=2, max_to_keep=2)
  with pytest.raises(FloatingPointError) as stopped:
    train.train_and_evaluate(config, str(tmp_path))
  message = str(stopped.value)
  # Step 6 breaks the parameters; all steps from 7 on are skipped.
  for fact in ("step 26:", "20 steps", "scale is at its floor, 1", "min_scale"):
    assert fact in message, message
  assert "config.on_nonfinite='continue'" in message
  # Of the skipped steps, none was saved: the good ones are still there.
  kept = sorted(os.listdir(tmp_path / "checkpoints"))
  assert kept == ["4", "6"]


def breaking(learning_rate: float, num_train_steps: int):
  """Returns a schedule whose fourth update makes the parameters infinite."""
  del num_train_steps
  return lambda count: jnp.where(count == 3, jnp.inf, learning_rate)


@pytest.mark.slow
def test_parameters_that_are_not_finite_are_not_saved(tmp_path):
  config = diverging_config(
    schedule={"name": f"{__name__}:breaking"},
    wrappers=(),
    precision="float32",
    checkpoint_every_steps=2,
  )
  with pytest.raises(FloatingPointError) as stopped:
    train.train_and_evaluate(config, str(tmp_path))
  # The loss of step 4 is finite: it was computed before the update.
  for fact in ("step 4:", "head/kernel", "config.on_nonfinite='continue'"):
    assert fact in str(stopped.value), str(stopped.value)
  assert os.listdir(tmp_path / "checkpoints") == ["2"]


@pytest.mark.slow
def test_a_nonfinite_evaluation_stops_before_it_is_saved(tmp_path):
  config = diverging_config(eval_every_steps=4, max_to_keep=1)
  with pytest.raises(FloatingPointError) as stopped:
    train.train_and_evaluate(config, str(tmp_path))
  for fact in ("step 8:", "eval_loss=", "config.on_nonfinite='continue'"):
    assert fact in str(stopped.value), str(stopped.value)
  assert os.listdir(tmp_path / "checkpoints") == ["4"]
  # The row of that evaluation is written.
  assert tiny.rows(tmp_path)[-1]["eval_loss"] is None

  config.on_nonfinite = "continue"
  state = train.train_and_evaluate(config, str(tmp_path))
  assert int(state.step) == 6
  # The last state is saved, and does not replace the good one.
  assert sorted(os.listdir(tmp_path / "checkpoints")) == ["4", "40"]
  rows = tiny.rows(tmp_path)
  assert [r["skipped_steps"] for r in rows] == [0, *range(2, 35, 4)]
  # Where no step was applied, there is no loss to average.
  assert [r["train_loss"] for r in rows[2:]] == [None] * 8


def test_what_each_wrapper_has_pending_is_told_once(caplog):
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.ones(2)},
    tx=optax.sgd(0.1),
    wrappers=[fs.Accumulate(2, per_replica=True), fs.AGN(4)],
  )
  for _ in range(3):
    state = state.apply_gradients(grads={"w": jnp.ones(2)})
  watch = divergence.Watch(None, state)
  for step, ends in ((3, False), (4, False), (5, True)):
    watch.warn_of_pending(step, state, ends)
  evaluated, ended = caplog.messages
  for message, when in ((evaluated, "step 3 is"), (ended, "step 5 ends")):
    assert when in message
    assert "accumulate" in message and "agn" in message


@pytest.mark.parametrize(
  ("scale", "skipped", "warns"),
  [(1.0, 6, True), (2.0, 6, False), (1.0, 0, False)],
)
def test_a_scale_at_its_floor_is_a_warning(scale, skipped, warns, caplog):
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.ones(2)},
    tx=optax.sgd(0.1),
    wrappers=[fs.LossScale(fs.DynamicLossScale(initial_scale=2.0))],
  )
  watch = divergence.Watch(tiny.config(), state)
  loss_scale = state.wrapper_states["loss_scale"]
  loss_scale = loss_scale._replace(
    scale=jnp.float32(scale), skipped_steps=jnp.int32(skipped)
  )
  state = state.replace(wrapper_states={"loss_scale": loss_scale})
  progress = steps.Progress(step=5, metrics=None, bad_step=0)
  # At the second row no further steps are skipped.
  for step in (5, 7):
    watch.check_steps(step, state, progress)
  assert len(caplog.messages) == warns
  if warns:
    assert f"{skipped} steps skipped" in caplog.text
    assert "nonfinite_leaves" in caplog.text
