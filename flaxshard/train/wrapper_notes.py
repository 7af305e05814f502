"""Logs what the wrappers have to say in the course of a run."""

from __future__ import annotations

from collections.abc import Mapping
import logging
from typing import Any

import numpy as np

from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import stack

_log = logging.getLogger(__name__)


class WrapperNotes:
  """Logs notes of the wrappers, such as a loss scale at its floor.

  Of consecutive rows with a warning, only the first one is logged.

  Args:
    state: The state that training starts from.
  """

  def __init__(self, state: TrainState):
    self._wrappers = state.wrappers
    self._previous: Mapping[str, Any] = {
      name: np.asarray(value).item()
      for name, value in stack.metrics(
        state.wrappers, state.wrapper_states
      ).items()
    }
    self._has_warned = False
    self._has_pending = False

  def log_warnings(self, step: int, row: Mapping[str, Any]) -> None:
    """Logs the warnings that follow from a row of metrics."""
    messages = stack.warnings_of(self._wrappers, self._previous, row)
    if not self._has_warned:
      for message in messages:
        _log.warning("step %d: %s", step, message)
    self._previous, self._has_warned = dict(row), bool(messages)

  def log_pending(self, step: int, state: TrainState, is_last: bool) -> None:
    """Logs what an evaluation does not see, as local steps before a commit.

    It is logged for the first such evaluation, and for the last step.
    """
    notes = stack.pending(state.wrappers, state.wrapper_states)
    if is_last or not self._has_pending:
      when = "is the last one," if is_last else "is evaluated"
      for note in notes:
        _log.warning("step %d %s before a commit. %s", step, when, note)
    self._has_pending = self._has_pending or bool(notes)
