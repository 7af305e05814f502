"""A killed training run ends like an uninterrupted one, bit for bit."""

import os

import forked_programs
from forked_programs import wait_until
import jax
import pytest
import tiny
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard.checkpoint import step_files

# Each step is saved, so that the kill interrupts a save.
_ARGUMENTS = (
  "--config=digits",
  "--config.model={'name': 'cnn', 'features': (), 'dense': 8}",
  "--config.batch_size=16",
  "--config.num_train_steps=8",
  "--config.log_every_steps=1",
  "--config.checkpoint_every_steps=1",
  "--config.max_to_keep=3",
  "--config.schedule=constant",
  "--config.writer=none",
)


def saved_steps(workdir) -> list[int]:
  path = workdir / "checkpoints"
  names = os.listdir(path) if path.exists() else []
  return sorted(int(name) for name in names if name.isdecimal())


@pytest.mark.slow
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path):
  killed = tmp_path / "killed"
  with forked_programs.Programs() as programs:

    def start(name):
      return programs.start(tmp_path, *_ARGUMENTS, f"--workdir={name}")

    program = start("killed")
    reached = lambda: max(saved_steps(killed), default=0) >= 3
    wait_until(reached, "step 3", program)
    program.kill()
    # The newest three are kept; an older one may be half deleted.
    for step in saved_steps(killed)[-3:]:
      assert step_files.verify(str(killed / "checkpoints" / str(step)))
    for program in (start("whole"), start("killed")):
      program.end()
  states = (fs.load(tmp_path / name).state for name in ("killed", "whole"))
  assert_trees_equal(*map(jax.tree.leaves, states))
  assert tiny.untimed_rows(killed) == tiny.untimed_rows(tmp_path / "whole")
  rows = tiny.rows(tmp_path / "whole")
  assert [row["step"] for row in rows] == list(range(1, 9))
