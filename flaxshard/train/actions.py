"""Decides after each step whether to log, to evaluate and to save."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils
import numpy as np


class Due(NamedTuple):
  """The actions that are due after a step."""

  log: bool
  evaluate: bool
  save: bool

  @property
  def any(self) -> bool:
    """Whether there is anything to do."""
    return self.log or self.evaluate or self.save


def due(config: Any, step: int, stop: bool, save_time: float) -> Due:
  """Returns what to do after a step.

  Args:
    config: A checked config.
    step: The step just taken.
    stop: Whether a signal ends the run after this step.
    save_time: `time.monotonic()` of the last save.
  """
  final = step == config.num_train_steps
  # The last step of a run is logged and saved, whatever its number.
  last = final or stop
  log = last or step % config.log_every_steps == 0
  save = last or step % config.checkpoint_every_steps == 0
  if log and not save and config.checkpoint_every_minutes:
    seconds = time.monotonic() - save_time
    save = seconds >= 60 * config.checkpoint_every_minutes
    if jax.process_count() > 1:
      # Clocks differ: all processes save when process 0 does.
      save = bool(multihost_utils.broadcast_one_to_all(np.array(save)))
  return Due(log, final or step % config.eval_every_steps == 0, save)
