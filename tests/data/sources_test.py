"""Data sources, the factories that a config names, and batches of them."""

import json
import pickle

import grain
import numpy as np
import pytest
import small_tasks
import tiny
from tree_equality import assert_trees_equal

from flaxshard import data


@pytest.fixture(scope="module", autouse=True)
def importable():
  """Lets configs name the factories of this file."""
  with tiny.importable("my_factories", __name__):
    yield


def test_a_window_needs_one_more_token_than_its_length():
  tokens = np.arange(9, dtype=np.uint8)
  windows = data.Windows(tokens, 4)
  assert [len(data.Windows(tokens[:n], 4)) for n in (0, 8)] == [0, 1]
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


@pytest.mark.slow
def test_digits_are_scikit_learns_with_every_fifth_for_evaluation():
  # Its import takes seconds.
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


def make_source(size):
  numbers = np.arange(size, dtype=np.int32)
  return data.Arrays(numbers[:, None] * np.float32(0.5), numbers)


def add_noise(example, rng):
  return {**example, "noise": rng.integers(1 << 30)}


def make_splits(num_train=12, num_eval=10):
  """Splits whose labels are the numbers of the examples."""
  return data.Splits(
    make_source(num_train), make_source(num_eval), augment=add_noise
  )


def take(iterator, count):
  return [next(iterator) for _ in range(count)]


def concatenate(batches):
  return {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}


def test_each_epoch_has_every_example_once_with_order_and_noise_of_its_own():
  def read(seed):
    # 5 does not divide 12: batches cross the end of an epoch.
    iterator = data.train_iterator(make_splits(), batch_size=5, seed=seed)
    return concatenate(take(iterator, 24))

  first, other = read(3), read(4)
  assert_trees_equal(first, read(3))
  np.testing.assert_array_equal(first["inputs"][:, 0], first["labels"] * 0.5)
  epochs = first["labels"].reshape(10, 12)
  assert (np.sort(epochs) == np.arange(12)).all()
  assert len({tuple(epoch) for epoch in [range(12), *epochs]}) == 11
  assert (first["labels"] != other["labels"]).any()
  assert len(np.unique([first["noise"], other["noise"]])) == 240


# Blocks of rows, and the rows of replicas that are not neighbours.
@pytest.mark.parametrize(
  "shares", [[range(3), range(3, 8)], [[0, 1, 4, 5], np.array([2, 3, 6, 7])]]
)
def test_processes_read_the_rows_of_one_process(shares):
  splits = make_splits(15)  # batches cross the end of an epoch
  order = np.argsort(np.concatenate(shares))

  def read(rows=None):
    options = {"batch_size": 8, "rows": rows}
    train = take(data.train_iterator(splits, seed=2, **options), 5)
    return train + list(data.eval_batches(splits, **options))

  joined = [
    {k: x[order] for k, x in concatenate(batches).items()}
    for batches in zip(*map(read, shares), strict=True)
  ]
  assert_trees_equal(joined, read())


@pytest.mark.parametrize("num_eval", [1, 10, 16])
def test_evaluation_examples_occur_once_without_noise(num_eval):
  splits, seen = make_splits(num_eval=num_eval), []
  for rows in (range(4), range(4, 8)):
    batches = list(data.eval_batches(splits, batch_size=8, rows=rows))
    assert len(batches) == -(-num_eval // 8)  # the same in every process
    for batch in batches:
      mask, labels = batch["mask"], batch["labels"]
      assert mask.dtype == np.bool_
      assert batch.keys() == {"inputs", "labels", "mask"}
      np.testing.assert_array_equal(batch["inputs"], labels[:, None] * 0.5)
      seen += labels[mask].tolist()
  assert sorted(seen) == list(range(num_eval))


def test_collate_makes_batches_of_any_examples():
  examples = [[float(i)] * (i % 3 + 1) for i in range(12)]

  def collate(examples):
    inputs = np.zeros((len(examples), 3), np.float32)
    for row, example in zip(inputs, examples, strict=True):
      row[: len(example)] = example
    return {"inputs": inputs}

  splits = data.Splits(examples, examples)
  options = {"batch_size": 12, "collate": collate}
  epoch = next(data.train_iterator(splits, seed=0, **options))
  assert sorted(epoch["inputs"][:, 0]) == list(range(12))
  *_, last = data.eval_batches(splits, **options | {"batch_size": 8})
  expected = [[8] * 3, [9, 0, 0], [10, 10, 0], [11] * 3]
  assert last["inputs"][:4].tolist() == expected
  assert last["mask"].tolist() == [True] * 4 + [False] * 4


# Training data without a length.


def numbers(size):
  return [{"inputs": np.float32(i)} for i in range(size)]


def make_stream(kind):
  if kind == "dataset":
    return grain.MapDataset.source(numbers(10)).to_iter_dataset()
  if kind == "loader":  # its positions are bytes
    sampler = grain.samplers.IndexSampler(10, shuffle=False, num_epochs=1)
    return grain.DataLoader(data_source=numbers(10), sampler=sampler)
  return small_tasks.Forever(numbers(10))


@pytest.mark.parametrize("kind", ["dataset", "loader", "plain"])
def test_a_stream_is_read_in_its_order_and_continues_from_a_position(kind):
  splits = data.Splits(make_stream(kind), augment=add_noise)

  def create(rows=None):
    return data.train_iterator(splits, batch_size=4, seed=0, rows=rows)

  iterator = create()
  whole = take(iterator, 3)
  inputs = [batch["inputs"].tolist() for batch in whole]
  assert inputs == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
  assert len(np.unique(concatenate(whole)["noise"])) == 12
  position = json.loads(json.dumps(iterator.get_state()))
  again = create()
  again.set_state(position)
  assert_trees_equal(next(again), next(iterator))
  # Rows are the same examples for any number of processes.
  last_rows = [{k: x[2:] for k, x in batch.items()} for batch in whole]
  assert_trees_equal(take(create([2, 3]), 3), last_rows)


def test_a_stream_that_became_shorter_cannot_be_continued():
  stream = small_tasks.Forever(numbers(10))
  iterator = data.train_iterator(data.Splits(stream), batch_size=4, seed=0)
  take(iterator, 2)
  position = iterator.get_state()
  stream.examples = numbers(5)
  with pytest.raises(ValueError, match=r"5 examples.* after 8"):
    iterator.set_state(position)
