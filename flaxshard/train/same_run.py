"""Checks before the first step that all processes take part in the same run.

Processes that disagree would wait for each other for ever, or train on with
parameters that differ. With one process nothing is checked.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import time
from typing import Any
import uuid

from etils import epath
import jax
import numpy as np

from flaxshard import data
from flaxshard.core import multihost
from flaxshard.core.version import VERSION
from flaxshard.data import sources
from flaxshard.train import resume

# The packages that decide what a step computes and how it is saved.
_PACKAGES = (
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "orbax-checkpoint",
  "numpy",
)

# Seconds until a new file is visible on all hosts of a shared file system.
_VISIBLE_SECONDS = 10.0

_SAME_COMMAND = (
  "Run the same command, with the same files and packages, and as many devices "
  "of one kind, on all processes."
)


def check_config(config: Any) -> None:
  """Raises if processes have other configs or packages.

  Call it before JAX starts its devices: with other configs, that may hang.

  Args:
    config: A checked config.

  Raises:
    ValueError: Two processes disagree.
  """
  multihost.check_agreement(_code_facts(config), _SAME_COMMAND)


def worker_facts(config: Any, splits: data.Splits | None) -> dict[str, Any]:
  """Returns what all workers of a run must have in common.

  `Worker.start` compares it, by the names of the fields.

  Args:
    config: A checked config.
    splits: The loaded data; None if the task makes its own batches.
  """
  facts = _code_facts(config)
  for field in resume.FREE_FIELDS:
    facts["config"].pop(field)
  if splits is not None:
    facts["the data"] = _data_facts(splits)
  return facts


def _code_facts(config: Any) -> dict[str, Any]:
  """Returns facts about the config and the code."""
  return {
    "config": json.loads(config.to_json()),
    "the version of": {
      "flaxshard": VERSION,
      **{name: importlib.metadata.version(name) for name in _PACKAGES},
    },
  }


def check_setup(
  splits: data.Splits | None, lowered: jax.stages.Lowered
) -> None:
  """Raises if processes have other data or train steps.

  Args:
    splits: The loaded data; None if the task makes its own batches.
    lowered: The traced train step, which shows the devices, and the code
      of the model, the optimizer and the wrappers.

  Raises:
    ValueError: Two processes disagree.
  """
  if multihost.process_count() == 1:
    return
  facts: dict[str, Any] = {
    "the traced train step (SHA-256)": hashlib.sha256(
      lowered.as_text().encode()
    ).hexdigest(),
  }
  if splits is not None:
    facts["the data"] = _data_facts(splits)
  multihost.check_agreement(facts, _SAME_COMMAND)


def _data_facts(splits: data.Splits) -> dict[str, Any]:
  sources_by_name = {"train": splits.train}
  if splits.eval is not None:
    sources_by_name["eval"] = splits.eval
  return {
    name: {
      "number of examples": "stream"
      if sources.is_stream(source)
      else len(source),  # type: ignore[arg-type]
      "first example": _digest(source),
    }
    for name, source in sources_by_name.items()
  }


def _digest(source: Any) -> str:
  """Returns a digest of the first example of a data source."""

  def digest() -> str:
    example = next(iter(source)) if sources.is_stream(source) else source[0]
    leaves = [np.asarray(x).tobytes() for x in jax.tree.leaves(example)]
    return hashlib.sha256(b"".join(leaves)).hexdigest()[:16]

  first = digest()
  # A source may augment its examples at random.
  return first if first == digest() else "random"


def check_workdir(workdir: str) -> None:
  """Raises if the workdir is not the same directory for all processes.

  Args:
    workdir: The absolute path of the workdir; it exists and can be written.

  Raises:
    ValueError: A process does not see a file that process 0 has written.
  """
  if multihost.process_count() == 1:
    return
  name = multihost.exchange(f".same_workdir_{uuid.uuid4().hex}")[0]
  path = epath.Path(os.path.join(workdir, name))
  index = multihost.process_index()
  if index == 0:
    path.write_bytes(b"")
  deadline = time.monotonic() + _VISIBLE_SECONDS
  try:
    with multihost.raise_on_all_processes(ValueError):
      while not path.exists():
        if time.monotonic() > deadline:
          raise ValueError(
            f"workdir={workdir!r} is not the same directory for all processes: "
            f"process {index} does not see a file that process 0 has written, "
            f"for {_VISIBLE_SECONDS:g} s. Use a directory that all hosts share."
          )
        time.sleep(0.1)
  finally:
    if index == 0:
      path.unlink()
