"""Data sources and the batches that come of them."""

import numpy as np
import pytest
from sklearn import datasets

from flaxshard import data
from flaxshard.data import sources


def make_splits(num_train=12, num_eval=10, **kwargs):
  """Splits whose labels are the examples' numbers."""
  return data.Splits(
    train=make_source(num_train),
    eval=make_source(num_eval),
    num_classes=max(num_train, num_eval),
    **kwargs,
  )


def make_source(size):
  numbers = np.arange(size, dtype=np.int32)
  return data.Arrays(numbers[:, None] * np.float32(0.5), numbers)


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


# Digits.


def test_digits_are_those_of_scikit_learn_every_fifth_held_out():
  splits = data.load({"name": "digits"})
  assert len(splits.train) == 1437
  assert len(splits.eval) == 360
  assert splits.num_classes == 10
  images, targets = datasets.load_digits(return_X_y=True)
  train = [i for i in range(1797) if i % 5]
  held_out = [i for i in range(1797) if i % 5 == 0]
  for source, chosen in ((splits.train, train), (splits.eval, held_out)):
    examples = [source[i] for i in range(len(source))]
    inputs = np.stack([e["inputs"] for e in examples])
    assert inputs.shape[1:] == (8, 8, 1)
    assert inputs.dtype == np.float32
    np.testing.assert_array_equal(
      inputs.reshape(-1, 64), (images[chosen] / 16).astype(np.float32)
    )
    assert examples[0]["labels"].dtype == np.int32
    assert [e["labels"] for e in examples] == targets[chosen].tolist()
    assert inputs.min() == 0 and inputs.max() == 1


def test_digits_are_the_same_each_time():
  first, second = data.digits(), data.digits()
  for i in (0, 17, 1436):
    assert_batches_equal([first.train[i]], [second.train[i]])


# Text.


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "sub").mkdir()
  (tmp_path / "a.txt").write_bytes(b"abcdefgh")
  (tmp_path / "b.txt").write_bytes(b"held out")
  (tmp_path / "sub" / "c.txt").write_bytes("é!".encode())
  (tmp_path / "sub" / "d.txt").write_bytes(b"too")
  (tmp_path / "no.py").write_bytes(b"another suffix")
  return tmp_path


def test_text_windows_and_labels_one_byte_later(folder):
  splits = data.load(
    {
      "name": "text",
      "path": str(folder),
      "suffix": ".txt",
      "length": 5,
      "eval_every": 2,
    }
  )
  assert splits.num_classes == 256
  # Files are joined by a zero byte; the last bytes fill no window.
  train = b"abcdefgh\0" + "é!".encode()
  held_out = b"held out\0too"
  for source, joined in ((splits.train, train), (splits.eval, held_out)):
    assert len(source) == 2
    for i in range(2):
      example = source[i]
      window = list(joined[5 * i : 5 * i + 6])
      assert example["inputs"].dtype == example["labels"].dtype == np.int32
      assert example["inputs"].tolist() == window[:-1]
      assert example["labels"].tolist() == window[1:]


def test_the_last_window_needs_a_byte_after_it():
  tokens = np.arange(9, dtype=np.uint8)
  assert len(data.Windows(tokens, 4)) == 2
  assert len(data.Windows(tokens[:8], 4)) == 1
  assert data.Windows(tokens, 4)[1]["labels"].tolist() == [5, 6, 7, 8]


def test_text_defaults_to_the_standard_library():
  splits = data.load({"name": "text"})
  # Thousands of pages of Python, without what is installed beside it.
  assert len(splits.train) > 20_000
  assert len(splits.eval) > 500
  example = splits.train[0]
  assert example["inputs"].shape == (128,)
  np.testing.assert_array_equal(example["inputs"][1:], example["labels"][:-1])


def test_text_leaves_out_installed_packages(folder, monkeypatch):
  (folder / "site-packages").mkdir()
  (folder / "site-packages" / "x.txt").write_bytes(b"Z" * 100)
  monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(folder)})
  splits = data.text(suffix=".txt", length=5, eval_every=2)
  assert not np.any(splits.train.tokens == ord("Z"))
  assert not np.any(splits.eval.tokens == ord("Z"))
  # A folder that one names is searched whole.
  splits = data.text(str(folder), suffix=".txt", length=5, eval_every=3)
  assert np.any(splits.eval.tokens == ord("Z"))


