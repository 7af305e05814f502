"""A training config that runs in a second, and helpers for its runs."""

from collections.abc import Callable, Iterator
import contextlib
import gc
import signal
import sys

import jax
import ml_collections
import pytest

from flaxshard import checkpoint
from flaxshard.train import config as config_lib
from flaxshard.train import devices
from flaxshard.train import endings
from flaxshard.train import report
from flaxshard.train import setup as setup_lib


def config(**fields) -> ml_collections.ConfigDict:
  """Returns a config of eight steps on the digits.

  Args:
    **fields: Fields that replace or extend the default ones.
  """
  values = dict(
    # No convolution: it would take a fifth of the time of a run to compile.
    model={"name": "cnn", "features": (), "dense": 8},
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


def setup(config, task=None) -> setup_lib.Setup:
  """Returns what a run of a config needs, with its train step traced."""
  checked = config_lib.check(config, task)
  made = setup_lib.Setup(checked, devices.create_strategy(checked), task)
  made.trace()
  return made


@contextlib.contextmanager
def importable(name: str, module: str) -> Iterator[None]:
  """Lets configs name what a test file defines; draws no plots.

  Args:
    name: The name by which configs import the file.
    module: The `__name__` of the file.
  """
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, name, sys.modules[module])
    patch.setattr(report, "draw", lambda *args: None)
    yield


def rows(workdir) -> list[dict]:
  """Returns the rows of a run's `metrics.jsonl`."""
  return report.read_rows(str(workdir))


def untimed_rows(workdir) -> list[dict]:
  """Returns the rows without `steps_per_second`, which differs in every run."""
  return [
    {k: v for k, v in row.items() if k != "steps_per_second"}
    for row in rows(workdir)
  ]


@contextlib.contextmanager
def stopped_while(
  condition: Callable[[], bool], signum: int = signal.SIGTERM
) -> Iterator[None]:
  """Makes runs in the block receive a signal, without sending one.

  Args:
    condition: Called once per step, or more often: whether it has come.
    signum: The number of the signal.
  """

  class Request(endings.StopRequest):
    def __init__(self):
      pass

    @property
    def signum(self):
      return signum if condition() else None

    @contextlib.contextmanager
    def saving(self):
      yield

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      endings, "StopRequest", lambda: contextlib.nullcontext(Request())
    )
    yield


def count_at_restore(monkeypatch, shape) -> list[int]:
  """Returns a list that gets the number of new arrays when a run restores.

  Args:
    monkeypatch: The fixture of pytest.
    shape: That of the arrays that count, if they are made from now on.
  """
  counts = []
  restore = checkpoint.Checkpointer.restore
  gc.freeze()  # to collect new objects only, which is quick
  earlier = {id(x): x for x in jax.live_arrays()}

  def count_and_restore(self, state, **kwargs):
    leaves = jax.tree.leaves(state)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    gc.collect()
    new = (x for x in jax.live_arrays() if id(x) not in earlier)
    counts.append(sum(x.shape == shape for x in new))
    return restore(self, state, **kwargs)

  monkeypatch.setattr(checkpoint.Checkpointer, "restore", count_and_restore)
  return counts
