"""The synchronizer: a process beside the store that merges and does not train.

With it, a worker on a slow link sends one commit and reads one center. When it
ends, the workers merge again.
"""

from __future__ import annotations

from collections.abc import Callable
import logging
import time
from typing import Any

from flaxshard.center import facts as facts_lib
from flaxshard.center import heads
from flaxshard.center import members as members_lib
from flaxshard.center.merge import Merger
from flaxshard.center.store import Objects
from flaxshard.center.store import StoreError
from flaxshard.center.update import CenterUpdate

_log = logging.getLogger("flaxshard")

_PAUSE_SECONDS = 0.2


def wait_for_run(
  objects: Objects, should_stop: Callable[[], bool]
) -> dict[str, Any] | None:
  """Returns the facts of a run once its first worker has begun.

  Args:
    objects: The store.
    should_stop: Ends the wait; the result is None then.
  """
  waits = False
  while not should_stop():
    facts = facts_lib.read(objects)
    if facts is not None and members_lib.find_num_workers(objects):
      return facts
    if not waits:
      _log.info("waiting for the first worker in %s", objects.url)
      waits = True
    time.sleep(_PAUSE_SECONDS)
  return None


def synchronize(
  objects: Objects, state: Any, should_stop: Callable[[], bool]
) -> None:
  """Merges commits until the run has ended.

  Args:
    objects: The store.
    state: A train state like those of the workers, or its shapes and dtypes.
    should_stop: Returns True when this process shall stop, as after a signal.

  Raises:
    StoreError: The store cannot be read or written at the start.
    DamagedError: The center is damaged.
  """
  update = CenterUpdate(state)
  store = update.agn.transport
  members = members_lib.Members(
    objects,
    members_lib.SYNCHRONIZER,
    members_lib.find_num_workers(objects),
    store.grace,
    store.deadline,
  )
  merger = Merger(objects, update, members)
  members.enter()
  merger.start()
  _log.info("merging the commits of the workers in %s", objects.url)
  try:
    while not should_stop() and merger.error is None:
      if _has_ended(objects, store.fragments):
        _log.info("the run has ended")
        return
      members.check()
      time.sleep(_PAUSE_SECONDS)
  finally:
    merger.close()
    members.leave()
  if merger.error is not None:
    raise merger.error


def _has_ended(objects: Objects, fragments: int) -> bool:
  try:
    return heads.have_ended(heads.read_every(objects, fragments))
  except StoreError:
    return False  # the store has warned
