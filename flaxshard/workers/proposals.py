"""Changes of the view, by a worker that is a member."""

from __future__ import annotations

from collections.abc import Callable
import time

from flaxshard.workers.current_view import CurrentView
from flaxshard.workers.view_log import Member
from flaxshard.workers.view_log import View
from flaxshard.workers.view_log import ViewLog

# What a minority waits for longer, so that the majority proposes first.
MINORITY_SECONDS = 1.0


def change(
  current: CurrentView, log: ViewLog, make: Callable[[View], View | None]
) -> View:
  """Changes the view, however many others do so at the same time.

  Args:
    current: The current view.
    log: The log of views.
    make: Returns the view that is to follow a view, or None for no change.

  Returns:
    The current view.

  Raises:
    OSError: The log cannot be read or written.
  """
  while True:
    base = current.view
    view = make(base)
    if view is None:
      return base
    stored = log.propose(view)
    current.adopt(stored)
    if stored == view:
      return view
    if stored.epoch <= base.epoch:
      # A file server that shows old names.
      time.sleep(0.1)


def without_silent(
  view: View,
  silence: Callable[[Member], float],
  heartbeat: float,
  quorum: int,
) -> View | None:
  """Returns a view without the members that are silent.

  Args:
    view: The current view.
    silence: Returns for how many seconds a member has been silent.
    heartbeat: Seconds after which a member is dead.
    quorum: Least number of members.

  Returns:
    The view; None if nobody is silent, fewer than `quorum` would be left, or
    the others, if they live, are the majority and are to propose first.
  """
  # To a worker that is cut off, the others fall silent one a little before the
  # other: those that are about to do not count as its side.
  heard = [m for m in view.members if silence(m) < heartbeat / 2]
  # Of two halves, the one with the lowest index goes first.
  is_first = view.members[0] in heard
  is_majority = 2 * len(heard) + is_first > len(view.members)
  for limit in (heartbeat, heartbeat + MINORITY_SECONDS):
    left = [m for m in view.members if silence(m) < limit]
    if len(left) == len(view.members) or len(left) < quorum:
      return None
    if is_majority or limit > heartbeat:
      lost = [str(m.worker_id) for m in view.members if m not in left]
      workers = f"worker{'s' * (len(lost) > 1)} {', '.join(lost)}"
      return view.next(
        left, f"no sign of life from {workers} for {heartbeat:g} s"
      )
  return None
