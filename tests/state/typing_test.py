"""A type checker accepts the fields of train states in a user's code."""

import os
import pathlib
import subprocess
import sys

import pytest

CODE = """
from typing import Any
import jax
import flaxshard as fs

class MyState(fs.TrainState):
  key: jax.Array
  ema: Any = None

def mine(state: MyState, grads: Any) -> MyState:
  key: jax.Array = state.key
  state = state.apply_gradients(grads=grads, batch_stats=state.batch_stats)
  state, loss = state.minimize(lambda params: params["w"])
  return state.replace(key=key, ema=state.ema)

def plain(state: fs.TrainState) -> Any:
  return state.batch_stats["mean"]

def created(tx: Any) -> MyState:
  return MyState.create(apply_fn=None, params={}, tx=tx, key=jax.random.key(0))

def is_wrong(state: fs.TrainState) -> str:
  return state.metrics()
"""


@pytest.mark.slow
def test_mypy_knows_collections_and_fields_of_subclasses(tmp_path):
  pytest.importorskip("mypy")
  path = tmp_path / "user_code.py"
  path.write_text(CODE)
  root = pathlib.Path(__file__).parents[2]
  result = subprocess.run(
    [sys.executable, "-m", "mypy", "--ignore-missing-imports", path.name],
    cwd=tmp_path,
    env={**os.environ, "MYPYPATH": str(root)},
    capture_output=True,
    text=True,
    check=False,
  )
  errors = [x for x in result.stdout.splitlines() if ": error:" in x]
  assert len(errors) == 1, result.stdout + result.stderr
  assert "user_code.py" in errors[0] and '"str"' in errors[0]
