"""Errors of one process that all of a program's processes raise."""

import pytest
import two_processes

from flaxshard.core import files

SCRIPT = """
import os
import jax.numpy as jnp
import optax
import flaxshard as fs
from flaxshard.core import multihost

def error_of(call, *args):
  try:
    call(*args)
  except Exception as e:
    return f"{type(e).__name__}: {e}"

def fail_in_one(error, *kinds):
  with multihost.raise_on_all_processes(*kinds):
    if error is not None and rank == 1:
      raise error

assert error_of(fail_in_one, None) is None
errors = [error_of(fail_in_one, ValueError("ä" * 3000), KeyError, ValueError)]
errors.append(error_of(fail_in_one, OSError("full"), KeyError, ValueError))
if rank == 0:
  assert errors[0].startswith("ValueError: process 1: ää"), errors[0]
  assert 2000 < len(errors[0]) < 2100
  assert errors[1] == "RuntimeError: process 1: full", errors[1]
else:
  assert errors == ["ValueError: " + "ä" * 3000, "OSError: full"], errors

# Only process 0 locks the directory; another program holds the lock.
other = "process 0: " if rank == 1 else ""
state = fs.TrainState.create(
  apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
with fs.Checkpointer(sys.argv[3]) as checkpointer:
  message = error_of(checkpointer.save, 1, state)
  wanted = f"ValueError: {other}directory='{sys.argv[3]}' is being written by"
  assert message.startswith(wanted), message

  # An iterator with an invalid position in process 1.
  class Data:
    def get_state(self):
      return {1} if rank == 1 else {"next": 1}

    def set_state(self, state):
      pass

  message = error_of(lambda: checkpointer.save(1, state, data=Data()))
  # Found before process 0 locks the directory.
  other = "process 1: " if rank == 0 else ""
  assert f"TypeError: {other}data.get_state(): Object of " in message, message
assert sorted(os.listdir(sys.argv[3])) == [".lock"]
print("same")
"""


@pytest.mark.slow
def test_both_processes_raise_the_error_of_one(programs, tmp_path):
  release = files.lock("directory", tmp_path)
  outs = two_processes.run(programs, SCRIPT, str(tmp_path))
  release()
  assert all("same" in out.splitlines() for out in outs)
