"""Custom tasks in two processes."""

import os
import pathlib

import numpy as np
import pytest
import small_tasks
import tiny
import two_processes

from flaxshard import train

pytestmark = pytest.mark.slow

_TESTS = str(pathlib.Path(__file__).parents[1])

_TRAIN = """
sys.path[:0] = [sys.argv[3], sys.argv[3] + "/tasks"]
import processes_test
from flaxshard.train import charts

charts.plot = lambda *args: None
processes_test.train_tasks(sys.argv[4])
"""


def train_tasks(workdir):
  """Trains on a stream, and resumes; on rollouts, once per replica."""
  for name in ("Streamed", "Rollouts"):
    task = getattr(small_tasks, name)()
    per_replica = name == "Rollouts"
    for steps in (4,) if per_replica else (4, 8):
      config = small_tasks.config(
        num_train_steps=steps,
        resume="extend",
        mesh={"replica": 2, "per_replica": per_replica},
        best_metric="none" if per_replica else "eval_largest",
        best_mode="auto" if per_replica else "max",
      )
      train.train_and_evaluate(config, os.path.join(workdir, name), task)


def test_tasks_train_as_in_one_process(tmp_path):
  two_processes.run(_TRAIN, _TESTS, str(tmp_path / "two"), devices=1)
  with tiny.importable("process_tasks", __name__):
    train_tasks(str(tmp_path / "one"))
  for name, metric, steps in (
    ("Streamed", "eval_largest", [4, 8]),
    ("Rollouts", "train_loss", [4]),
  ):
    one, two = (
      tiny.untimed_rows(tmp_path / kind / name) for kind in ("one", "two")
    )
    assert [row["step"] for row in two] == steps
    for a, b in zip(one, two, strict=True):
      assert a.keys() == b.keys() and metric in a
      np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=1e-4)
