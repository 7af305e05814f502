"""A config whose run gets a signal while it writes a checkpoint.

The variable FAULT has the process, the number of the signal and the workdir.
"""

import os
import pathlib
import signal
import threading
import time

import tiny

from flaxshard.core import multihost

_FAULT = os.environ.get("FAULT", "").split()
_rows = []


def get_config():
  return tiny.config(
    hooks=("faulty:after_row",),
    num_train_steps=60,
    log_every_steps=4,
    checkpoint_every_steps=4,
    eval_every_steps=12,
    precision="float32",
  )


def after_row(step, state, metrics):
  """Begins to look for saves at the second row: a checkpoint exists."""
  _rows.append(step)
  if not _FAULT or len(_rows) < 2:
    return
  process, signum, workdir = int(_FAULT[0]), int(_FAULT[1]), _FAULT[2]
  if len(_rows) == 2 and multihost.process_index() == process:
    arguments = signum, pathlib.Path(workdir, "checkpoints")
    threading.Thread(target=_fail, args=arguments, daemon=True).start()
  if signum == signal.SIGINT:
    # JAX looks for signals once a second: few steps until then.
    time.sleep(1.0)


def _fail(signum, checkpoints):
  while not list(checkpoints.glob("*.orbax-checkpoint-tmp*")):
    time.sleep(0.001)
  os.kill(os.getpid(), signum)
