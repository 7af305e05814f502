"""Hooks and early stopping in two processes."""

import os

import pytest
import tiny

pytestmark = pytest.mark.slow

_MODULES = {
  "my_hooks.py": """
import os
import jax
import numpy as np
from jax.experimental import multihost_utils


class Gather:
  def __init__(self, workdir):
    self.workdir = workdir

  def __call__(self, step, state, metrics):
    values = np.array([step, metrics.get("eval_loss", -1)])
    both = multihost_utils.process_allgather(values)
    name = f"steps_{jax.process_index()}.txt"
    with open(os.path.join(self.workdir, name), "a") as f:
      f.write(f"{step} {bool((both[0] == both[1]).all())}\\n")


def fail_in_one(step, state, metrics):
  if step == 6 and jax.process_index() == 1:
    raise KeyError("a mistake of the user")
""",
  "my_config.py": """
import flaxshard as fs

def get_config():
  config = fs.config.read("digits")
  config.model = {"name": "cnn", "features": (), "dense": 8}
  config.batch_size = 16
  config.num_train_steps = 20
  config.schedule = {"name": "constant"}
  config.log_every_steps = 4
  config.eval_every_steps = 2
  config.mesh.virtual_devices = 2
  config.early_stopping = {
    "metric": "eval_loss", "patience": 1, "min_delta": 100.0
  }
  config.hooks = ("my_hooks:Gather", "my_hooks:fail_in_one")
  config.writer = "none"
  return config
""",
}


def test_all_processes_stop_at_one_step_and_end_when_a_hook_raises(
  programs, tmp_path
):
  """A hook may use collectives; another one raises in process 1 alone."""
  for name, text in _MODULES.items():
    (tmp_path / name).write_text(text)
  workdir = tmp_path / "run"
  arguments = "--config=my_config.py", "--workdir=run", "--local_processes=2"
  output = programs.start(tmp_path, *arguments).end(code=1)
  # The third evaluation ends the run in both processes.
  for index in (0, 1):
    lines = (workdir / f"steps_{index}.txt").read_text().splitlines()
    assert lines == ["2 True", "4 True", "6 True"], lines
  assert [row["step"] for row in tiny.rows(workdir)] == [2, 4, 6]
  assert "6" in os.listdir(workdir / "checkpoints")
  for fact in ("my_hooks:fail_in_one", "step 6", "a mistake of the user"):
    assert fact in output
  assert "process 1" in output  # process 0 says whose error it is
