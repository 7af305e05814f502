"""Data sources, the factories that a config names, and the built-in ones."""

import pickle
import sys
import types

import numpy as np
import pytest

from flaxshard import data


def test_a_window_needs_one_more_token_than_its_length():
  tokens = np.arange(9, dtype=np.uint8)
  assert len(data.Windows(tokens, 4)) == 2
  assert len(data.Windows(tokens[:8], 4)) == 1
  assert data.Windows(tokens, 4)[1]["labels"].tolist() == [5, 6, 7, 8]
  assert data.Windows(tokens, 4)[-2]["labels"].tolist() == [1, 2, 3, 4]
  # Iteration ends.
  starts = [int(x["inputs"][0]) for x in data.Windows(tokens, 4)]
  assert starts == [0, 4]
  for index in (2, -3):
    with pytest.raises(IndexError, match=f"no window {index} of 2"):
      data.Windows(tokens, 4)[index]
  for length in (0, 2**31):
    with pytest.raises(ValueError, match=f"Windows: length .* {length}"):
      data.Windows(tokens, length)
  for invalid in (tokens.astype(np.int64) + 2**32, tokens * 0.5):
    with pytest.raises(ValueError, match=f"tokens .* {invalid.dtype}"):
      data.Windows(invalid, 4)[1]


def source(size, dtype=np.float32, **fields):
  numbers = np.arange(size, dtype=np.int32)
  return [{"inputs": dtype(i), "labels": i, **fields} for i in numbers]


def splits(train=None, evaluation=None, num_classes=3, **kwargs):
  return data.Splits(
    source(3) if train is None else train,
    source(2) if evaluation is None else evaluation,
    num_classes,
    **kwargs,
  )


@pytest.fixture
def factories(monkeypatch):
  """A module of custom factories."""
  module = types.ModuleType("my_factories")
  module.fixed = lambda size, num_classes=3: splits(source(size))
  module.a_list = lambda: [1, 2]
  monkeypatch.setitem(sys.modules, "my_factories", module)
  return module


def test_load_calls_a_custom_factory(factories):
  config = {"name": "my_factories:fixed", "size": 3}
  loaded = data.load(config)
  assert (len(loaded.train), len(loaded.eval)) == (3, 2)
  assert loaded.num_classes == 3
  assert config == {"name": "my_factories:fixed", "size": 3}
  # core/registry_test.py has the other mistakes.
  with pytest.raises(TypeError, match=r"config\.data.*Splits.*list"):
    data.load({"name": "my_factories:a_list"})


def two_numbers(example, rng):
  return {**example, "inputs": rng.random(2).astype(np.float32)}


@pytest.mark.parametrize(
  ("made", "facts"),
  [
    (splits(evaluation=[]), "eval"),
    (splits(num_classes=0), "num_classes.*got 0"),
    (splits(train=[3]), r"train\[0\].*3"),
    (splits(train=source(3, mask=True)), r"train\[0\].*'mask'"),
    (splits(train=source(3, extra="word")), r"train\[0\].*extra.*<U4"),
    (splits(source(3, np.float64)), "float32.*float64"),
    # The augmented example is what has to match.
    (splits(augment=two_numbers), r"\(\).*\(2,\)"),
  ],
)
def test_load_with_invalid_examples_raises(factories, made, facts):
  factories.made = lambda: made
  with pytest.raises(ValueError, match=f"my_factories:made.*{facts}"):
    data.load({"name": "my_factories:made"})


def test_arrays_of_any_names():
  source = data.Arrays(np.arange(6).reshape(3, 2), weight=np.ones(3))
  assert len(source) == 3
  assert source[2]["inputs"].tolist() == [4, 5]
  assert source[2]["weight"] == 1
  copied = pickle.loads(pickle.dumps(source))
  np.testing.assert_array_equal(copied.inputs, source.inputs)
  assert not hasattr(copied, "labels")
  with pytest.raises(ValueError, match="'image': 3, 'age': 2"):
    data.Arrays(image=np.ones((3, 4)), age=np.ones(2))
  with pytest.raises(ValueError, match="none"):
    data.Arrays()


# Built-in data.


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
    assert source[0]["inputs"].dtype == np.float32
    assert source[0]["labels"].dtype == np.int32
  assert (loaded.train.inputs.min(), loaded.train.inputs.max()) == (0, 1)


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "sub").mkdir()
  (tmp_path / "a.txt").write_bytes(b"abcdefgh")
  (tmp_path / "b.txt").write_bytes(b"held out")
  (tmp_path / "sub" / "c.txt").write_bytes("é!".encode())
  (tmp_path / "sub" / "d.txt").write_bytes(b"too")
  (tmp_path / "other.py").write_bytes(b"another suffix")
  return tmp_path


def test_text_windows_with_labels_one_byte_later(folder):
  loaded = data.load(
    {
      "name": "text",
      "path": str(folder),
      "suffix": ".txt",
      "length": 5,
      "eval_every": 2,
    }
  )
  assert loaded.num_classes == 256
  # Files are joined by a zero byte; a last incomplete window is left out.
  train = b"abcdefgh\0" + "é!".encode()
  evaluation = b"held out\0too"
  for source, joined in ((loaded.train, train), (loaded.eval, evaluation)):
    assert len(source) == 2
    for i in range(2):
      example = source[i]
      window = list(joined[5 * i : 5 * i + 6])
      assert example["inputs"].dtype == example["labels"].dtype == np.int32
      assert example["inputs"].tolist() == window[:-1]
      assert example["labels"].tolist() == window[1:]


@pytest.mark.parametrize(
  ("arguments", "facts"),
  [
    ({"path": "missing"}, "path.*missing"),
    ({"length": 12, "eval_every": 2}, "4 files.*'.txt'.*train.*13"),
    ({"length": 2, "eval_every": 5}, "eval.*0 bytes"),
    ({"length": 0}, "length.*1.*got 0"),
    ({"eval_every": "2"}, "eval_every.*got '2'"),
  ],
)
def test_invalid_text_arguments_raise(folder, arguments, facts):
  path = folder / arguments.pop("path", "")
  with pytest.raises(ValueError, match=facts):
    data.text(str(path), **{"suffix": ".txt", **arguments})
