"""The user's source line."""

import os

import pytest

from flaxshard.compiled import frames
from flaxshard.compiled import sources

SITE = "/venv/lib/python3.12/site-packages"


def _traceback(*files):
  return [frames.Frame(file, "", line) for line, file in enumerate(files, 1)]


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
def test_user_line(files, expected):
  assert sources.user_line(_traceback(*files)) == expected


def test_files_below_the_current_directory_are_relative():
  file = os.path.join(os.getcwd(), "models", "mlp.py")
  assert sources.user_line(_traceback(file)) == "models/mlp.py:1"
