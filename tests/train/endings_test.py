"""Runs that end before their last step: they diverge, or improve no more.

Hooks are called until the end, and signals ask for it.
"""

import json
import logging
import os
import re
import shutil
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quadratic_states
import tiny

import flaxshard as fs
from flaxshard import data
from flaxshard import train
from flaxshard.tasks import steps
from flaxshard.train import config as config_lib
from flaxshard.train import endings
from flaxshard.train import hooks as hooks_lib

_THIS = __name__

# -- Runs that diverge.

_FLOOR = ("loss_scale", {"scale": {"type": "dynamic", "initial_scale": 1.0}})


def breaking(learning_rate: float, num_train_steps: int, at: int, rate: float):
  """Returns a schedule that has another rate at one update."""
  del num_train_steps
  return lambda count: jnp.where(count == at, rate, learning_rate)


def infinite_example() -> data.Splits:
  """Returns 64 digits of which example 3 is infinite."""
  splits = data.digits()
  inputs = np.array(splits.train.inputs[:64])
  inputs[3] = np.inf
  return data.Splits(
    data.Arrays(inputs, splits.train.labels[:64]), splits.eval, 10
  )


def diverging_config(**fields):
  """Returns a config whose sixth update breaks the parameters."""
  values = dict(
    schedule={"name": f"{_THIS}:breaking", "at": 5, "rate": 1e30},
    optimizer={"name": "sgd"},
    wrappers=(_FLOOR,),
    num_train_steps=40,
    log_every_steps=4,
    checkpoint_every_steps=2,
    eval_every_steps=100,
    mesh={"replica": 2},
  )
  return tiny.config(**{**values, **fields})


# The loss of step 4 is finite: it was computed before the update.
BREAKING = dict(
  schedule={"name": f"{_THIS}:breaking", "at": 3, "rate": float("inf")},
  wrappers=(),
  precision="float32",
)
# An epoch has four batches of 16 examples. The devices of the replica with that
# example alone look for non-finite parameters, which are split over them.
INFINITE = dict(
  model={"name": "cnn", "features": (4,), "dense": 8},
  data={"name": f"{_THIS}:infinite_example"},
  schedule={"name": "constant"},
  mesh={
    "per_replica": True,
    "replica": 2,
    "axes": (("model", 2),),
    "rules": (("dense/kernel", (None, "model")), ("head/kernel", ("model",))),
  },
  wrappers=(),
  precision="float32",
  log_every_steps=1,
)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("fields", "facts", "kept"),
  [
    # Step 6 breaks the parameters; all steps from 7 on are skipped. Of these
    # none was saved.
    (
      dict(max_to_keep=2),
      "step 26: .* 20 steps.* scale is at its floor, 1.*min_scale",
      {"4", "6"},
    ),
    (BREAKING, "step 4: .*head/kernel", {"2"}),
    (INFINITE, r"step [1-4]: .* not finite; \d of 6 .*conv0/kernel", {"2"}),
  ],
)
def test_a_run_that_diverges_stops_and_keeps_its_good_checkpoints(
  tmp_path, fields, facts, kept
):
  with pytest.raises(FloatingPointError) as stopped:
    train.train_and_evaluate(diverging_config(**fields), str(tmp_path))
  message = str(stopped.value)
  assert re.match(facts, message), message
  assert "config.on_nonfinite='continue'" in message
  stopped_step = int(re.match(r"step (\d+)", message)[1])
  saved = set(os.listdir(tmp_path / "checkpoints"))
  assert saved == {step for step in kept if int(step) < stopped_step}


@pytest.mark.slow
def test_a_nonfinite_evaluation_stops_before_it_is_saved(tmp_path, caplog):
  config = diverging_config(
    eval_every_steps=4, checkpoint_every_steps=4, max_to_keep=1
  )
  with pytest.raises(FloatingPointError, match=r"step 8: (.|\n)*eval_loss="):
    train.train_and_evaluate(config, str(tmp_path))
  assert os.listdir(tmp_path / "checkpoints") == ["4"]
  # The row of that evaluation is written.
  assert tiny.rows(tmp_path)[-1]["eval_loss"] is None

  config.on_nonfinite = "continue"
  state = train.train_and_evaluate(config, str(tmp_path))
  assert int(state.step) == 6
  assert re.search(r"step 8: (.|\n)*eval_loss=", caplog.text)
  # The last state is saved, and does not replace the good one.
  assert sorted(os.listdir(tmp_path / "checkpoints")) == ["4", "40"]
  rows = tiny.rows(tmp_path)
  assert [r["skipped_steps"] for r in rows] == [0, *range(2, 35, 4)]
  # Where no step was applied, there is no loss to average.
  assert [r["train_loss"] for r in rows[2:]] == [None] * 8


