"""Data sources, and the factories that a config names."""

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


@pytest.mark.parametrize(
  ("config", "kind", "facts"),
  [
    # core/registry_test.py has the other mistakes.
    ({"name": "digit"}, ValueError, "config.data.name.*'digits'"),
    ({"name": "my_factories:fixed"}, TypeError, "config.data.*'size'"),
    ({"name": "my_factories:a_list"}, TypeError, "Splits.*list"),
  ],
)
def test_load_with_an_invalid_config_raises(factories, config, kind, facts):
  with pytest.raises(kind, match=facts):
    data.load(config)


def two_numbers(example, rng):
  return {**example, "inputs": rng.random(2)}


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
