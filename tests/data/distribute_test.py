"""Distributed datasets: values, order, reading ahead, errors, position."""

import gc
import itertools
import threading
import time
import traceback
import warnings

import compilations
import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxshard import data
from flaxshard.data import distribute

MESH = jax.sharding.Mesh(np.array(jax.devices()), ("replica",))
PREFETCHES = pytest.mark.parametrize("prefetch", [0, 2])


def distributed(iterable, **options):
  return distribute.DistributedDataset(MESH, iterable, **options)


def examples(count, start=0):
  return {"x": np.arange(start, start + count, dtype=np.int32)}


def epoch(size, batch):
  """Batches of `size` numbered examples; the last one may be short."""
  return [examples(min(batch, size - i), i) for i in range(0, size, batch)]


def real_examples(batches):
  return [
    x
    for batch in batches
    for x in np.asarray(batch["x"])[np.asarray(batch["mask"])].tolist()
  ]


def threads():
  return [t for t in threading.enumerate() if t.name == "flaxshard-prefetch"]


def wait_until(condition, timeout=5.0):
  deadline = time.monotonic() + timeout
  while not condition() and time.monotonic() < deadline:
    time.sleep(0.002)
  assert condition()


@pytest.fixture(autouse=True)
def no_thread_survives():
  yield
  if threads():  # an iterator in a cycle with an error that a test looked at
    gc.collect()
  wait_until(lambda: not threads())


# Values.


def test_batches_of_any_size_need_one_compilation():
  dataset = distributed(epoch(43, 16))
  for _ in range(2):  # each iter() of a list starts a new epoch
    batches = list(dataset)
    assert real_examples(batches) == list(range(43))
  add = jax.jit(lambda batch: (batch["x"] * batch["mask"]).sum())
  with compilations.count() as compiled:
    sums = [int(add(batch)) for batch in batches]
  assert compiled.total == 1
  assert sum(sums) == sum(range(43))


@PREFETCHES
def test_a_source_may_reuse_its_arrays(prefetch):
  def source(rows, count):
    x = np.zeros((rows, 64), np.int32)
    for i in range(count):
      x[:] = i
      yield {"x": x}
    x[:] = -1

  batches = list(distributed(source(8, 6), prefetch=prefetch))
  assert [b["x"][3, 5].item() for b in batches] == list(range(6))
  assert all((np.asarray(b["x"]) == b["x"][0, 0]).all() for b in batches)
  joined = distribute.distribute_datasets_from_function(
    MESH, lambda _: source(1, 16), prefetch=prefetch
  )
  rows = [x for batch in joined for x in batch["x"][:, 0].tolist()]
  assert rows == list(range(16))


def test_the_thread_uses_the_x64_setting_of_the_caller():
  big = {"x": np.full(8, 2**40)}
  with jax.enable_x64(True):
    (batch,) = distributed([big])
    assert batch["x"].dtype == jnp.int64 and batch["x"][0] == 2**40


# Iterables.


@PREFETCHES
def test_a_generator_has_one_epoch_whose_iterators_are_one(prefetch):
  dataset = distributed((batch for batch in epoch(24, 8)), prefetch=prefetch)
  first = real_examples([next(iter(dataset))])
  # No batch that was read ahead is lost.
  assert first + real_examples(dataset) == list(range(24))
  with pytest.warns(UserWarning, match="generator"):
    assert list(dataset) == []


def test_a_grain_iterator_may_be_set_back_from_its_end():
  source = grain.MapDataset.range(24).map(lambda i: {"x": i}).batch(8)
  dataset = distributed(iter(source.to_iter_dataset()))
  start = iter(dataset).get_state()
  for _ in range(2):
    with warnings.catch_warnings(action="error"):
      assert real_examples(dataset) == list(range(24))
      iter(dataset).set_state(start)


# Reading ahead.


@PREFETCHES
def test_reads_ahead_as_many_batches_as_requested(prefetch):
  read = []

  def source():
    for batch in epoch(800, 8):
      read.append(batch)
      yield batch

  iterator = iter(distributed(source(), prefetch=prefetch))
  assert not read
  for i in range(1, 4):
    next(iterator)
    wait_until(lambda i=i: len(read) >= i + prefetch)
    time.sleep(0.01)
    assert len(read) == i + prefetch
  assert len(threads()) == (prefetch > 0)
  iterator.close()


# Errors and the end.


def failing(error, after=3):
  for i in range(after):
    yield examples(8, 8 * i)
  raise error