def new_state(*wrappers):
  return quadratic_states.create(wrappers, params={"w": jnp.ones(2)})


def test_what_each_wrapper_has_pending_is_told_once(caplog):
  state = new_state(fs.Accumulate(2, per_replica=True), fs.AGN(4))
  for _ in range(3):
    state = state.apply_gradients(grads={"w": jnp.ones(2)})
  watch = endings.Watch(None)
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
def test_a_scale_at_its_floor_is_warned_of_once(scale, skipped, warns, caplog):
  state = new_state(fs.LossScale(fs.DynamicLossScale(initial_scale=2.0)))
  watch = endings.Watch(tiny.config())
  loss_scale = state.wrapper_states["loss_scale"]._replace(
    scale=jnp.float32(scale), skipped_steps=jnp.int32(skipped)
  )
  state = state.replace(wrapper_states={"loss_scale": loss_scale})
  progress = steps.Progress(step=5, metrics=None, bad_step=0)
  for step in (5, 7):
    watch.check_steps(step, state, progress)
  assert len(caplog.messages) == warns
  if warns:
    assert f"{skipped} steps skipped" in caplog.text
    assert "nonfinite_leaves" in caplog.text


# -- Early stopping, and hooks.


def record(step, state, metrics, *, into):
  """A hook that writes into the metrics, which are a copy."""
  metrics[into] = step


class Writer:
  """A hook that appends the step to a file of the workdir."""

  def __init__(self, workdir, name="steps.txt"):
    self.path = os.path.join(workdir, name)

  def __call__(self, step, state, metrics):
    with open(self.path, "a") as f:
      f.write(f"{step} ")


def make_config(**fields):
  """Returns a config that ends at step 6, the third evaluation of six.

  No loss improves by 100, so only the first evaluation improves.
  """
  rule = {"metric": "eval_loss", "patience": 1, "min_delta": 100.0}
  values = dict(
    num_train_steps=12,
    log_every_steps=3,
    eval_every_steps=2,
    checkpoint_every_steps=4,
    early_stopping=rule,
    hooks=({"name": f"{_THIS}:record", "into": "loss"}, f"{_THIS}:Writer"),
    mesh={"replica": 1},
  )
  return tiny.config(**{**values, **fields})


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
  """A run that a hook has interrupted, and that then ended early.

  Returns its workdir and final state, and the calls and the error of the hook.
  """
  workdir = tmp_path_factory.mktemp("stopped")
  calls = []

  def hook(step, state, metrics):
    calls.append((step, int(state.step), metrics))
    if step == 4:
      raise KeyError("a mistake of the user")

  with pytest.raises(hooks_lib.HookError) as e:
    train.train_and_evaluate(make_config(), str(workdir), hooks=[hook])
  # The checkpoint of that step is there.
  assert os.listdir(workdir / "checkpoints") == ["4"]
  state = train.train_and_evaluate(make_config(), str(workdir), hooks=[hook])
  return workdir, state, calls, str(e.value)


@pytest.mark.parametrize(
  ("rule", "values", "stopped_step", "best_step"),
  [
    ({"patience": 1}, [3.0, 2.0, 2.0, 1.0, 1.5, 2.0], 6, 4),
    ({"patience": 1}, [3.0, 2.0, 2.0, 1.0, 1.5], None, 4),
    ({"patience": 0, "min_delta": 0.5}, [3.0, 2.6], 2, 1),
    ({"patience": 0, "metric": "eval_accuracy"}, [1.0, 2.0, 2.0], 3, 2),
    ({"patience": 0, "mode": "max"}, [1.0, 2.0, 1.5], 3, 2),
    # None stands for a value that is not finite.
    ({"patience": 0}, [None, None, 3.0, None], 4, 3),
    ({"patience": 0}, [2.0, 3.0, 1.0], 2, 1),
  ],
)
def test_the_run_ends_after_patience_evaluations_without_improvement(
  rule, values, stopped_step, best_step
):
  rule = {"metric": "eval_loss", **rule}
  config = config_lib.check(tiny.config(early_stopping=rule))
  rows = [{"step": i, rule["metric"]: x} for i, x in enumerate(values, 1)]
  stopped = endings.stopped_early(config.early_stopping, rows)
  steps = stopped and tuple(map(int, re.findall(r"step (\d+)", stopped)))
  assert steps == (stopped_step and (stopped_step, best_step))


