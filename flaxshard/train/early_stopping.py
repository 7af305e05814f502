"""Ends a run whose evaluations no longer improve.

The rule is that of `flax.training.early_stopping.EarlyStopping`. Its state is
not saved: it follows from the evaluations in `metrics.jsonl`, so that a resumed
run stops at the same step as one without an interruption.
"""

from __future__ import annotations

from collections.abc import Mapping
import logging
import math
from typing import Any

from flax.training import early_stopping as flax_early_stopping

from flaxshard.train import config as config_lib
from flaxshard.train import metrics as metrics_lib

_log = logging.getLogger(__name__)


class EarlyStopping:
  """The evaluations of a run so far, and whether they end it.

  An evaluation improves if its metric is better than the best one so far by
  more than `min_delta`. Flax's rule tolerates `patience` evaluations in a row
  that do not improve, and stops at the next one. A metric that is not finite
  does not improve; before the first finite one nothing is counted.

  Args:
    config: `config.early_stopping`, also that of an earlier run; without a
      metric nothing ends the run.

  Attributes:
    best_step: The step of the best evaluation, 0 before the first one.
    stopped_step: The step that ends the run, or None.

  Example:
    >>> stopping = EarlyStopping({"metric": "eval_loss", "mode": "auto",
    ...                           "patience": 1, "min_delta": 0.0})
    >>> for step, loss in enumerate([0.5, 0.3, 0.4, 0.3]):
    ...   stopping.update(step, {"eval_loss": loss})
    >>> stopping.stopped_step, stopping.best_step
    (3, 1)
  """

  def __init__(self, config: Mapping[str, Any]):
    self.best_step = 0
    self.stopped_step: int | None = None
    self._config = config
    mode = config_lib.resolve_mode(config["metric"], config["mode"])
    # Flax's rule knows smaller metrics as better.
    self._sign = -1 if mode == "max" else 1
    self._rule = flax_early_stopping.EarlyStopping(
      patience=config["patience"], min_delta=config["min_delta"]
    )

  def update(self, step: int, row: Mapping[str, float | None]) -> None:
    """Adds the evaluation of a row, if it has one.

    Args:
      step: The step of the row.
      row: Its metrics by name; None is one that is not finite.
    """
    if self._config["metric"] not in row:
      return
    value = row[self._config["metric"]]
    if value is None or not math.isfinite(value):
      value = math.inf * self._sign
    self._rule = self._rule.update(value * self._sign)
    if self._rule.has_improved:
      self.best_step = step
    if self._rule.should_stop and self.stopped_step is None:
      self.stopped_step = step

  def log(self) -> None:
    """Logs why the run has ended, if it has ended early."""
    if self.stopped_step is not None:
      _log.info(
        "stopped early at step %d: %s has not improved on %.4g of step %d by "
        "more than %g in %d evaluations",
        self.stopped_step,
        self._config["metric"],
        self._rule.best_metric * self._sign,
        self.best_step,
        self._config["min_delta"],
        self._config["patience"] + 1,
      )


def replay(
  config: Mapping[str, Any], workdir: str, last_step: int
) -> EarlyStopping:
  """Returns the state of a run after a step, from its `metrics.jsonl`.

  Rows after that step are left out: a run that continues from there writes
  them again.

  Args:
    config: `config.early_stopping`, also that of an earlier run.
    workdir: The workdir of the run.
    last_step: The step, 0 for a new run.
  """
  stopping = EarlyStopping(config)
  if config["metric"] != "none":
    for row in metrics_lib.read_rows(workdir):
      if row["step"] <= last_step:
        stopping.update(row["step"], row)
  return stopping
