"""Watches a run: stops one that diverges, and logs what its wrappers tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import logging
import math
from typing import Any

import jax
import numpy as np

from flaxshard.core import gradients
from flaxshard.state.train_state import TrainState
from flaxshard.train import console
from flaxshard.train import metrics as metrics_lib
from flaxshard.train import steps
from flaxshard.wrappers import stack
from flaxshard.wrappers.loss_scale import DynamicLossScale
from flaxshard.wrappers.loss_scale import LossScale

_log = logging.getLogger(__name__)

# A run has diverged after so many skipped steps in a row, if the wrapper has
# nothing left to try, as a loss scale at its floor. A shorter stretch may be
# the fault of a few batches.
_MAX_STALLED_STEPS = 20

_all_finite = jax.jit(gradients.all_finite)


class DivergenceCheck:
  """Raises or warns when a run diverges.

  A run diverges at an applied step with a non-finite loss, at a non-finite
  evaluation, with non-finite parameters that are to be saved, or when a wrapper
  has skipped all of the last 20 steps, or all of a shorter run, and has nothing
  left to try.

  Args:
    on_nonfinite: `"stop"` raises FloatingPointError, `"continue"` warns.
    num_train_steps: Number of steps of the whole run.
    warn: Logs the first warning of each kind; see `console.count_warnings`.
  """

  def __init__(
    self, on_nonfinite: str, num_train_steps: int, warn: console.Warn
  ):
    self._on_nonfinite = on_nonfinite
    self._warn = warn
    self._max_stalled_steps = min(_MAX_STALLED_STEPS, num_train_steps)
    self._has_stalled = False

  @property
  def is_stalled(self) -> bool:
    """Whether the last step was skipped, and nothing is left to try.

    Such a state may have diverged. It differs from the one before the skipped
    steps in its counters only, so that little is lost if it is not saved.
    """
    return self._has_stalled

  def check_steps(
    self, step: int, state: TrainState, progress: steps.Progress
  ) -> None:
    """Checks the steps since the last row of metrics.

    Args:
      step: The step just taken.
      state: The state after it.
      progress: The combined progress of all replicas.

    Raises:
      FloatingPointError: The run has diverged, and `on_nonfinite` is "stop".
    """
    if progress.bad_step:
      self._report("loss", _describe_bad_step(state, progress))
    stalled = _stalled_steps(state)
    self._has_stalled = stalled > 0
    if stalled >= self._max_stalled_steps:
      scale = state.wrapper_states[LossScale.name]
      self._report(
        "stall",
        f"step {step}: the last {stalled} steps were skipped, so training "
        "makes no progress. "
        f"{_describe_floor(float(scale.scale), int(scale.skipped_steps))} A "
        "lower config.learning_rate may help.",
      )

  def check_evaluation(
    self, step: int, evaluation: Mapping[str, float]
  ) -> None:
    """Checks the metrics of an evaluation.

    Args:
      step: The step just taken.
      evaluation: The metrics by name; empty if there was no evaluation.

    Raises:
      FloatingPointError: One is not finite, and `on_nonfinite` is "stop".
    """
    bad = {k: v for k, v in evaluation.items() if not math.isfinite(v)}
    if bad:
      values = ", ".join(f"{name}={value}" for name, value in bad.items())
      self._report(
        "evaluation",
        f"step {step}: the evaluation is not finite: {values}. The parameters "
        "have diverged or overflow in config.precision, where a lower "
        "config.learning_rate may help, or an example of the evaluation is not "
        "finite.",
      )

  def check_params(self, step: int, state: TrainState) -> None:
    """Checks the parameters, before they are saved.

    A finite loss can have infinite gradients. The next step would have a loss
    that is not finite, and a run that resumes from there would stop at once.

    Args:
      step: The step just taken.
      state: The state after it.

    Raises:
      FloatingPointError: One is not finite, and `on_nonfinite` is "stop".
    """
    if bool(_all_finite(state.params)):
      return
    paths = gradients.nonfinite_leaves(state.params)
    self._report(
      "parameters",
      f"step {step}: {len(paths)} parameters are not finite after it: "
      f"{', '.join(paths)}. A lower config.learning_rate may help.",
    )

  def _report(self, kind: str, message: str) -> None:
    if self._on_nonfinite == "continue":
      self._warn(kind, message)
      return
    raise FloatingPointError(
      f"{message}\nThis state is not saved; earlier checkpoints are kept. "
      "config.on_nonfinite='continue' would go on."
    )


class WrapperNotes:
  """Logs notes of the wrappers, such as a loss scale at its floor.

  Args:
    state: The state that training starts from.
    warn: Logs the first warning of each kind; see `console.count_warnings`.
  """

  def __init__(self, state: TrainState, warn: console.Warn):
    self._wrappers = state.wrappers
    self._warn = warn
    self._previous: Mapping[str, Any] = metrics_lib.to_numbers(
      stack.metrics(state.wrappers, state.wrapper_states)
    )
    self._has_pending = False

  def log_warnings(self, step: int, row: Mapping[str, Any]) -> None:
    """Logs the warnings that follow from a row of metrics."""
    for rule in _dynamic_rules(self._wrappers):
      # "auto" may have found nothing to scale.
      scale = row.get("loss_scale", math.inf)
      if scale <= rule.min_scale:
        skipped = row["skipped_steps"] - self._previous["skipped_steps"]
        # The skipped steps that lowered the scale to its floor are no failure.
        if skipped > rule.steps_to_floor(self._previous["loss_scale"]):
          message = _describe_floor(scale, row["skipped_steps"])
          self._warn(LossScale.name, f"step {step}: {message}")
    self._previous = dict(row)

  def log_pending(self, step: int, state: TrainState, is_last: bool) -> None:
    """Logs which gradients are not in the parameters of an evaluation.

    It is logged for the first such evaluation, and for the last step.
    """
    notes = stack.pending(state.wrappers, state.wrapper_states)
    if is_last or not self._has_pending:
      when = "ends the run" if is_last else "is evaluated"
      for note in notes:
        _log.warning("step %d %s with updates pending. %s", step, when, note)
    self._has_pending = self._has_pending or bool(notes)


def _dynamic_rules(wrappers: Sequence[Any]) -> list[DynamicLossScale]:
  """Returns the rule of a dynamic loss scale, if there is one."""
  rules = [w.rule for w in wrappers if isinstance(w, LossScale)]
  return [rule for rule in rules if isinstance(rule, DynamicLossScale)]


def _stalled_steps(state: TrainState) -> int:
  """Returns how many steps in a row were skipped, if no scale is left to try.

  That is so at the smallest scale. Else it is 0.
  """
  for rule in _dynamic_rules(state.wrappers):
    scale = state.wrapper_states[LossScale.name]
    # On the host: an operation on the devices would be one of all processes.
    if scale and float(scale.scale) <= np.float32(rule.min_scale):
      return int(scale.bad_steps)
  return 0


def _describe_floor(scale: float, skipped_steps: float) -> str:
  return (
    f"LossScale: the scale is at its floor, {scale:g}, and gradients are still "
    f"not finite ({int(skipped_steps)} steps skipped so far). A smaller scale "
    "is not allowed: look for the source with "
    "flaxshard.nonfinite_leaves(grads), or lower min_scale."
  )


def _describe_bad_step(state: TrainState, progress: steps.Progress) -> str:
  paths = steps.bad_paths(state, progress)
  return (
    f"step {int(progress.bad_step)}: the loss is not finite; "
    f"{len(paths)} of {len(progress.bad_leaves)} parameters are not finite "
    f"after it{': ' if paths else '.'}{', '.join(paths)}"
  )
