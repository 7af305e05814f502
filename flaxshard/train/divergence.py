"""Watches a run: stops one that diverges, and logs what its wrappers tell."""

from __future__ import annotations

from collections.abc import Mapping
import logging
import math
from typing import Any

import jax

from flaxshard.core import gradients
from flaxshard.state.train_state import TrainState
from flaxshard.train import console
from flaxshard.train import metrics as metrics_lib
from flaxshard.train import steps
from flaxshard.wrappers import base
from flaxshard.wrappers import stack

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
    stalls = stack.stalls(state.wrappers, state.wrapper_states)
    self._has_stalled = bool(stalls)
    diverged = [s for s in stalls if s.steps >= self._max_stalled_steps]
    if diverged:
      self._report(
        "stall",
        f"step {step}: the last {diverged[0].steps} steps were skipped, so "
        f"training makes no progress. {diverged[0].reason} A lower "
        "config.learning_rate may help.",
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
    for wrapper in self._wrappers:
      message = wrapper.warning(self._previous, row)
      if message:
        self._warn(base.name_of(wrapper), f"step {step}: {message}")
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


def _describe_bad_step(state: TrainState, progress: steps.Progress) -> str:
  paths = steps.bad_paths(state, progress)
  return (
    f"step {int(progress.bad_step)}: the loss is not finite; "
    f"{len(paths)} of {len(progress.bad_leaves)} parameters are not finite "
    f"after it{': ' if paths else '.'}{', '.join(paths)}"
  )
