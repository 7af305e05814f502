"""Chooses the step to restore: the newest or the best that is not damaged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
import contextlib
import logging
import math
import re
from typing import Any, TypeVar

import jax

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import keep as keep_lib
from flaxshard.checkpoint import steps
from flaxshard.core import checks
from flaxshard.core import multihost

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


def look(
  directory: Any, names: re.Pattern[str] | None = None
) -> tuple[dict[int, Any], set[int]]:
  """Returns the path of each step, and which steps are visibly damaged.

  Args:
    directory: Path of the directory of the steps.
    names: The names that count as steps; None: those of `Checkpointer` and
      `flax.training.checkpoints`, in this order.
  """
  found = steps.find(directory, names or steps.OURS)
  damaged = set()
  for number, path in list(found.items()):
    try:
      digests.check(path)
    except digests.Damaged:
      if path.exists():
        damaged.add(number)
      else:  # it was just deleted
        del found[number]
  if names is None:
    found = steps.find(directory, steps.FLAX) | found
  return found, damaged


def best_step(
  directory: Any, keep: keep_lib.Keep, damaged: Collection[int] = ()
) -> int | None:
  """Returns the step with the best metric, the latest of equal ones.

  Nothing is written or locked: the run may be in progress.

  Args:
    directory: Path of a directory of steps, or of a workdir.
    keep: Ranks the steps.
    damaged: More steps that are known to be damaged.

  Returns:
    The step; None if no step has a finite value of the metric.
  """
  found, unreadable = look(steps.directory_of_steps(directory), steps.OURS)
  ranks: dict[float, int] = {}
  for step, path in found.items():
    file = path / steps.METRICS / steps.METRICS
    # It may just have been deleted.
    with contextlib.suppress(digests.Damaged):
      if step not in {*damaged, *unreadable} and file.exists():
        ranks[keep.rank(digests.read_json(file))] = step
  ranks.pop(-math.inf, None)
  return ranks[max(ranks)] if ranks else None


def read_newest(
  directory: Any,
  list_steps: Callable[[], Mapping[int, Any]],
  step: int | None,
  read_step: Callable[[int, Any], _T],
) -> tuple[int, _T]:
  """Reads the newest step that is not damaged.

  Another program may save in the directory at the same time, and delete steps
  that are being read. Then the steps are listed again.

  Args:
    directory: The directory of the steps.
    list_steps: Returns the path of each step in it.
    step: The only step to read; None means the newest.
    read_step: Reads a step, or raises `digests.Damaged`.

  Returns:
    The number of the step, and what `read_step` returned.

  Raises:
    ValueError: There is no such step, or it is damaged, or all are, or the
      processes find different steps.
  """
  if step is not None:
    step = checks.integer("step", step, minimum=0)
  found = list_steps()
  _check_same_steps(directory, found)
  if not found:
    which = "" if step is None else f" of step {step}"
    missing = steps.describe_missing(directory)
    raise ValueError(f"no checkpoint{which} in {directory}: {missing}")
  if step is not None and step not in found:
    raise ValueError(
      f"no checkpoint of step {step} in {directory}; there are {sorted(found)}."
    )
  failures: dict[int, str] = {}
  while remaining := found.keys() - failures.keys():
    number = max(remaining) if step is None else step
    try:
      return number, read_step(number, found[number])
    except Exception as e:
      error = _find_damage(found[number], e)
      if error is None:
        raise
      if step is not None:
        raise error from e
      _log.warning("step %d is damaged, passed over: %s", number, error)
      failures[number] = str(error)
    # All processes must read the same step, so they list the steps once.
    if jax.process_count() == 1:
      found = list_steps()
  raise ValueError(
    f"{directory} has no checkpoint that is complete: "
    + " ".join(failures.values())
  )


def _check_same_steps(directory: Any, found: Mapping[int, Any]) -> None:
  """Raises a ValueError unless all processes find the same steps."""
  texts = multihost.exchange(", ".join(map(str, sorted(found))) or "none")
  for process, text in enumerate(texts):
    if text != texts[0]:
      raise ValueError(
        f"the processes find different steps in {directory}: process 0 finds "
        f"{texts[0]}, process {process} finds {text}. All processes must read "
        "the same directory."
      )


def _find_damage(where: Any, error: Exception) -> digests.Damaged | None:
  """Returns the damage of a step that caused an error, if there is any.

  Another program may delete a step while it is read, file by file: what Orbax
  then raises depends on the file.
  """
  if isinstance(error, digests.Damaged):
    return error
  # The processes of one program may see different moments of it.
  if jax.process_count() == 1:
    try:
      digests.verify(where, contents=False)
    except digests.Damaged as e:
      return e
    except (OSError, ValueError):
      pass  # this process cannot read the files: the first error says why
  return None
