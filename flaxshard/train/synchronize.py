"""`flaxshard --synchronize`: merges the commits of a run's workers."""

from __future__ import annotations

from collections.abc import Mapping
import logging
import signal
import time
from typing import Any

from flaxshard.center import facts as facts_lib
from flaxshard.center import merge
from flaxshard.center import store
from flaxshard.core import files
from flaxshard.core import registry
from flaxshard.state.train_state import TrainState
from flaxshard.train import config as config_lib
from flaxshard.train import console
from flaxshard.train import load

_log = logging.getLogger("flaxshard")

_PAUSE_SECONDS = 0.2


def synchronize(workdir: str) -> None:
  """Merges the commits of the workers of a run until it has ended.

  The config of the run comes from its center. Nothing is trained, and no data
  is read. After a signal the workers go on without it.

  Args:
    workdir: The workdir of the run; its first worker may come later.

  Raises:
    StoreError: The store cannot be read or written.
    SystemExit: After a signal; the code is 128 plus its number.
    ValueError, TypeError: The run's model or optimizer cannot be created here.
  """
  workdir = files.absolute(workdir)
  files.check_writable("workdir", workdir, create=False)
  objects = store.Objects(store.center_url(workdir))
  signums: list[int] = []
  for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda signum, frame: signums.append(signum))
  with console.show_log():
    facts = facts_lib.read(objects)
    if facts is None:
      _log.info("waiting for the first worker in %s", objects.url)
    while facts is None and not signums:
      time.sleep(_PAUSE_SECONDS)
      facts = facts_lib.read(objects)
    if facts is not None:
      state = _abstract_state(facts)
      merge.synchronize(objects, state, lambda: bool(signums))
    if signums:
      raise SystemExit(128 + signums[0])


def _abstract_state(facts: Mapping[str, Any]) -> TrainState:
  """Returns the shapes and dtypes of the state of a run's workers."""
  if "config" not in facts:
    raise ValueError(
      "--synchronize needs a run from a config: the workers of this one have "
      "a loop of their own, and merge themselves."
    )
  # JSON has lists for the tuples of the config.
  config = config_lib.check(registry.to_plain(facts["config"]))
  _, _, (state, _) = load.plan(config, facts["example"])
  return state
