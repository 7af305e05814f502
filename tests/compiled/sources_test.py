"""The user's source line."""

import os

import pytest

from flaxshard.compiled import hlo
from flaxshard.compiled import sources

SITE = "/venv/lib/python3.12/site-packages"


class _Program:
  """Stands in for a program whose instruction has the given traceback."""

  def __init__(self, *files):
    self._frames = [hlo.Frame(f, "", n) for n, f in enumerate(files, 1)]

  def frames(self, instruction):
    del instruction
    return iter(self._frames)


@pytest.mark.parametrize(
  ("files", "expected"),
  [
    ([f"{SITE}/flax/linen/linear.py", "/home/u/model.py"], "model.py:2"),
    ([f"{SITE}/models/vit.py", "/home/u/train.py"], "vit.py:1"),
    ([f"{SITE}/jax/numpy.py", f"{SITE}/optax/adam.py"], "adam.py:2"),
    ([f"{SITE}/flaxshard/models/cnn.py", "/home/u/t.py"], "cnn.py:1"),
    ([f"{SITE}/flaxshard/state/train_state.py", "/home/u/t.py"], "t.py:2"),
    ([f"{SITE}/jax/numpy.py"], ""),
    ([], ""),
  ],
)
def test_source_line(files, expected):
  assert sources.source_line(_Program(*files), None) == expected


def test_files_below_the_current_directory_are_relative():
  file = os.path.join(os.getcwd(), "models", "mlp.py")
  assert sources.source_line(_Program(file), None) == "models/mlp.py:1"
