"""The facts of a run, the same for all workers: the object `run`."""

from __future__ import annotations

from collections.abc import Mapping
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
  here, there = _flat(own), _flat(read(objects))
  for path in {**here, **there}:
    if not _are_equal(here.get(path), there.get(path)):
      raise ValueError(
        f"Worker: {path} is {here.get(path)!r} here, and {there.get(path)!r} "
        f"in the run in {objects.url}. All workers need the same. For another "
        "run use another directory."
      )


def read(objects: Objects) -> dict[str, Any] | None:
  """Returns the facts of the run in a store; None before its first worker."""
  content, _ = objects.read(_KEY)
  return None if content is None else unpack(_KEY, content)


def _flat(facts: Any, path: str = "") -> dict[str, Any]:
  """Returns the values of nested dicts by their paths."""
  if not isinstance(facts, dict):
    return {path: facts}
  found: dict[str, Any] = {}
  for key, value in facts.items():
    found |= _flat(value, f"{path}.{key}" if path else key)
  return found


def _are_equal(a: Any, b: Any) -> bool:
  if isinstance(a, float) and isinstance(b, float):
    return math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=1e-12)
  return a == b
