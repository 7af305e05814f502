"""Ends a run whose evaluations no longer improve.

The rule is that of `flax.training.early_stopping.EarlyStopping`. Its state is
not saved: it follows from the evaluations in `metrics.jsonl`, so that a resumed
run stops at the same step as one without an interruption.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import json
import logging
import math
from typing import Any

from flax.training import early_stopping as flax_early_stopping
import jax

from flaxshard.core import multihost
from flaxshard.train import config as config_lib
from flaxshard.train import evaluation as evaluation_lib
from flaxshard.train import metrics as metrics_lib

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
  """The evaluations of a run so far, and whether they end it.

  An evaluation improves if its metric is better than the best one so far by
  more than `min_delta`. Flax's rule tolerates `patience` evaluations in a row
  that do not improve, and stops at the next one. A metric that is not finite
  does not improve; before the first finite one nothing is counted.

  Attributes:
    config: `config.early_stopping`, checked.
    rule: Flax's rule; it knows smaller metrics as better.
    best_step: The step of the best evaluation, 0 before the first one.
    stopped_step: The step that ends the run, or None.
  """

  config: Mapping[str, Any]
  rule: flax_early_stopping.EarlyStopping
  best_step: int = 0
  stopped_step: int | None = None

  @property
  def reason(self) -> str:
    """Why the run ends, in one sentence without a full stop."""
    best = self.rule.best_metric * _sign(self.config)
    return (
      f"{self.config['metric']} has not improved on {best:.4g} of step "
      f"{self.best_step} by more than {self.config['min_delta']:g} in "
      f"{self.config['patience'] + 1} evaluations"
    )

  def update(self, step: int, evaluation: Mapping[str, float]) -> EarlyStopping:
    """Returns the state after an evaluation; all processes must call it.

    Args:
      step: The step just taken.
      evaluation: The metrics by name.

    Raises:
      ValueError: The evaluation has no metric of that name.
    """
    if not is_on(self.config):
      return self
    metric = self.config["metric"]
    if metric not in evaluation:
      raise evaluation_lib.no_metric(
        "config.early_stopping.metric", metric, evaluation
      )
    # A task may compute another value in each process: that of process 0 is
    # the one in `metrics.jsonl`.
    values = multihost.exchange(_dump(evaluation[metric]))
    return self._add(step, json.loads(values[0]))

  def replay(self, values: Iterable[tuple[int, float | None]]) -> EarlyStopping:
    """Returns the state after some evaluations.

    Args:
      values: Pairs of a step and the metric, in the order of the steps; None
        stands for one that is not finite.
    """
    state = self
    for step, value in values:
      state = state._add(step, value)
    return state

  def _add(self, step: int, value: float | None) -> EarlyStopping:
    if value is None:
      loss = math.inf
    else:
      loss = value * _sign(self.config)
    rule = self.rule.update(loss)
    stops = rule.should_stop and self.stopped_step is None
    return dataclasses.replace(
      self,
      rule=rule,
      best_step=step if rule.has_improved else self.best_step,
      stopped_step=step if stops else self.stopped_step,
    )


def create(config: Mapping[str, Any]) -> EarlyStopping:
  """Returns the state before any evaluation.

  Args:
    config: `config.early_stopping`, checked.

  Example:
    >>> state = create({"metric": "eval_loss", "mode": "auto", "patience": 1,
    ...                 "min_delta": 0.0})
    >>> for step, loss in enumerate([0.5, 0.3, 0.4, 0.3]):
    ...   state = state.update(step, {"eval_loss": loss})
    >>> state.stopped_step, state.best_step
    (3, 1)
  """
  rule = flax_early_stopping.EarlyStopping(
    patience=config["patience"], min_delta=config["min_delta"]
  )
  return EarlyStopping(config, rule)


def is_on(config: Mapping[str, Any]) -> bool:
  """Returns whether a `config.early_stopping` can end a run.

  Args:
    config: `config.early_stopping`; `{}` in workdirs of older versions.
  """
  return config.get("metric", "none") != "none"


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
  state = create(config)
  if not is_on(config) or not first_step:
    return state
  values: list[tuple[int, float | None]] = []
  with multihost.raise_on_all_processes(OSError, ValueError):
    if jax.process_index() == 0:
      values = _read_values(config["metric"], workdir, first_step)
      if not values:
        _log.warning(
          "%s has no %s up to step %d: config.early_stopping counts from there",
          metrics_lib.metrics_path(workdir),
          config["metric"],
          first_step,
        )
  return state.replay(json.loads(multihost.exchange(json.dumps(values))[0]))


def has_ended(config: Mapping[str, Any], workdir: str, last_step: int) -> bool:
  """Returns whether the evaluations up to a step end a run.

  Unlike `resume`, it is for one process.

  Args:
    config: `config.early_stopping`, also that of an earlier run.
    workdir: The workdir of the run.
    last_step: The step.
  """
  if not is_on(config):
    return False
  values = _read_values(config["metric"], workdir, last_step)
  return create(config).replay(values).stopped_step is not None


def _read_values(
  metric: str, workdir: str, last_step: int
) -> list[tuple[int, float | None]]:
  """Returns the steps and values of a metric in `metrics.jsonl`.

  Rows after `last_step` are left out: a run that continues from there writes
  them again.
  """
  rows = metrics_lib.read_rows(metrics_lib.metrics_path(workdir))
  return [
    (row["step"], row[metric])
    for row in rows
    if metric in row and row["step"] <= last_step
  ]


def _sign(config: Mapping[str, Any]) -> int:
  mode = config_lib.resolve_mode(config["metric"], config["mode"])
  return -1 if mode == "max" else 1


def _dump(value: float) -> str:
  # JSON has no NaN; a row has null for it too.
  return json.dumps(value if math.isfinite(value) else None)