def test_text_errors(folder):
  with pytest.raises(ValueError, match=r"data\.path='.*missing' is not a fold"):
    data.text(str(folder / "missing"))
  with pytest.raises(ValueError, match="is not a folder"):
    data.text(str(folder / "a.txt"))
  with pytest.raises(ValueError) as e:
    data.text(str(folder), suffix=".txt", length=12, eval_every=2)
  message = str(e.value)
  assert "has 4 files that end in '.txt'" in message
  assert "the train split gets 12 bytes" in message
  assert "at least 13 are needed" in message
  with pytest.raises(ValueError, match=r"has 0 files that end in '\.rst'"):
    data.text(str(folder), suffix=".rst")
  with pytest.raises(ValueError, match="the eval split gets 0 bytes"):
    data.text(str(folder), suffix=".txt", length=2, eval_every=5)


@pytest.mark.parametrize(
  ("field", "value", "least"),
  [
    ("length", 0, 1),
    ("length", 2.0, 1),
    ("eval_every", 1, 2),
    ("eval_every", "2", 2),
  ],
)
def test_text_bad_arguments(folder, field, value, least):
  with pytest.raises(ValueError) as e:
    data.text(str(folder), suffix=".txt", **{field: value})
  assert str(e.value) == (
    f"config.data.{field} must be an integer of at least {least}, "
    f"got {value!r}."
  )


# Training batches.


def test_the_order_is_a_function_of_the_seed():
  splits = make_splits(100)
  first = take(data.train_iterator(splits, batch_size=8, seed=3), 30)
  again = take(data.train_iterator(splits, batch_size=8, seed=3), 30)
  assert_batches_equal(first, again)
  other = take(data.train_iterator(splits, batch_size=8, seed=4), 30)
  assert labels(first) != labels(other)
  # Inputs come with their own labels.
  for batch in first:
    np.testing.assert_array_equal(batch["inputs"][:, 0], batch["labels"] * 0.5)


