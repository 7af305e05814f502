"""The data and the model of `links.py`: those of a config, as arrays."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import ml_collections
import numpy as np

import flaxshard as fs
from flaxshard import data as data_lib
from flaxshard import models
from flaxshard.core.policy import Policy
from flaxshard.tasks import load as load_lib

# All held-out digits, and so many held-out windows of text.
_EVAL_EXAMPLES = 512


@dataclasses.dataclass(frozen=True)
class Data:
  """Batches of a whole run, and what to evaluate on.

  Attributes:
    model: The model of the config.
    inputs: `[steps, batch, ...]`.
    labels: `[steps, batch, ...]`.
    eval_inputs: `[examples, ...]`.
    eval_labels: `[examples, ...]`.
  """

  model: Any
  inputs: np.ndarray
  labels: np.ndarray
  eval_inputs: np.ndarray
  eval_labels: np.ndarray

  def rows(self, step: int, rank: int, processes: int) -> dict[str, np.ndarray]:
    """Returns the rows of a process in the batch of a step, from 1."""
    size = self.inputs.shape[1] // processes
    rows = slice(rank * size, (rank + 1) * size)
    return {
      "inputs": self.inputs[step - 1, rows],
      "labels": self.labels[step - 1, rows],
    }


def read_config(task: str) -> ml_collections.ConfigDict:
  """Returns the config of a task."""
  return fs.config.check(fs.config.read(task))


def write(task: str, folder: str, steps: int) -> None:
  """Writes the batches of `steps` steps to a folder."""
  config = read_config(task)
  loaded = load_lib.load(config)
  batches = data_lib.train_iterator(
    loaded.splits,
    seed=config.seed,
    collate=loaded.task.collate,
    batch_size=config.batch_size,
  )
  taken = [batch for batch, _ in zip(batches, range(steps), strict=False)]
  held_out = loaded.splits.eval
  count = min(len(held_out), _EVAL_EXAMPLES)
  # Evenly over all of them.
  chosen = np.linspace(0, len(held_out) - 1, count).astype(int)
  examples = loaded.task.collate([held_out[int(i)] for i in chosen])
  np.savez(
    os.path.join(folder, "data.npz"),
    inputs=np.stack([batch["inputs"] for batch in taken]),
    labels=np.stack([batch["labels"] for batch in taken]),
    eval_inputs=examples["inputs"],
    eval_labels=examples["labels"],
    num_classes=loaded.num_classes,
  )


def load(task: str, folder: str) -> Data:
  """Returns what `write` has written, and the model."""
  with np.load(os.path.join(folder, "data.npz")) as arrays:
    values = dict(arrays)
  model = models.create(
    read_config(task).model,
    num_classes=int(values.pop("num_classes")),
    policy=Policy("float32"),
  )
  return Data(model=model, **values)


if __name__ == "__main__":
  write(sys.argv[1], sys.argv[2], int(sys.argv[3]))
