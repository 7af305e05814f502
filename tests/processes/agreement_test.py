"""Processes that disagree raise the same error before the first step."""

import pathlib

import pytest
import two_processes

# In each case process 1 differs.
_SCRIPT = """
import importlib.metadata
import os, pathlib, sys, time, types
sys.path[:0] = [sys.argv[3], os.path.dirname(sys.argv[3])]
import numpy as np
import small_tasks, tiny
from flaxshard import data, train
from flaxshard.train import same_run

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

check(["config.learning_rate: 0.05 in process 0 (h", "0.01 in process 1 (h"],
      learning_rate=(0.05, 0.01)[rank])

version = importlib.metadata.version
importlib.metadata.version = lambda name: (
  "9.8.7" if rank and name == "optax" else version(name))
check(["version of.optax: ", "'9.8.7' in process 1"])
importlib.metadata.version = version

def load():
  inputs = np.random.default_rng(rank).normal(size=(64, 8, 8, 1))
  arrays = data.Arrays(inputs.astype("f"), np.arange(64, dtype="i") % 10)
  return data.Splits(train=arrays, eval=arrays, num_classes=10)

sys.modules["of_rank"] = types.SimpleNamespace(load=load)
check(["the data.train.first example"], data={"name": "of_rank:load"})

stream = data.Splits(small_tasks.Forever([{"x": float(rank)}]))
lowered = jax.jit(lambda x: x).lower(1.0)
setup = types.SimpleNamespace(splits=stream, lowered_train_step=lowered)
try:
  same_run.check_setup(setup)
except ValueError as e:
  assert "the data.train.first example" in str(e)
else:
  raise AssertionError

with jax.default_matmul_precision("highest" if rank else "default"):
  check(["the traced train step"], precision="float32")

# A file of process 0 is not visible.
same_run._VISIBLE_SECONDS = 1.0
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
