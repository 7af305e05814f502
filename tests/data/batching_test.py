"""Training and evaluation batches: order, position, processes, padding."""

import numpy as np
import pytest

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


def assert_batches_equal(given, wanted):
  assert len(given) == len(wanted)
  for a, b in zip(given, wanted, strict=True):
    assert sorted(a) == sorted(b)
    for key in a:
      assert a[key].dtype == b[key].dtype
      np.testing.assert_array_equal(a[key], b[key])


# Training.


def test_the_order_depends_on_the_seed_alone():
  splits = make_splits(100)
  first, again, other = (
    take(data.train_iterator(splits, batch_size=8, seed=seed), 30)
    for seed in (3, 3, 4)
  )
  assert_batches_equal(first, again)
  assert labels(first) != labels(other)
  for batch in first:
    np.testing.assert_array_equal(batch["inputs"][:, 0], batch["labels"] * 0.5)


# 5 does not divide 12: batches cross the end of an epoch. 24 is two epochs.
@pytest.mark.parametrize("batch_size", [5, 24])
def test_each_epoch_has_every_example_once_in_a_new_order(batch_size):
  iterator = data.train_iterator(make_splits(12), batch_size=batch_size, seed=0)
  drawn = labels(take(iterator, 120 // batch_size))
  epochs = [tuple(drawn[i : i + 12]) for i in range(0, 120, 12)]
  for epoch in epochs:
    assert sorted(epoch) == list(range(12))
  assert len(set(epochs)) == 10
  assert tuple(range(12)) not in epochs


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_restored_state_continues_at_the_exact_position(prefetch):
  def create():
    splits = make_splits(12, augment=jitter)
    iterator = data.train_iterator(splits, batch_size=5, seed=1)
    if prefetch:
      iterator.start_prefetch()
    return iterator

  whole = take(create(), 7)
  first = create()
  before = take(first, 4)
  state = first.get_state()  # prefetched batches do not count
  second = create()
  second.set_state(state)
  assert_batches_equal(before + take(second, 3), whole)
  # Reading the state does not disturb the iterator.
  assert_batches_equal(take(first, 3), whole[4:])
  first.set_state(state)
  assert_batches_equal(take(first, 3), whole[4:])


def test_resuming_after_every_batch_changes_nothing():
  splits = make_splits(12)
  straight = data.train_iterator(splits, batch_size=5, seed=1)
  state = straight.get_state()
  for _ in range(4):
    resumed = data.train_iterator(splits, batch_size=5, seed=1)
    resumed.set_state(state)
    assert_batches_equal([next(resumed)], [next(straight)])
    state = resumed.get_state()
    assert state == straight.get_state()


# Blocks of rows, and the rows of replicas that are not neighbours.
@pytest.mark.parametrize(
  "shares",
  [
    [{"process_index": i, "process_count": 4} for i in range(4)],
    [{"rows": [0, 1, 4, 5]}, {"rows": np.array([2, 3, 6, 7])}],
    [{"rows": range(3)}, {"rows": range(3, 8)}],
  ],
)
def test_processes_read_the_rows_of_one_process(shares):
  # 15 examples: batches cross the end of an epoch.
  splits = make_splits(15, num_eval=10, augment=jitter)
  blocks = np.arange(8).reshape(4, 2)
  rows = [s.get("rows", blocks[s.get("process_index", 0)]) for s in shares]
  order = np.argsort(np.concatenate(rows))

  def train(**share):
    return take(data.train_iterator(splits, batch_size=8, seed=2, **share), 5)

  def evaluate(**share):
    return list(data.eval_batches(splits, batch_size=8, **share))

  for read in (train, evaluate):
    parts = [read(**share) for share in shares]
    joined = [
      {k: np.concatenate([b[k] for b in batches])[order] for k in batches[0]}
      for batches in zip(*parts, strict=True)
    ]
    assert_batches_equal(joined, read())


class Recorded:
  """A source that records which of its examples are loaded."""

  def __init__(self, source):
    self.source, self.loaded = source, []

  def __len__(self):
    return len(self.source)

  def __getitem__(self, index):
    self.loaded.append(int(index))
    return self.source[index]


def test_process_loads_the_examples_of_its_rows_alone():
  splits = make_splits(800, num_eval=64)
  train, held_out = Recorded(splits.train), Recorded(splits.eval)
  recorded = data.Splits(train, held_out, 800)
  # All batches that Grain may read ahead belong to the first epoch.
  whole = take(data.train_iterator(splits, batch_size=8, seed=0), 50)
  rows = {x for batch in whole for x in batch["labels"][[0, 7]].tolist()}
  take(data.train_iterator(recorded, batch_size=8, seed=0, rows=[0, 7]), 2)
  loaded = list(train.loaded)
  assert 4 <= len(loaded) <= len(rows)
  assert set(loaded) <= rows
  held_out.loaded.clear()
  list(data.eval_batches(recorded, batch_size=8, rows=[3]))
  # Example 0 is loaded for its shape.
  assert sorted(held_out.loaded) == [0, *range(3, 64, 8)]


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


# Evaluation.


@pytest.mark.parametrize(
  ("num_eval", "process_count"), [(1, 4), (10, 1), (16, 4)]
)
def test_evaluation_examples_occur_once(num_eval, process_count):
  # Evaluation examples are not augmented.
  splits = make_splits(num_eval=num_eval, augment=jitter)
  seen = []
  for i in range(process_count):
    batches = list(
      data.eval_batches(
        splits, batch_size=8, process_index=i, process_count=process_count
      )
    )
    assert len(batches) == -(-num_eval // 8)  # the same in every process
    for batch in batches:
      mask = batch["mask"]
      assert mask.dtype == np.bool_
      assert batch["inputs"].shape == (8 // process_count, 1)
      np.testing.assert_array_equal(
        batch["inputs"][mask, 0], batch["labels"][mask] * 0.5
      )
      seen += batch["labels"][mask].tolist()
  assert sorted(seen) == list(range(num_eval))


def test_only_the_last_evaluation_batch_is_padded():
  dataset = data.eval_batches(make_splits(), batch_size=8)
  batches = list(dataset)
  assert labels(batches)[:10] == list(range(10))
  assert batches[0]["mask"].tolist() == [True] * 8
  assert batches[1]["mask"].tolist() == [True] * 2 + [False] * 6
  assert_batches_equal(list(dataset), batches)  # can be read again


# Invalid examples.


class WithOneOddExample:
  """A source that replaces fields of one example."""

  def __init__(self, source, at, fields):
    self.source, self.at, self.fields = source, at, fields

  def __len__(self):
    return len(self.source)

  def __getitem__(self, index):
    example = self.source[index]
    return {**example, **self.fields} if int(index) == self.at else example


@pytest.mark.parametrize(
  ("fields", "facts"),
  [
    ({"inputs": np.zeros(2, np.float32)}, ["'inputs': (1,)", "'inputs': (2,)"]),
    ({"extra": 1}, ["'extra': ()"]),
    ({"labels": "word"}, ["labels", "<U"]),
  ],
)
def test_an_invalid_example_raises_when_it_is_read(fields, facts):
  splits = make_splits()
  drawn = labels(take(data.train_iterator(splits, batch_size=3, seed=0), 4))
  odd = WithOneOddExample(splits.train, 7, fields)
  iterator = data.train_iterator(
    data.Splits(odd, splits.eval, 12), batch_size=3, seed=0
  )
  take(iterator, drawn.index(7) // 3)
  with pytest.raises(ValueError, match=r"^config\.data: ") as e:
    next(iterator)
  for fact in facts:
    assert fact in str(e.value)
  odd = WithOneOddExample(splits.eval, 7, fields)
  batches = iter(
    data.eval_batches(data.Splits(splits.train, odd, 12), batch_size=4)
  )
  next(batches)
  with pytest.raises(ValueError, match=r"^config\.data: "):
    next(batches)


@pytest.mark.parametrize(
  ("options", "facts"),
  [
    ({"batch_size": 0}, "batch_size .* 0"),
    ({"batch_size": 2**31}, f"batch_size .* {2**31}"),
    ({"batch_size": 5}, "batch_size=5 .*process_count=2"),
    ({"process_count": 2**31}, f"process_count .* {2**31}"),
    ({"process_index": 2}, "process_index .*at most 1, got 2"),
    ({"rows": [0]}, r"rows=\[0\] .*process_index=0.*not both"),
    ({"rows": [4], "process_count": 1}, "rows.* at most 3, got 4"),
    ({"rows": [2, 1], "process_count": 1}, r"rows .*ascending.*\[2, 1\]"),
    ({"rows": [1, 1], "process_count": 1}, r"rows .*ascending.*\[1, 1\]"),
    ({"rows": [], "process_count": 1}, r"rows .*ascending.*\[\]"),
    ({"seed": -1}, "seed .* -1"),
    ({"seed": 2**31}, f"seed .* {2**31}"),
  ],
)
def test_invalid_counts_raise(options, facts):
  options = {"batch_size": 4, "process_count": 2, "seed": 0} | options
  with pytest.raises(ValueError, match=facts):
    data.train_iterator(make_splits(), **options)
  seed = options.pop("seed")
  if seed == 0:
    with pytest.raises(ValueError, match=facts):
      data.eval_batches(make_splits(), **options)
