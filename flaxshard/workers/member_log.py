"""Logs which workers are lost and which have joined."""

from __future__ import annotations

from collections.abc import Callable
import logging

from flaxshard.workers.view_log import View

_log = logging.getLogger("flaxshard")


class MemberLog:
  """Logs the difference between each view and the one before.

  Args:
    worker_id: Index of this worker.
    is_done: Whether a worker, given by its incarnation, has said that it is
      done: then it is not lost.
  """

  def __init__(self, worker_id: int, is_done: Callable[[str], bool]):
    self._worker_id = worker_id
    self._is_done = is_done
    self._members: dict[int, str] = {}

  def follow(self, view: View) -> None:
    """Takes note of a view.

    Args:
      view: The newest view.
    """
    old, me = self._members, self._worker_id
    self._members = new = {m.worker_id: m.incarnation for m in view.members}
    if me not in old or me not in new:
      return
    names = ", ".join(map(str, new))
    for k, incarnation in sorted(old.items() - new.items()):
      if not self._is_done(incarnation):
        _log.warning(
          "worker %d: worker %d is lost. Workers now: %s", me, k, names
        )
    for k, _ in sorted(new.items() - old.items()):
      _log.info(
        "worker %d: worker %d has joined. Workers now: %s", me, k, names
      )
