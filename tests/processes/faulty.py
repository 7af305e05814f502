"""A config whose run fails where the variable FAULT says.

FAULT is a JSON object:

  process  the index of the process that fails
  place    "training", "evaluation", "save", "data" or "load"
  kind     "kill", "freeze", "terminate", "interrupt", "interrupt thrice",
           "exception", "exit" or "nan"

The fault writes a line `FAULT at <seconds since the epoch>` to standard error.
"""

import json
import os
import signal
import sys
import threading
import time

import numpy as np
import tiny

from flaxshard import data
from flaxshard.checkpoint import digests
from flaxshard.core import multihost
from flaxshard.train import preemption

# Steps of one process before it fails in training.
_STEPS = 6

_FAULT = json.loads(os.environ.get("FAULT", "{}"))
_SIGNALS = {"terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
_lock = threading.Lock()


def get_config():
  return tiny.config(
    data={"name": "faulty:load"},
    num_train_steps=80,
    log_every_steps=4,
    checkpoint_every_steps=4,
    eval_every_steps=8,
    precision="float32",
  )


def load():
  """Returns random digits, and prepares the fault."""
  _prepare()
  _fail_in("load")
  rng = np.random.default_rng(0)

  def arrays(count):
    inputs = rng.normal(size=(count, 8, 8, 1)).astype(np.float32)
    return inputs, rng.integers(10, size=count).astype(np.int32)

  return data.Splits(
    train=_Source("data", *arrays(256)),
    eval=_Source("evaluation", *arrays(32)),
    num_classes=10,
  )


class _Source(data.Arrays):
  """Arrays that fail when an example after the first one is read.

  Those of the kind "nan" are NaN instead.
  """

  def __init__(self, place, inputs, labels):
    super().__init__(inputs, labels)
    object.__setattr__(self, "place", place)

  def __getitem__(self, index):
    if index > 0:
      _fail_in(self.place)
    example = super().__getitem__(index)
    is_here = _FAULT.get("process") == multihost.process_index()
    is_nan = _FAULT.get("kind") == "nan" and self.place == _FAULT["place"]
    if is_here and is_nan and index > 0:
      example["inputs"] = np.full_like(example["inputs"], np.nan)
    return example


def _prepare():
  steps = []
  agree = preemption.agree_on_signal
  take = digests.take

  def agree_on_signal(step, request):
    steps.append(step)
    if len(steps) == _STEPS:
      _fail_in("training")
    if len(steps) >= _STEPS and _FAULT.get("kind") in _SIGNALS:
      # JAX looks for signals once a second: few steps until then.
      time.sleep(1.0)
    return agree(step, request)

  def take_digests(paths, read):
    # Not when a checkpoint is read.
    if any(".orbax-checkpoint-tmp" in path for path in paths.values()):
      # The first save succeeds.
      if len(steps) > 5:
        _fail_in("save")
    return take(paths, read)

  preemption.agree_on_signal = agree_on_signal
  digests.take = take_digests


def _fail_in(place):
  if _FAULT.get("place") != place:
    return
  if _FAULT["process"] != multihost.process_index():
    return
  kind = _FAULT["kind"]
  # Threads read the examples: one must not kill while another one prints.
  with _lock:
    if not _FAULT.get("done"):
      _FAULT["done"] = True
      print(f"FAULT at {time.time()}", file=sys.stderr, flush=True)
      if kind in ("terminate", "interrupt"):
        os.kill(os.getpid(), _SIGNALS[kind])
  if kind == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
  if kind == "freeze":
    os.kill(os.getpid(), signal.SIGSTOP)
  if kind == "interrupt thrice":
    for _ in range(3):
      os.kill(os.getpid(), signal.SIGINT)
      # Signals within a second are one request.
      time.sleep(1.2)
  if kind == "exit":
    sys.exit(0)
  if kind == "exception":
    raise KeyError("an injected error")
