"""Custom tasks in two processes."""

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
sys.path.insert(0, sys.argv[3])
import small_tasks
from flaxshard import train
from flaxshard.train import charts

charts.plot = lambda *args: None
for name in ("Regression", "Rollouts"):
  task = getattr(small_tasks, name)()
  for steps in (4, 8):
    fields = dict(num_train_steps=steps, resume="extend", mesh={})
    workdir = os.path.join(sys.argv[4], name)
    train.train_and_evaluate(small_tasks.config(**fields), workdir, task)
"""


def test_tasks_train_as_in_one_process(tmp_path):
  two_processes.run(_TRAIN, _TESTS, str(tmp_path / "two"), devices=1)
  for name in ("Regression", "Rollouts"):
    task = getattr(small_tasks, name)()
    with tiny.importable("process_tasks", __name__):
      for steps in (4, 8):
        fields = dict(
          num_train_steps=steps, resume="extend", mesh={"replica": 2}
        )
        workdir = str(tmp_path / "one" / name)
        train.train_and_evaluate(small_tasks.config(**fields), workdir, task)
    one, two = (
      tiny.untimed_rows(tmp_path / kind / name) for kind in ("one", "two")
    )
    assert [row["step"] for row in two] == [4, 8]
    for a, b in zip(one, two, strict=True):
      assert a.keys() == b.keys()
      np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=1e-4)
