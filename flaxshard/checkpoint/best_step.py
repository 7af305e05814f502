"""Finds the step with the best metric, without an Orbax manager."""

from __future__ import annotations

import logging
import math
import os

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import locate
from flaxshard.checkpoint import policies
from flaxshard.checkpoint import readable_steps
from flaxshard.checkpoint import step_names
from flaxshard.core import files

_log = logging.getLogger(__name__)


def best_step(
  directory: str | os.PathLike[str], metric: str, mode: str
) -> int | None:
  """Returns the step with the best metric, the latest of equal ones.

  Nothing is written or locked: the run may be in progress.

  Args:
    directory: Path of a directory of steps, or of a workdir.
    metric: Name of the metric, as it was given to `Checkpointer.save`.
    mode: `"max"` if higher values of the metric are better, or `"min"`.

  Returns:
    The step; None if no step has a finite value of the metric.

  Example:
    >>> best_step("/tmp/digits", "eval_loss", "min")  # doctest: +SKIP
    600
  """
  ranks: dict[float, int] = {}
  where = locate.directory_of_steps(directory)
  for step, path in step_names.steps(where, step_names.OURS).items():
    file = os.path.join(
      os.fspath(path), readable_steps.METRICS, readable_steps.METRICS
    )
    try:
      # A step that was copied from another one has the metrics of that.
      if files.exists(file) and digests.other_step(path) is None:
        ranks[policies.rank(digests.read_json(file), metric, mode)] = step
    except digests.Damaged as e:
      _log.warning("step %d is damaged, passed over: %s", step, e)
  ranks.pop(-math.inf, None)
  return ranks[max(ranks)] if ranks else None
