"""Compares what the processes and the workers of a run have.

Processes that disagree would wait for each other for ever, or train on with
parameters that differ.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
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
from flaxshard.train import setup as setup_lib

# The packages that decide what a step computes and how it is saved.
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

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


def check_setup(setup: setup_lib.Setup) -> None:
  """Raises if processes have other data or train steps.

  The traced train step shows the devices, and the code of the model, the
  optimizer and the wrappers.

  Args:
    setup: The setup of the config.

  Raises:
    ValueError: Two processes disagree.
  """
  if multihost.process_count() == 1:
    return
  program = setup.lowered_train_step.as_text().encode()
  step = hashlib.sha256(program).hexdigest()
  facts = {"the traced train step (SHA-256)": step, **_data_facts(setup.splits)}
  multihost.check_agreement(facts, _SAME_COMMAND)


def worker_facts(setup: setup_lib.Setup) -> dict[str, Any]:
  """Returns what all workers of a run must have in common.

  `Worker.start` compares it, by the names of the fields.

  Args:
    setup: The setup of the config.
  """
  facts = _code_facts(setup.config)
  for field in resume.FREE_FIELDS:
    facts["config"].pop(field)
  example = resume.shapes_to_json(setup.loaded.shapes)
  return {**facts, **_data_facts(setup.splits), "example": example}


def _code_facts(config: Any) -> dict[str, Any]:
  """Returns facts about the config and the code."""
  return {
    "config": resume.config_to_json(config),
    "the version of": {
      "flaxshard": VERSION,
      **{name: importlib.metadata.version(name) for name in _PACKAGES},
    },
  }


def _data_facts(splits: data.Splits | None) -> dict[str, Any]:
  """Returns facts about the data; None if the task makes its own batches."""
  if splits is None:
    return {}
  named = {"train": splits.train, "eval": splits.eval}
  facts = {k: _source_facts(x) for k, x in named.items() if x is not None}
  return {"the data": facts}


def _source_facts(source: Any) -> dict[str, Any]:
  is_stream = sources.is_stream(source)

  def digest() -> str:
    example = next(iter(source)) if is_stream else source[0]
    leaves = [np.asarray(x).tobytes() for x in jax.tree.leaves(example)]
    return hashlib.sha256(b"".join(leaves)).hexdigest()[:16]

  first = digest()
  return {
    "number of examples": "stream" if is_stream else len(source),
    # A source may augment its examples at random.
    "first example": first if first == digest() else "random",
  }


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
