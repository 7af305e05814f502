"""Errors of one process that all of a program's processes raise."""

import subprocess
import sys

import pytest
import two_processes

from flaxshard.core import multihost


def test_one_process_has_its_own_error():
  with multihost.raise_on_all_processes(ValueError):
    pass
  error = KeyError("mine")
  with (
    pytest.raises(KeyError) as e,
    multihost.raise_on_all_processes(ValueError),
  ):
    raise error
  assert e.value is error


SCRIPT = """
import os
import jax.numpy as jnp
import optax
import flaxshard as fs
from flaxshard.core import multihost

def raised(error, *kinds):
  # The error that this process gets where only process 1 has one.
  try:
    with multihost.raise_on_all_processes(*kinds):
      if error is not None and rank == 1:
        raise error
  except Exception as e:
    return f"{type(e).__name__}: {e}"
  return None

assert raised(None) is None
mine = [raised(ValueError("ä" * 3000), KeyError, ValueError)]
mine.append(raised(OSError("full"), KeyError, ValueError))
if rank == 0:
  assert mine[0].startswith("ValueError: process 1: ää"), mine[0]
  assert 1000 < len(mine[0]) < 1100
  assert mine[1] == "RuntimeError: process 1: full", mine[1]
else:
  assert mine == ["ValueError: " + "ä" * 3000, "OSError: full"], mine

# Only process 0 takes the lock, which another program has.
def refused(call):
  try:
    call()
  except Exception as e:
    return f"{type(e).__name__}: {e}"

other = "process 0: " if rank == 1 else ""
state = fs.TrainState.create(
  apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
with fs.Checkpointer(sys.argv[3]) as checkpointer:
  told = refused(lambda: checkpointer.save(1, state))
  wanted = f"ValueError: {other}directory='{sys.argv[3]}' is being written by"
  assert told.startswith(wanted), told

  # An iterator that one process cannot ask where it stands.
  class Data:
    def get_state(self):
      return {1} if rank == 1 else {"next": 1}

    def set_state(self, state):
      pass

  told = refused(lambda: checkpointer.save(1, state, data=Data()))
  # Process 0 cannot have the lock either, and says so.
  kind = {0: "ValueError: directory=", 1: "TypeError: data.get_state() must be"}
  assert told.startswith(kind[rank]), told
assert sorted(os.listdir(sys.argv[3])) == [".lock"]
print("same")
"""

HOLDER = """
import sys
from flaxshard.core import lock
lock.acquire("directory", sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""


def test_two_processes_raise_what_one_finds(tmp_path):
  holder = subprocess.Popen(
    [sys.executable, "-c", HOLDER, str(tmp_path)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  with holder:
    assert holder.stdout.readline() == "locked\n"
    outs = two_processes.run(SCRIPT, str(tmp_path))
    holder.kill()
  for out, _ in outs:
    assert out.splitlines()[-1] == "same"
