"""The facts of a run, the same for all workers: the object `run`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import json
import math
from typing import Any
import zlib

from flaxshard.center import train_states
from flaxshard.center.store import Objects
from flaxshard.center.store import pack
from flaxshard.center.store import unpack
from flaxshard.center.update import CenterUpdate
from flaxshard.state.train_state import TrainState

_KEY = "run"

# Of `CenterUpdate.probe`: machines differ in the last bits.
_TOLERANCE = 1e-4


def describe(
  update: CenterUpdate, state: TrainState, facts: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the facts of a run as values for JSON.

  Args:
    update: The center's update.
    state: The train state of a worker.
    facts: Further facts, such as the config.
  """
  agn = update.agn
  arrays = train_states.by_path(train_states.parts(state)["center"])
  fields = ("communication_period", "commit", "commit_delta")
  # The other options may change, as the number of workers may.
  options = ("fragments", "delay", "blend", "commit_dtype")
  return {
    # First: a field of a config says more than what follows from it.
    **json.loads(json.dumps(facts)),
    "AGN": {
      **{name: getattr(agn, name) for name in fields},
      "outer_tx": agn.outer_tx is not None,
      "transport": {name: getattr(agn.transport, name) for name in options},
    },
    "arrays": {p: f"{x.dtype}{list(x.shape)}" for p, x in arrays.items()},
    "parameters that do not change": {
      path: zlib.crc32(train_states.to_host(x).tobytes())
      for path, x in arrays.items()
      if path.startswith("params") and path not in update.fragment_of
    },
    "change by some updates with fixed gradients": update.probe(),
  }


def agree(objects: Objects, own: dict[str, Any]) -> None:
  """Writes the facts of a run, or compares them with those that are there.

  Args:
    objects: The store.
    own: The facts of this worker.

  Raises:
    ValueError: They differ; the message has the path and both values.
  """
  content, generation = objects.read(_KEY)
  if content is None and objects.write(_KEY, pack(own), generation) is not None:
    return
  for path, there, here in _differences("", read(objects), own):
    raise ValueError(
      f"Worker: {path} is {here!r} here, and {there!r} in the run in "
      f"{objects.url}. All workers need the same. For another run use another "
      "directory."
    )


def read(objects: Objects) -> dict[str, Any] | None:
  """Returns the facts of the run in a store; None before its first worker."""
  content, _ = objects.read(_KEY)
  return None if content is None else unpack(_KEY, content)


def _differences(
  path: str, there: Any, here: Any
) -> Iterator[tuple[str, Any, Any]]:
  """Yields where values of JSON differ, and both values."""
  if isinstance(there, dict) and isinstance(here, dict):
    for key in {**here, **there}:
      name = f"{path}.{key}" if path else key
      yield from _differences(name, there.get(key), here.get(key))
  elif isinstance(there, float) and isinstance(here, float):
    if not math.isclose(there, here, rel_tol=_TOLERANCE, abs_tol=1e-12):
      yield path, there, here
  elif there != here:
    yield path, there, here
