"""Workdirs: one program at a time writes in one, if it can be written."""

import os

from forked_programs import wait_until
import jax.numpy as jnp
import numpy as np
import pytest
import quadratic_states
import tiny

import flaxshard as fs
from flaxshard import train
from flaxshard.core import files

_HOLD = """
import sys, time
from flaxshard.core import files
releases = [files.lock("directory", path) for path in sys.argv[1:]]
print("locked", flush=True)
time.sleep(1000)
"""


def create(value):
  return quadratic_states.create(params={"w": jnp.full(3, value)})


@pytest.mark.slow
def test_another_program_holds_the_lock(programs, tmp_path):
  path, workdir = tmp_path / "checkpoints", tmp_path / "workdir"
  workdir.mkdir()
  with fs.Checkpointer(path) as checkpointer:
    checkpointer.save(1, create(1.0))
  with fs.Checkpointer(path) as checkpointer:
    holder = programs.start(tmp_path, str(path), str(workdir), script=_HOLD)
    wait_until(lambda: holder.printed == "locked\n", "lock", holder)
    by_holder = f"is being written by process {holder.pid} on "
    with pytest.raises(ValueError, match=f"directory='{path}' {by_holder}"):
      checkpointer.save(2, create(2.0))
    assert list(checkpointer.all_steps()) == [1]
    # Reading needs no lock.
    w = checkpointer.restore(create(0.0)).params["w"]
    np.testing.assert_array_equal(w, np.ones(3, np.float32))
    with pytest.raises(ValueError, match=f"workdir=.* process {holder.pid} "):
      train.train_and_evaluate(tiny.config(), str(workdir))
    assert os.listdir(workdir) == [".lock"]
    holder.kill()
    # The file of a killed process is left, and locks nothing.
    assert (path / ".lock").exists()
    assert checkpointer.save(2, create(2.0))
  assert sorted(os.listdir(path)) == ["1", "2"]


def test_file_keeps_the_old_content_after_an_error(tmp_path):
  path = tmp_path / "file"
  files.write_text(path, "old")
  (tmp_path / "file.tmp").mkdir()
  with pytest.raises(OSError):
    files.write_text(path, "new")
  assert path.read_text() == "old"
