"""Hooks: what names them, how they are called, and errors that they raise."""

import os

import pytest
import tiny

from flaxshard.train import config as config_lib
from flaxshard.train import hooks as hooks_lib

_THIS = __name__


def record(step, state, metrics, *, into="calls"):
  """Writes into the metrics, which are a copy."""
  metrics[into] = step


class Writer:
  """Appends the step to a file of the workdir."""

  def __init__(self, workdir, name="steps.txt"):
    self.path = os.path.join(workdir, name)

  def __call__(self, step, state, metrics):
    with open(self.path, "a") as f:
      f.write(f"{step} {metrics['loss']}\n")


def create(named, hooks=(), workdir="."):
  config = config_lib.check(tiny.config(hooks=named))
  return hooks_lib.create(config, hooks, workdir)


def test_hooks_are_called_in_order_with_copies_of_the_row(tmp_path):
  calls = []
  other_workdir = tmp_path / "other"
  other_workdir.mkdir()
  hooks = create(
    (
      {"name": f"{_THIS}:record", "into": "loss"},
      f"{_THIS}:Writer",
    ),
    [
      lambda step, state, metrics: calls.append((step, state, metrics)),
      Writer(str(other_workdir)).__call__,
    ],
    workdir=str(tmp_path),
  )
  row = {"loss": 2, "steps_per_second": None}
  hooks(7, "state", row)
  assert calls == [(7, "state", {"loss": 2.0})]
  assert row == {"loss": 2, "steps_per_second": None}
  for folder in (tmp_path, other_workdir):
    assert (folder / "steps.txt").read_text() == "7 2.0\n"


@pytest.mark.parametrize(
  ("named", "hooks", "facts"),
  [
    # The field, before anything is imported.
    ("my_package:log", (), ("config.hooks", "tuple", "'my_package:log'")),
    # What it names.
    (
      (f"{_THIS}:recrod",),
      (),
      ("config.hooks[0]", "Did you mean 'record'?"),
    ),
    (({"name": f"{_THIS}:Writer", "nam": 1},), (), ("hooks[0]", "'nam'")),
    ((), (Writer,), ("hooks[0]", "Writer")),
  ],
)
def test_a_hook_that_cannot_be_called_raises(named, hooks, facts):
  with pytest.raises((TypeError, ValueError)) as e:
    create(named, hooks)
  for fact in facts:
    assert fact in str(e.value), str(e.value)