# 5 does not divide 12: batches reach over the end of an epoch.
@pytest.mark.parametrize("batch_size", [4, 5])
def test_each_epoch_has_every_example_once_in_a_new_order(batch_size):
  iterator = data.train_iterator(make_splits(12), batch_size=batch_size, seed=0)
  drawn = labels(take(iterator, 60 // batch_size))
  epochs = [tuple(drawn[i : i + 12]) for i in range(0, 60, 12)]
  for epoch in epochs:
    assert sorted(epoch) == list(range(12))
  assert len(set(epochs)) == 5
  assert tuple(range(12)) not in epochs


def test_a_batch_may_be_larger_than_an_epoch():
  iterator = data.train_iterator(make_splits(3), batch_size=6, seed=0)
  assert sorted(labels(take(iterator, 1))) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_state_continues_exactly(prefetch):
  def make():
    splits = make_splits(12, augment=jitter)
    iterator = data.train_iterator(splits, batch_size=5, seed=1)
    if prefetch:
      iterator.start_prefetch()
    return iterator

  whole = take(make(), 9)
  first = make()
  before = take(first, 4)
  # What was prefetched is not consumed.
  position = first.get_state()
  second = make()
  second.set_state(position)
  assert_batches_equal(before + take(second, 5), whole)
  # The iterator that the state came from goes on as if nothing had been.
  assert_batches_equal(take(first, 5), whole[4:])
  # Back, too.
  first.set_state(position)
  assert_batches_equal(take(first, 5), whole[4:])


def test_a_position_does_not_depend_on_how_often_one_resumed():
  splits = make_splits(12)

  def make():
    return data.train_iterator(splits, batch_size=5, seed=1)

  straight = make()
  batches = []
  position = make().get_state()
  for _ in range(7):
    straight_batch = next(straight)
    iterator = make()
    iterator.set_state(position)
    batches.append(next(iterator))
    position = iterator.get_state()
    assert_batches_equal(batches[-1:], [straight_batch])
    assert position == straight.get_state()


@pytest.mark.parametrize("process_count", [2, 4])
@pytest.mark.parametrize("augment", [None, jitter])
def test_processes_share_the_batches_of_one(process_count, augment):
  # 15 examples: a process's parts do not begin anew with an epoch.
  splits = make_splits(15, augment=augment)

  def batches(**process):
    iterator = data.train_iterator(splits, batch_size=8, seed=2, **process)
    return take(iterator, 8)

  alone = batches()
  parts = [
    batches(process_index=i, process_count=process_count)
    for i in range(process_count)
  ]
  for n, batch in enumerate(alone):
    assert all(len(p[n]["labels"]) == 8 // process_count for p in parts)
    together = {
      key: np.concatenate([p[n][key] for p in parts]) for key in batch
    }
    # Which process gets which example of a batch is free.
    for values in (batch, together):
      order = np.argsort(values["inputs"][:, 0], kind="stable")
      values |= {key: value[order] for key, value in values.items()}
    assert_batches_equal([together], [batch])


def test_augment_is_seeded():
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
  # Anew for each example, and for each epoch.
  assert len(np.unique(first)) == first.size


def test_augment_is_not_for_held_out_examples():
  splits = make_splits(augment=jitter)
  (batch,) = data.eval_batches(splits, batch_size=10)
  np.testing.assert_array_equal(batch["inputs"][:, 0], np.arange(10) * 0.5)


# Held-out batches.


@pytest.mark.parametrize("process_count", [1, 2, 4])
@pytest.mark.parametrize("num_eval", [1, 10, 16])
def test_held_out_examples_come_once(process_count, num_eval):
  splits = make_splits(num_eval=num_eval)
  parts = [
    list(
      data.eval_batches(
        splits, batch_size=8, process_index=i, process_count=process_count
      )
    )
    for i in range(process_count)
  ]
  real = []
  for part in parts:
    # As many batches in every process: they evaluate together.
    assert len(part) == -(-num_eval // 8)
    for batch in part:
      assert batch["mask"].dtype == np.bool_
      assert batch["mask"].shape == (8 // process_count,)
      assert batch["inputs"].shape == (8 // process_count, 1)
      inputs = batch["inputs"][:, 0][batch["mask"]]
      np.testing.assert_array_equal(
        inputs, batch["labels"][batch["mask"]] * 0.5
      )
      real += batch["labels"][batch["mask"]].tolist()
  assert sorted(real) == list(range(num_eval))


def test_only_the_last_held_out_batch_is_filled_up():
  batches = list(data.eval_batches(make_splits(), batch_size=8))
  assert labels(batches)[:10] == list(range(10))
  assert batches[0]["mask"].tolist() == [True] * 8
  assert batches[1]["mask"].tolist() == [True] * 2 + [False] * 6


def test_held_out_batches_can_be_read_again():
  dataset = data.eval_batches(make_splits(), batch_size=8)
  assert_batches_equal(list(dataset), list(dataset))


# Factories.


@pytest.fixture
def own_module(tmp_path, monkeypatch):
  (tmp_path / "flaxshard_own_data.py").write_text(
    """
import numpy as np
from flaxshard import data
from flaxshard.data import sources

def _source(size):
  numbers = np.arange(size)
  return data.Arrays(numbers * 2.0, numbers)

def numbers(size, held_out=3):
  return data.Splits(_source(size), _source(held_out), num_classes=size)

def anything(**kwargs):
  return numbers(**kwargs)

def nothing():
  return [1, 2]
"""
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  return "flaxshard_own_data"


@pytest.mark.parametrize("function", ["numbers", "anything"])
def test_ones_own_factory(own_module, function):
  splits = data.load({"name": f"{own_module}:{function}", "size": 5})
  assert (len(splits.train), len(splits.eval)) == (5, 3)
  assert splits.num_classes == 5
  assert splits.train[4] == {"inputs": 8.0, "labels": 4}


def test_load_does_not_change_the_config():
  config = {"name": "digits"}
  data.load(config)
  assert config == {"name": "digits"}


def test_load_errors(own_module):
  with pytest.raises(ValueError) as e:
    data.load({"name": "digit"})
  message = str(e.value)
  assert message.startswith("config.data.name: unknown name 'digit'; allowed: ")
  assert "digits, imagenet, text, or 'package.module:attribute'" in message
  assert message.endswith("Did you mean 'digits'?")
  with pytest.raises(ValueError, match=r"config.data must have a 'name'.*size"):
    data.load({"size": 3})
  with pytest.raises(TypeError, match=r"config.data.name must be a string"):
    data.load({"name": 3})
  with pytest.raises(ValueError) as e:
    data.load({"name": "text", "lenght": 3})
  message = str(e.value)
  assert message.startswith("config.data ('text'): unknown argument 'lenght'")
  assert "takes path, suffix, length, eval_every." in message
  assert message.endswith("Did you mean 'length'?")
  with pytest.raises(ValueError, match=r"'digits'.*'size'.* takes none"):
    data.load({"name": "digits", "size": 3})
  with pytest.raises(
    ValueError, match=r"unknown argument 'image_sise'.*image_size"
  ):
    data.load({"name": "imagenet", "image_sise": 3})
  with pytest.raises(TypeError, match=r"config.data .*'size'"):
    data.load({"name": f"{own_module}:numbers"})
  with pytest.raises(TypeError, match=r"must return .*Splits, got list"):
    data.load({"name": f"{own_module}:nothing"})
  with pytest.raises(ValueError, match="cannot be imported"):
    data.load({"name": "flaxshard_no_such_module:numbers"})
  with pytest.raises(ValueError, match="has no attribute 'number'"):
    data.load({"name": f"{own_module}:number"})


@pytest.mark.parametrize(
  ("split", "sizes"),
  [("train", {"size": 0}), ("eval", {"size": 3, "held_out": 0})],
)
def test_an_empty_split_is_refused(own_module, split, sizes):
  with pytest.raises(ValueError, match=f"has no {split} examples"):
    data.load({"name": f"{own_module}:numbers", **sizes})


# Examples that are not like the others.


class Odd:
  """A source of which one example is different."""

  def __init__(self, source, at, **fields):
    self.source, self.at, self.fields = source, at, fields

  def __len__(self):
    return len(self.source)

  def __getitem__(self, index):
    example = self.source[index]
    return {**example, **self.fields} if int(index) == self.at else example


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (
      {"inputs": np.zeros(2, np.float32)},
      r"shapes \{'inputs': \(1,\), 'labels': \(\)\}, got \{'inputs': \(2,\)",
    ),
    ({"extra": 1}, r"got \{.*'extra': \(\)\}"),
    ({"labels": np.int32(12)}, r"labels must lie in \[0, 12\), got \d+ to 12"),
    ({"labels": np.int32(-1)}, r"labels must lie in \[0, 12\), got -1 to"),
    ({"labels": np.float32(1)}, "labels must be integers, got float64"),
  ],
)
def test_an_odd_example_is_an_error_where_it_comes(fields, message):
  splits = make_splits()
  train = data.Splits(Odd(splits.train, 7, **fields), splits.eval, 12)
  drawn = labels(take(data.train_iterator(splits, batch_size=3, seed=0), 4))
  iterator = data.train_iterator(train, batch_size=3, seed=0)
  take(iterator, drawn.index(7) // 3)
  with pytest.raises(ValueError, match=rf"^config\.data: .*{message}"):
    next(iterator)
  held_out = data.Splits(splits.train, Odd(splits.eval, 7, **fields), 12)
  batches = iter(data.eval_batches(held_out, batch_size=4))
  next(batches)
  with pytest.raises(ValueError, match=r"^config\.data: "):
    next(batches)


def test_a_mask_of_ones_own_would_be_lost(monkeypatch):
  source = Odd(make_source(8), 0, mask=True)
  splits = data.Splits(source, source, 8)
  monkeypatch.setitem(sources._FACTORIES, "masked", lambda: splits)
  with pytest.raises(ValueError, match="example 0 of train has a 'mask'"):
    data.load({"name": "masked"})
