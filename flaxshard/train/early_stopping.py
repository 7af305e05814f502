"""Ends a run whose evaluations no longer improve.

The rule is that of `flax.training.early_stopping.EarlyStopping`. Its state is
not saved: it follows from the evaluations in `metrics.jsonl`, so that a resumed
run stops at the same step as one without an interruption.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import json
import math
from typing import Any

from flax.training import early_stopping as flax_early_stopping
import jax

from flaxshard.core import multihost
from flaxshard.train import config as config_lib
from flaxshard.train import evaluation as evaluation_lib
from flaxshard.train import metrics as metrics_lib


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
    # It is {} in workdirs of older versions.
    self._metric = config.get("metric", "none")
    if self._metric != "none":
      mode = config_lib.resolve_mode(self._metric, config["mode"])
      # Flax's rule knows smaller metrics as better.
      self._sign = -1 if mode == "max" else 1
      self._rule = flax_early_stopping.EarlyStopping(
        patience=config["patience"], min_delta=config["min_delta"]
      )

  @property
  def reason(self) -> str:
    """Why the run ends, in one sentence without a full stop."""
    return (
      f"{self._metric} has not improved on "
      f"{self._rule.best_metric * self._sign:.4g} of step {self.best_step} by "
      f"more than {self._config['min_delta']:g} in "
      f"{self._config['patience'] + 1} evaluations"
    )

  def update(self, step: int, evaluation: Mapping[str, float]) -> None:
    """Adds an evaluation; all processes must call it.

    Args:
      step: The step just taken.
      evaluation: The metrics by name.

    Raises:
      ValueError: The evaluation has no metric of that name.
    """
    if self._metric == "none":
      return
    if self._metric not in evaluation:
      raise evaluation_lib.no_metric(
        "config.early_stopping.metric", self._metric, evaluation
      )
    value = evaluation[self._metric]
    # A task may compute another value in each process: that of process 0 is
    # the one in `metrics.jsonl`, where null stands for a value without JSON.
    text = json.dumps(value if math.isfinite(value) else None)
    self.add(step, json.loads(multihost.exchange(text)[0]))

  def add(self, step: int, value: float | None) -> None:
    """Adds the metric of an evaluation; None is one that is not finite."""
    self._rule = self._rule.update(
      math.inf if value is None else value * self._sign
    )
    if self._rule.has_improved:
      self.best_step = step
    if self._rule.should_stop and self.stopped_step is None:
      self.stopped_step = step


def resume(
  config: Mapping[str, Any], workdir: str, first_step: int
) -> EarlyStopping:
  """Returns the state of a run that continues from a step.

  Process 0 reads `metrics.jsonl`; all processes must call it.

  Args:
    config: `config.early_stopping`, checked.
    workdir: The workdir of the run.
    first_step: The step that the run continues from, 0 for a new one.
  """
  values: list[tuple[int, float | None]] = []
  if config["metric"] != "none" and first_step:
    with multihost.raise_on_all_processes(OSError, ValueError):
      if jax.process_index() == 0:
        values = _read_values(config, workdir, first_step)
    values = json.loads(multihost.exchange(json.dumps(values))[0])
  return _replay(config, values)


def has_ended(config: Mapping[str, Any], workdir: str, last_step: int) -> bool:
  """Returns whether the evaluations up to a step end a run.

  Unlike `resume`, it is for one process.

  Args:
    config: `config.early_stopping`, also that of an earlier run.
    workdir: The workdir of the run.
    last_step: The step.
  """
  values = _read_values(config, workdir, last_step)
  return _replay(config, values).stopped_step is not None


def _replay(
  config: Mapping[str, Any], values: Iterable[tuple[int, float | None]]
) -> EarlyStopping:
  stopping = EarlyStopping(config)
  for step, value in values:
    stopping.add(step, value)
  return stopping


def _read_values(
  config: Mapping[str, Any], workdir: str, last_step: int
) -> list[tuple[int, float | None]]:
  """Returns the steps and values of the metric in `metrics.jsonl`.

  Rows after `last_step` are left out: a run that continues from there writes
  them again.
  """
  metric = config.get("metric", "none")
  if metric == "none":
    return []
  rows = metrics_lib.read_rows(metrics_lib.metrics_path(workdir))
  return [
    (row["step"], row[metric])
    for row in rows
    if metric in row and row["step"] <= last_step
  ]
