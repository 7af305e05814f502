"""Data sources, the factories that a config names, and the built-in ones."""

import pickle

import numpy as np
import pytest
import tiny

from flaxshard import data


@pytest.fixture(scope="module", autouse=True)
def importable():
  """Lets configs name the factories of this file."""
  with tiny.importable("my_factories", __name__):
    yield


def test_a_window_needs_one_more_token_than_its_length():
  tokens = np.arange(9, dtype=np.uint8)
  windows = data.Windows(tokens, 4)
  assert len(data.Windows(tokens[:8], 4)) == 1
  # Iteration ends.
  assert [x["inputs"].tolist() for x in windows] == [[0, 1, 2, 3], [4, 5, 6, 7]]
  assert [windows[i]["labels"][0] for i in (0, 1, -2)] == [1, 5, 1]
  assert windows[0]["labels"].dtype == windows[0]["inputs"].dtype == np.int32


def test_arrays_of_any_names():
  source = data.Arrays(np.arange(6).reshape(3, 2), weight=np.ones(3))
  copied = pickle.loads(pickle.dumps(source))
  assert len(copied) == 3
  assert copied[2]["inputs"].tolist() == [4, 5]
  assert copied[2]["weight"] == 1
  np.testing.assert_array_equal(copied.inputs, source.inputs)
  assert not hasattr(copied, "labels")


def one_class(size):
  arrays = data.Arrays(np.arange(size), np.zeros(size, int))
  return data.Splits(arrays, arrays, num_classes=1)


def test_load_calls_a_custom_factory():
  config = {"name": "my_factories:one_class", "size": 3}
  loaded = data.load(config)
  assert (len(loaded.train), loaded.num_classes) == (3, 1)
  assert config == {"name": "my_factories:one_class", "size": 3}


def test_digits_are_scikit_learns_with_every_fifth_for_evaluation():
  # Here, since its import takes seconds.
  from sklearn import datasets

  loaded = data.load({"name": "digits"})
  images, targets = datasets.load_digits(return_X_y=True)
  inputs = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
  is_eval = np.arange(1797) % 5 == 0
  assert loaded.num_classes == 10
  for source, chosen in ((loaded.train, ~is_eval), (loaded.eval, is_eval)):
    np.testing.assert_array_equal(source.inputs, inputs[chosen])
    np.testing.assert_array_equal(source.labels, targets[chosen])
    assert source.inputs.dtype == np.float32
    assert source.labels.dtype == np.int32
  assert (inputs.min(), inputs.max()) == (0, 1)


def test_text_files_are_joined_and_split_into_windows(tmp_path):
  (tmp_path / "sub").mkdir()
  for name, text in (
    ("a.txt", "abcdefgh"),
    ("b.txt", "held out"),
    ("sub/c.txt", "é!"),
    ("sub/d.txt", "too"),
    ("other.py", "another suffix"),
  ):
    (tmp_path / name).write_text(text, encoding="utf-8")
  fields = {"suffix": ".txt", "length": 5, "eval_every": 2}
  loaded = data.load({"name": "text", "path": str(tmp_path), **fields})
  assert loaded.num_classes == 256
  # Files are joined by a zero byte; a last incomplete window is left out.
  for source, joined in (
    (loaded.train, "abcdefgh\0é!".encode()),
    (loaded.eval, b"held out\0too"),
  ):
    inputs = [bytes(x["inputs"].astype(np.uint8)) for x in source]
    assert inputs == [joined[:5], joined[5:10]]