@pytest.mark.parametrize(
  ("prefetch", "error"), [(0, KeyError("disk")), (2, SystemExit(3))]
)
def test_an_error_is_raised_after_the_batches_before_it(prefetch, error):
  iterator = iter(distributed(failing(error), prefetch=prefetch))
  batches = [next(iterator) for _ in range(3)]
  assert real_examples(batches) == list(range(24))
  with pytest.raises(type(error)) as e:
    next(iterator)
  assert e.value is error
  lines = "".join(traceback.format_exception(e.value))
  assert "in failing" in lines and "raise error" in lines
  # A generator ends with its first error.
  with pytest.raises(StopIteration):
    next(iterator)


@pytest.mark.parametrize("how", ["drop", "with", "raise"])
def test_the_thread_ends_with_its_iterator(how):
  closed = threading.Event()

  def source():
    try:
      for i in itertools.count():
        yield examples(8, i)
    finally:
      closed.set()

  iterator = iter(distributed(source()))
  next(iterator)
  assert len(threads()) == 1
  if how == "with":
    with iterator:
      next(iterator)
    assert not threads()  # the end of the block waits for the thread
    iterator.close()
  elif how == "raise":
    with pytest.raises(ZeroDivisionError):
      for _ in iterator:
        raise ZeroDivisionError
  del iterator
  if how == "raise":
    gc.collect()  # the traceback of the error is in a cycle
  assert closed.wait(5)
  wait_until(lambda: not threads())


# Position.


@PREFETCHES
def test_the_position_is_that_of_the_last_batch_returned(prefetch):
  source = grain.MapDataset.range(40).map(lambda i: {"x": i}).shuffle(seed=1)
  dataset = distributed(source.batch(8).to_iter_dataset(), prefetch=prefetch)
  whole = real_examples(dataset)
  assert sorted(whole) == list(range(40))
  for count in (0, 2, 5):
    iterator = iter(dataset)
    head = real_examples(itertools.islice(iterator, count))
    time.sleep(0.01)  # so that the thread reads ahead
    state = iterator.get_state()
    assert state == {"next_index": count}  # that of Grain
    resumed = iter(dataset)
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert head + real_examples(resumed) == whole
    # Back in the same iterator too, even from its end.
    assert head + real_examples(iterator) == whole
    iterator.set_state(state)
    assert head + real_examples(iterator) == whole


def test_the_position_counts_dropped_and_joined_batches():
  source = grain.MapDataset.range(80).map(lambda i: {"x": i}).batch(4)
  dataset = distribute.distribute_datasets_from_function(
    MESH, lambda _: source.to_iter_dataset(), drop_remainder=True
  )
  iterator = iter(dataset)
  assert real_examples([next(iterator)]) == list(range(32))
  state = iterator.get_state()
  assert state == {"next_index": 8}
  for _ in range(2):
    # Examples 64 to 79 do not fill a global batch.
    assert real_examples(iterator) == list(range(32, 64))
    iterator.set_state(state)


# Datasets from a function.


def test_a_function_gets_the_context_and_returns_batches_of_replicas():
  contexts = []

  def dataset_fn(context):
    contexts.append(context)
    return epoch(43, context.get_per_replica_batch_size(32))

  dataset = distribute.distribute_datasets_from_function(MESH, dataset_fn)
  for _ in range(2):
    batches = list(dataset)
    assert [b["x"].shape for b in batches] == [(32,), (32,)]
    assert real_examples(batches) == list(range(43))
  assert contexts == [distribute.InputContext(1, 0, 8)]
  for i, shard in enumerate(batches[0]["x"].addressable_shards):
    assert shard.data.tolist() == list(range(4 * i, 4 * i + 4))


@pytest.mark.parametrize("is_stream", [False, True])
def test_skipped_batches_are_not_returned(is_stream):
  numbers = data.Arrays(np.arange(200))
  source = grain.MapDataset.source(numbers).to_iter_dataset()
  splits = data.Splits(source if is_stream else numbers)
  returned = []
  for skipped in (0, 3):
    batches = data.train_iterator(splits, batch_size=8, seed=0)
    with iter(distributed(batches, mask=None)) as iterator:
      iterator.skip(skipped)
      returned.append([next(iterator)["inputs"].tolist() for _ in range(5)])
      state = iterator.get_state()
  assert returned[1][:2] == returned[0][3:]
  assert state["examples"] == 64 if is_stream else state == {"next_index": 8}
