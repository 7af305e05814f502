"""Processes that disagree raise the same error before the first step."""

import pathlib

from flax import linen as nn
import numpy as np
import pytest
import two_processes

from flaxshard import data


def load(seed):
  rng = np.random.default_rng(seed)
  inputs = rng.normal(size=(64, 8, 8, 1)).astype(np.float32)
  arrays = data.Arrays(inputs, np.arange(64, dtype=np.int32) % 10)
  return data.Splits(train=arrays, eval=arrays, num_classes=10)


class Dense(nn.Module):
  num_classes: int
  policy: object

  @nn.compact
  def __call__(self, x, train=False):
    del train
    return nn.Dense(self.num_classes)(x.reshape(len(x), -1)) * factor


# The script sets another one in each process.
factor = 1.0


# In each case process 1 differs.
_SCRIPT = """
import importlib.metadata
import os, pathlib, shutil, time, types
sys.path[:0] = [sys.argv[3], os.path.dirname(sys.argv[3])]
import small_tasks, tiny
from flaxshard import data, models, train
from flaxshard.train import same_run
from processes import agreement_test

path = pathlib.Path(sys.argv[4])

def check(words, workdir="run", **fields):
  config = tiny.config(num_train_steps=2, eval_every_steps=2, **fields)
  start = time.monotonic()
  try:
    train.train_and_evaluate(config, str(path / workdir))
  except ValueError as e:
    message = str(e)
  else:
    message = "no error"
  assert all(word in message for word in words), message
  assert time.monotonic() - start < 60
  return message

check(["config.learning_rate: 0.05 in process 0 (h", "0.01 in process 1 (h"],
      learning_rate=(0.05, 0.01)[rank])

version = importlib.metadata.version
importlib.metadata.version = lambda name: (
  "9.8.7" if rank and name == "optax" else version(name))
check(["version of.optax: ", "'9.8.7' in process 1"])
importlib.metadata.version = version

def fails(call, *words):
  try:
    call()
  except ValueError as e:
    assert all(word in str(e) for word in words), e
  else:
    raise AssertionError(words)

lowered = jax.jit(lambda x: x).lower(1.0)
agreement_test.rank_load = lambda: agreement_test.load(rank)
check(["the data.train.first example"],
      data={"name": "processes.agreement_test:rank_load"})

stream = data.Splits(small_tasks.Forever([{"x": float(rank)}]))
setup = types.SimpleNamespace(splits=stream, lowered_train_step=lowered)
fails(lambda: same_run.check_setup(setup),
      "the data.train.first example")

agreement_test.factor = 1.0 + rank
check(["the traced train step"], precision="float32",
      model={"name": "processes.agreement_test:Dense"})

# A file of process 0 is not visible within ten seconds.
check(["is not the same directory for all", "process 1 does"], f"run_{rank}")
# Process 0 deletes its file before it raises; the other one may be sooner.
assert rank or not any(path.glob("run_*/.same*"))
check(["no error"])
print("checked")
"""


@pytest.mark.slow
def test_processes_that_disagree_raise_before_the_first_step(tmp_path):
  tests = str(pathlib.Path(__file__).parents[1])
  for out, err in two_processes.run(_SCRIPT, tests, str(tmp_path)):
    assert out.splitlines()[-1] == "checked", err
