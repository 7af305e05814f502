"""Logs the wrappers' warnings and what they have not committed."""

from __future__ import annotations

from collections.abc import Mapping
import logging
from typing import Any

from flaxshard.state.train_state import TrainState
from flaxshard.train import console
from flaxshard.train import metrics as metrics_lib
from flaxshard.wrappers import base
from flaxshard.wrappers import stack

_log = logging.getLogger(__name__)


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
      for message in stack.warnings_of((wrapper,), self._previous, row):
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
