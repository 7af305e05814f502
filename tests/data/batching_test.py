"""Training and evaluation batches: order, position, processes, padding."""

import numpy as np
import pytest
from tree_equality import assert_trees_equal

from flaxshard import data


def make_source(size):
  numbers = np.arange(size, dtype=np.int32)
  return data.Arrays(numbers[:, None] * np.float32(0.5), numbers)


def make_splits(num_train=12, num_eval=10, **kwargs):
  """Splits whose labels are the indices of the examples."""
  return data.Splits(
    train=make_source(num_train),
    eval=make_source(num_eval),
    num_classes=max(num_train, num_eval),
    **kwargs,
  )


def jitter(example, rng):
  noise = rng.integers(1 << 30, size=example["inputs"].shape)
  return {**example, "inputs": example["inputs"] + noise}


def take(iterator, count):
  return [next(iterator) for _ in range(count)]


def labels(batches):
  return np.concatenate([b["labels"] for b in batches]).tolist()


# Training.


# 5 does not divide 12: batches cross the end of an epoch.
@pytest.mark.parametrize("batch_size", [5, 12])
def test_each_epoch_has_every_example_once_in_an_order_of_the_seed(batch_size):
  first, again, other = (
    take(
      data.train_iterator(make_splits(12), batch_size=batch_size, seed=seed),
      120 // batch_size,
    )
    for seed in (3, 3, 4)
  )
  assert_trees_equal(first, again)
  assert labels(first) != labels(other)
  for batch in first:
    np.testing.assert_array_equal(batch["inputs"][:, 0], batch["labels"] * 0.5)
  epochs = [tuple(labels(first)[i : i + 12]) for i in range(0, 120, 12)]
  for epoch in epochs:
    assert sorted(epoch) == list(range(12))
  assert len(set(epochs)) == 10
  assert tuple(range(12)) not in epochs


def test_a_restored_state_continues_at_the_exact_position():
  def create():
    splits = make_splits(12, augment=jitter)
    return data.train_iterator(splits, batch_size=5, seed=1)

  whole = take(create(), 7)
  first, second = create(), create()
  before = take(first, 4)
  state = first.get_state()
  second.set_state(state)
  assert_trees_equal(before + take(second, 3), whole)
  # Reading the state does not disturb the iterator.
  assert_trees_equal(take(first, 3), whole[4:])
  first.set_state(state)
  assert_trees_equal(take(first, 3), whole[4:])


# Blocks of rows, and the rows of replicas that are not neighbours.
@pytest.mark.parametrize(
  "shares",
  [
    [[2 * i, 2 * i + 1] for i in range(4)],
    [[0, 1, 4, 5], np.array([2, 3, 6, 7])],
    [range(3), range(3, 8)],
  ],
)
def test_processes_read_the_rows_of_one_process(shares):
  # 15 examples: batches cross the end of an epoch.
  splits = make_splits(15, num_eval=10, augment=jitter)
  order = np.argsort(np.concatenate(shares))

  def read(rows=None):
    options = {"batch_size": 8, "rows": rows}
    train = take(data.train_iterator(splits, seed=2, **options), 5)
    return train + list(data.eval_batches(splits, **options))

  joined = [
    {k: np.concatenate([b[k] for b in batches])[order] for k in batches[0]}
    for batches in zip(*map(read, shares), strict=True)
  ]
  assert_trees_equal(joined, read())


def test_augmentation_is_seeded_per_example_and_epoch():
  splits = make_splits(12, augment=jitter)

  def noise(seed):
    iterator = data.train_iterator(splits, batch_size=12, seed=seed)
    by_label = []
    for batch in take(iterator, 2):
      drawn = batch["inputs"][:, 0] - batch["labels"] * 0.5
      by_label.append(drawn[np.argsort(batch["labels"])])
    return np.stack(by_label)

  first = noise(5)
  np.testing.assert_array_equal(first, noise(5))
  assert not np.any(first == noise(6))
  assert len(np.unique(first)) == first.size


def test_collate_makes_batches_of_any_examples():
  examples = [[float(i)] * (i % 3 + 1) for i in range(12)]

  def collate(examples):
    inputs = np.zeros((len(examples), 3), np.float32)
    for row, example in zip(inputs, examples, strict=True):
      row[: len(example)] = example
    return {"inputs": inputs}

  splits = data.Splits(examples, examples)
  (epoch,) = take(
    data.train_iterator(splits, batch_size=12, seed=0, collate=collate), 1
  )
  assert sorted(epoch["inputs"][:, 0]) == list(range(12))
  batches = list(data.eval_batches(splits, batch_size=8, collate=collate))
  assert batches[0]["inputs"][2].tolist() == [2, 2, 2]
  assert batches[1]["mask"].tolist() == [True] * 4 + [False] * 4


# Evaluation.


@pytest.mark.parametrize("num_eval", [1, 10, 16])
def test_evaluation_examples_occur_once(num_eval):
  # Evaluation examples are not augmented.
  splits = make_splits(num_eval=num_eval, augment=jitter)
  seen = []
  for rows in (range(4), range(4, 8)):
    batches = list(data.eval_batches(splits, batch_size=8, rows=rows))
    assert len(batches) == -(-num_eval // 8)  # the same in every process
    for batch in batches:
      mask = batch["mask"]
      assert mask.dtype == np.bool_
      assert batch["inputs"].shape == (4, 1)
      np.testing.assert_array_equal(
        batch["inputs"][mask, 0], batch["labels"][mask] * 0.5
      )
      seen += batch["labels"][mask].tolist()
  assert sorted(seen) == list(range(num_eval))


# Invalid examples.


@pytest.mark.parametrize(
  ("fields", "facts"),
  [
    ({"inputs": np.zeros(2, np.float32)}, ["'inputs': (1,)", "'inputs': (2,)"]),
    ({"extra": 1}, ["'extra': ()"]),
    ({"labels": "word"}, ["labels", "<U"]),
  ],
)
def test_an_invalid_example_raises_when_it_is_read(fields, facts):
  examples = list(make_source(12))
  examples[7] |= fields
  splits = data.Splits(examples, examples)
  iterator = data.train_iterator(splits, batch_size=12, seed=0)
  batches = iter(data.eval_batches(splits, batch_size=4))
  next(batches)  # without example 7
  for read in (iterator, batches):
    with pytest.raises(ValueError, match=r"^config\.data: ") as e:
      next(read)
    for fact in facts:
      assert fact in str(e.value)


@pytest.mark.parametrize(
  ("options", "facts"),
  [
    ({"batch_size": 0}, "batch_size .* 0"),
    ({"batch_size": 14}, "batch_size=14 must be at most 12"),
    ({"rows": [2, 1]}, r"rows .*ascending.*\[2, 1\]"),
    ({"seed": -1}, "seed .* -1"),
  ],
)
def test_invalid_counts_raise(options, facts):
  options = {"batch_size": 4, "seed": 0} | options
  with pytest.raises(ValueError, match=facts):
    data.train_iterator(make_splits(), **options)
