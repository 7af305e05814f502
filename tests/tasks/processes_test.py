"""Custom tasks in two processes."""

import numpy as np
import pytest
import small_tasks
import tiny
import two_processes

from flaxshard import train
from flaxshard.train.config import files

pytestmark = pytest.mark.slow

_TRAIN = """
from tasks import processes_test
from flaxshard.train import report

report.draw = lambda *args: None
processes_test.train_tasks(sys.argv[3])
"""


class Collecting(small_tasks.Streamed):
  """Collects rows in its evaluation, and checks them."""

  traces = 0

  def evaluate(self, evaluation):
    traces = self.traces
    for _ in range(2):
      rows = evaluation.collect(self._predict)
    assert self.traces <= traces + 1
    for key in ("x", "target"):
      expected = [e[key] for e in self.load_data().eval]
      np.testing.assert_array_equal(rows[key], np.stack(expected))
    distances = np.linalg.norm(rows["outputs"] - rows["target"], axis=-1)
    values = super().evaluate(evaluation)
    np.testing.assert_allclose(distances.mean(), values["distance"], rtol=1e-5)
    return values

  def _predict(self, apply_fn, params, batch):
    self.traces += 1
    outputs, _ = apply_fn(params, batch["x"], batch["scale"])
    return {**batch, "outputs": outputs}


def train_tasks(workdir):
  """Trains on a stream, and resumes; on rollouts, once per replica."""
  fields = {"mesh": {"replica": 2}, "resume": "extend"}
  best = {"best_metric": "eval_largest", "best_mode": "max"}
  for steps in (4, 8):
    config = small_tasks.config(num_train_steps=steps, **fields, **best)
    train.train_and_evaluate(config, f"{workdir}/stream", Collecting())
  config = small_tasks.config(
    num_train_steps=4, mesh={"replica": 2, "per_replica": True}
  )
  train.train_and_evaluate(
    config, f"{workdir}/rollouts", small_tasks.Rollouts()
  )
  # Its evaluation collects images, and draws others.
  config = files.read("ddpm")
  config.task.update({"num_steps": 4, "num_samples": 20})
  config.update({"model": {"width": 16, "depth": 1}, "batch_size": 128})
  config.update({"writer": "none", "num_train_steps": 2, **fields})
  train.train_and_evaluate(config, f"{workdir}/ddpm")


def test_tasks_train_as_in_one_process(programs, tmp_path):
  two_processes.run(programs, _TRAIN, str(tmp_path / "two"), devices=1)
  with tiny.importable("process_tasks", __name__):
    train_tasks(str(tmp_path / "one"))
  for name, metric, steps in (
    ("stream", "eval_largest", [4, 8]),
    ("rollouts", "train_loss", [4]),
    ("ddpm", "eval_recall", [2]),
  ):
    one, two = (
      tiny.untimed_rows(tmp_path / kind / name) for kind in ("one", "two")
    )
    assert [row["step"] for row in two] == steps
    for a, b in zip(one, two, strict=True):
      assert a.keys() == b.keys() and metric in a
      np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=1e-4)
