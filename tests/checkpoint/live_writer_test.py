"""Reading a directory in which another program saves and deletes steps."""

import pathlib
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.checkpoint import __main__ as inspection
from flaxshard.checkpoint import reader


def create(value=0.0):
  return fs.TrainState.create(
    apply_fn=None, params={"w": jnp.full(3, float(value))}, tx=optax.sgd(0.1)
  )


def restore_by_checkpointer(path):
  with fs.Checkpointer(path) as checkpointer:
    return checkpointer.restore(create())


READERS = [
  restore_by_checkpointer,
  lambda path: fs.checkpoint.restore(path, create()),
]


@pytest.fixture
def path(tmp_path):
  with fs.Checkpointer(tmp_path / "checkpoints") as checkpointer:
    for step in (1, 2, 3):
      checkpointer.save(step, create(step), metrics={"loss": 0.5})
  return tmp_path / "checkpoints"


@pytest.mark.parametrize("restore", READERS)
@pytest.mark.parametrize("deleted", ["3", "3/default/_METADATA"])
def test_step_deleted_while_it_is_read_gives_way_to_a_newer_one(
  path, restore, deleted, monkeypatch
):
  # The program that saves has reached step 3 and deletes step 2.
  shutil.move(path / "3", path.parent / "next")
  original = reader.open_unverified

  def open_unverified(where, item=None):
    step_dir = path / "2"
    if pathlib.Path(where) == step_dir and not (path / "3").exists():
      shutil.move(path.parent / "next", path / "3")
      target = path / deleted.replace("3", "2", 1)
      if target.is_dir():
        shutil.rmtree(target)
      else:
        target.unlink()
    return original(where, item)

  monkeypatch.setattr(reader, "open_unverified", open_unverified)
  restored = restore(path)
  np.testing.assert_array_equal(restored.params["w"], np.full(3, 3.0))


_WRITER = """
import sys
import jax.numpy as jnp, optax
import flaxshard as fs
with fs.Checkpointer(sys.argv[1], max_to_keep=2) as checkpointer:
  for step in range(1, 60):
    state = fs.TrainState.create(
      apply_fn=None, params={"w": jnp.full(3, step)}, tx=optax.set_to_zero())
    checkpointer.save(step, state, metrics={"loss": 1 / step})
print(step)
"""


@pytest.mark.slow
def test_reading_beside_a_program_that_saves(tmp_path, capsys):
  path = tmp_path / "checkpoints"
  state = create().replace(params={"w": jnp.zeros(3, jnp.int32)})
  reading = fs.Checkpointer(path)
  with subprocess.Popen(
    [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE
  ) as writer:
    last = 0
    while writer.poll() is None:
      if reading.latest_step() is None:
        continue
      for restore in (
        lambda: fs.checkpoint.restore(path, state),
        lambda: reading.restore(state),
      ):
        step = int(restore().params["w"][0])
        assert step >= last
        last = step
      assert inspection.main([str(path)]) == 0
    assert writer.returncode == 0
  assert last > 2
