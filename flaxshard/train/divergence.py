"""Watches a run: stops one that diverges, and logs what its wrappers tell."""

from __future__ import annotations

from collections.abc import Mapping
import logging
import math
from typing import Any

import jax
import numpy as np

from flaxshard.core import gradients
from flaxshard.state.train_state import TrainState
from flaxshard.train import steps
from flaxshard.wrappers import stack
from flaxshard.wrappers.loss_scale import LossScale

_log = logging.getLogger(__name__)

# A run has diverged after so many skipped steps in a row, if the loss scale is
# at its floor. A shorter stretch may be the fault of a few batches.
_MAX_STALLED_STEPS = 20

_all_finite = jax.jit(gradients.all_finite)


class Watch:
  """Raises or warns when a run diverges, and warns of what wrappers tell.

  A run diverges at an applied step with a non-finite loss, at a non-finite
  evaluation, with non-finite parameters that are to be saved, or when all of
  the last 20 steps, or all of a shorter run, were skipped with the loss scale
  at its floor. With `config.on_nonfinite` "stop" the checks raise
  FloatingPointError, with "continue" they warn.

  Args:
    config: A checked config.
    state: The state that training starts from.

  Attributes:
    is_stalled: Whether the last step was skipped, with the loss scale at its
      floor. Such a state may have diverged. It differs from the one before the
      skipped steps in its counters only, so that little is lost if it is not
      saved.
  """

  def __init__(self, config: Any, state: TrainState):
    self.is_stalled = False
    self._config = config
    self._warned: set[str] = set()
    found = [w for w in state.wrappers if isinstance(w, LossScale)]
    self._rule: Any = next((w.rule for w in found if w.skips_steps), None)
    # "auto" may have found nothing to scale.
    scale = state.wrapper_states.get(LossScale.name)
    self._skipped_steps = int(scale.skipped_steps) if scale else 0

  def check_steps(
    self, step: int, state: TrainState, progress: steps.Progress
  ) -> None:
    """Checks the steps since the last check.

    Args:
      step: The step just taken.
      state: The state after it.
      progress: The combined progress of all replicas.

    Raises:
      FloatingPointError: The run has diverged.
    """
    if progress.bad_step:
      paths = gradients.nonfinite_leaves(state.params)
      self._report(
        "loss",
        f"step {int(progress.bad_step)}: the loss is not finite; {len(paths)} "
        f"of {len(jax.tree.leaves(state.params))} parameters are not finite "
        f"after step {step}{': ' if paths else '.'}{', '.join(paths)}",
      )
    self.is_stalled = False
    scale = state.wrapper_states.get(LossScale.name)
    if not self._rule or not scale:
      return
    before, self._skipped_steps = self._skipped_steps, int(scale.skipped_steps)
    # On the host: an operation on the devices would be one of all processes.
    if float(scale.scale) > np.float32(self._rule.min_scale):
      return
    stalled = int(scale.bad_steps)
    self.is_stalled = stalled > 0
    floor = (
      f"LossScale: the scale is at its floor, {float(scale.scale):g}, and "
      f"gradients are still not finite ({self._skipped_steps} steps skipped so "
      "far). A smaller scale is not allowed: look for the source with "
      "flaxshard.nonfinite_leaves(grads), or lower min_scale."
    )
    if stalled >= min(_MAX_STALLED_STEPS, self._config.num_train_steps):
      self._report(
        "stall",
        f"step {step}: the last {stalled} steps were skipped, so training "
        f"makes no progress. {floor} A lower config.learning_rate may help.",
      )
    # The skipped step that lowered the scale to its floor counts, too.
    elif self._skipped_steps > before:
      self._warn("floor", f"step {step}: {floor}")

  def check_evaluation(
    self, step: int, evaluation: Mapping[str, float]
  ) -> None:
    """Checks the metrics of an evaluation.

    Args:
      step: The step just taken.
      evaluation: The metrics by name; empty if there was no evaluation.

    Raises:
      FloatingPointError: One is not finite.
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
      FloatingPointError: One is not finite.
    """
    if bool(_all_finite(state.params)):
      return
    paths = gradients.nonfinite_leaves(state.params)
    self._report(
      "parameters",
      f"step {step}: {len(paths)} parameters are not finite after it: "
      f"{', '.join(paths)}. A lower config.learning_rate may help.",
    )

  def _warn(self, kind: str, message: str) -> None:
    """Logs the first warning of each kind."""
    if kind not in self._warned:
      self._warned.add(kind)
      _log.warning("%s", message)

  def _report(self, kind: str, message: str) -> None:
    if self._config.on_nonfinite == "continue":
      self._warn(kind, message)
      return
    raise FloatingPointError(
      f"{message}\nThis state is not saved; earlier checkpoints are kept. "
      "config.on_nonfinite='continue' would go on."
    )

  def warn_of_pending(self, step: int, state: TrainState, ends: bool) -> None:
    """Warns of gradients that are not in the parameters of an evaluation.

    It is logged for the first such evaluation, and for the last step.

    Args:
      step: The step just taken.
      state: The state after it.
      ends: Whether the step is the last one.
    """
    when = "ends the run" if ends else "is evaluated"
    notes = " ".join(stack.pending(state.wrappers, state.wrapper_states))
    if notes:
      self._warn(when, f"step {step} {when} with updates pending. {notes}")
