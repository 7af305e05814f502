"""A config that trains in a second, for the tests that need one."""

import os

import ml_collections

from flaxshard.train import metrics as metrics_lib
from flaxshard.train import preemption


def config(**fields) -> ml_collections.ConfigDict:
  """Eight steps on the digits; `fields` replace those here."""
  values = dict(
    model={"name": "cnn", "features": (4,), "dense": 8},
    data={"name": "digits"},
    batch_size=16,
    num_train_steps=8,
    learning_rate=1e-2,
    seed=0,
    wrappers=(("loss_scale", {"scale": "dynamic"}),),
    mesh={"replica": -1},
    precision="mixed_float16",
    log_every_steps=2,
    eval_every_steps=4,
    checkpoint_every_steps=4,
    on_nonfinite="stop",
    writer="none",
  )
  return ml_collections.ConfigDict({**values, **fields})


def rows(workdir) -> list[dict]:
  """Returns what a run has written to `metrics.jsonl`."""
  return metrics_lib.read_rows(os.path.join(workdir, "metrics.jsonl"))


def untimed_rows(workdir) -> list[dict]:
  """Returns the rows, but for what the clock says."""
  return [
    {k: v for k, v in row.items() if k != "steps_per_second"}
    for row in rows(workdir)
  ]


def stop_at(monkeypatch, stop_step: int, signum: int) -> None:
  """Lets the loop see a signal at a step, without one being sent."""
  calls = []

  def came():
    calls.append(1)
    return signum if len(calls) >= stop_step else None

  class Caught:
    def __enter__(self):
      return came

    def __exit__(self, *args):
      return None

  monkeypatch.setattr(preemption, "catch_signals", Caught)