def test_a_run_that_ends_early_has_its_last_row_and_checkpoint(stopped):
  """It counts the evaluations from before the interruption."""
  workdir, state, _, _ = stopped
  assert int(state.step) == 6
  rows = tiny.rows(workdir)
  assert [row["step"] for row in rows] == [2, 3, 4, 6]
  assert {"train_loss", "eval_loss", "learning_rate"} < set(rows[-1])
  assert set(os.listdir(workdir / "checkpoints")) == {"4", "6"}


def test_hooks_get_copies_of_each_row_and_their_error_names_them(stopped):
  workdir, _, calls, error = stopped
  # A run that continues does not call them again for the restored step.
  assert [call[:2] for call in calls] == [(2, 2), (3, 3), (4, 4), (6, 6)]
  assert (workdir / "steps.txt").read_text() == "2 3 4 6 "
  for row, (_, _, metrics) in zip(tiny.rows(workdir), calls, strict=True):
    given = {k: v for k, v in row.items() if v is not None and k != "step"}
    assert metrics == given
    assert all(type(value) is float for value in metrics.values())
  for fact in ("stopped.<locals>.hook", "step 4", "a mistake of the user"):
    assert fact in error


@pytest.mark.slow
def test_a_run_that_ended_early_counts_as_finished(stopped, tmp_path, caplog):
  caplog.set_level(logging.INFO, "flaxshard")
  workdir, state, _, _ = stopped
  copy = str(tmp_path / "copy")
  shutil.copytree(workdir, copy)
  again = train.train_and_evaluate(make_config(), copy)
  jax.tree.map(np.testing.assert_array_equal, again.params, state.params)
  for fact in ("nothing to train", "step 6", "eval_loss"):
    assert fact in caplog.text

  rule = {"metric": "eval_loss", "patience": 2, "min_delta": 100.0}
  config = make_config(early_stopping=rule, resume="extend")
  assert int(train.train_and_evaluate(config, copy).step) == 8
  assert "stopped early at step 8" in caplog.text
  with open(os.path.join(copy, "config.json")) as f:
    assert json.load(f)["early_stopping"]["patience"] == 2


# -- Signals. processes_test.py has JAX's notice of endings.


@pytest.fixture
def clock(monkeypatch):
  """A clock that stands still; handlers of signals are restored in the end."""
  clock = types.SimpleNamespace(now=0.0)
  monkeypatch.setattr("time.monotonic", lambda: clock.now)
  before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
  yield clock
  for signum, handler in before.items():
    signal.signal(signum, handler)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_reported_and_handlers_are_restored(signum, clock):
  received = []
  handler = lambda *args: received.append(args)
  signal.signal(signum, handler)
  with endings.StopRequest() as request:
    assert request.signum is None
  assert signal.getsignal(signum) is handler
  with endings.StopRequest() as request:
    for _ in range(2):
      os.kill(os.getpid(), signum)
      assert request.signum == signum
  # The key is still held down.
  os.kill(os.getpid(), signum)
  assert not received
  clock.now = 2
  os.kill(os.getpid(), signum)
  assert len(received) == 1
  assert signal.getsignal(signum) is handler


@pytest.mark.parametrize(
  ("signum", "error"),
  [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)],
)
def test_only_a_third_signal_interrupts_and_never_a_save(
  signum, error, caplog, clock
):
  with endings.StopRequest() as request:
    for _ in range(3):
      # In quick succession: one request.
      os.kill(os.getpid(), signum)
    clock.now = 2
    os.kill(os.getpid(), signum)
    assert request.signum == signum
    name = signal.Signals(signum).name
    first, second = caplog.messages
    assert first.startswith(f"{name}: stopping")
    assert second.startswith(f"{name} again:")
    with request.saving():
      for clock.now in (4, 6, 8):
        os.kill(os.getpid(), signum)
    assert len(caplog.messages) == 5
    clock.now = 10
    with pytest.raises(error):
      os.kill(os.getpid(), signum)
