"""A config whose run fails where the variable FAULT says.

FAULT is a JSON object:

  process  the index of the process that fails
  place    "save" (while a checkpoint is written) or "data"
  kind     "kill", "interrupt" or "exception"
  workdir  the folder of the run

"""

import json
import os
import pathlib
import signal
import threading
import time

import numpy as np
import tiny

from flaxshard import data
from flaxshard.core import multihost

_FAULT = json.loads(os.environ.get("FAULT", "{}"))
_SIGNALS = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}
_rows = []


def get_config():
  return tiny.config(
    data={"name": "faulty:load"},
    hooks=("faulty:after_row",),
    num_train_steps=80,
    log_every_steps=4,
    checkpoint_every_steps=4,
    eval_every_steps=8,
    precision="float32",
  )


def load():
  """Returns random digits."""
  rng = np.random.default_rng(0)

  def arrays(count):
    inputs = rng.normal(size=(count, 8, 8, 1)).astype(np.float32)
    return inputs, rng.integers(10, size=count).astype(np.int32)

  return data.Splits(
    train=_Source(*arrays(256)),
    eval=data.Arrays(*arrays(32)),
    num_classes=10,
  )


class _Source(data.Arrays):
  """Arrays that may fail when an example after the first one is read."""

  def __getitem__(self, index):
    if index > 0:
      _fail_in("data")
    return super().__getitem__(index)


def after_row(step, state, metrics):
  """Begins to look for saves at the second row: a checkpoint exists."""
  del step, state, metrics
  _rows.append(None)
  if len(_rows) == 2:
    threading.Thread(target=_fail_in_save, daemon=True).start()
  if len(_rows) >= 2 and _FAULT.get("kind") == "interrupt":
    # JAX looks for signals once a second: few steps until then.
    time.sleep(1.0)


def _fail_in_save():
  checkpoints = pathlib.Path(_FAULT.get("workdir", ""), "checkpoints")
  while not list(checkpoints.glob("*.orbax-checkpoint-tmp*")):
    time.sleep(0.001)
  _fail_in("save")


def _fail_in(place):
  if _FAULT.get("place") != place:
    return
  if _FAULT["process"] != multihost.process_index():
    return
  # Threads read the examples: one fault each.
  if _FAULT["kind"] == "exception":
    raise KeyError("an injected error")
  del _FAULT["place"]
  os.kill(os.getpid(), _SIGNALS[_FAULT["kind"]])
