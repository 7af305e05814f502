"""Mistakes in data, batches and their options are errors that name them."""

import pathlib
import sys
import types

from grain import MapDataset
import jax
import numpy as np
import pytest

from flaxshard import data
from flaxshard.data import distribute

P = jax.sharding.PartitionSpec
MESH = jax.sharding.Mesh(
  np.array(jax.devices()).reshape(2, 2, 2), ("replica", "m0", "m1")
)
OTHER_MESH = jax.sharding.Mesh(jax.devices(), ("data",))


def split(batch, **options):
  return distribute.shard_batch(MESH, batch, **options)


def leaf(x):
  return split({"a": {"b": x}, "x": np.ones(2)})


def spec(spec):
  return split({"image": np.ones((4, 4, 2)), "label": np.arange(4)}, spec=spec)


def dataset(iterable, mesh=MESH, **options):
  return distribute.DistributedDataset(mesh, iterable, **options)


def distributed(*batches, **options):
  return list(dataset(batches, **options))


def bucketed(*batches, **options):
  return distributed(*batches, bucket="power_of_two", **options)


def rows(count):
  return {"x": np.arange(count)}


def text(length, dense=13):
  ids = {"ids": np.ones((4, length)), "kind": np.ones(4)}
  return {"text": ids, "dense": np.ones((4, dense))}


def iterate(**options):
  splits = data.Splits(data.Arrays(np.ones((12, 1))))
  options = {"batch_size": 4, "seed": 0} | options
  return data.train_iterator(splits, **options)


def read(last):
  """Reads a batch whose last example differs."""
  splits = data.Splits([{"x": np.ones(1)}, last])
  next(data.train_iterator(splits, batch_size=2, seed=0))


def evaluate(source):
  return list(data.eval_batches(data.Splits([], source), batch_size=2))


def examples(size, dtype=np.float32, **fields):
  return [{"inputs": dtype(i), "labels": i, **fields} for i in range(size)]


def load(train=None, evaluation=None, **options):
  """Loads splits that a config names."""
  train = examples(3) if train is None else train
  evaluation = examples(2) if evaluation is None else evaluation
  return load_object(data.Splits(train, evaluation, **options))


def load_object(made):
  module = types.ModuleType("my_data")
  module.made = lambda: made
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "my_data", module)
    return data.load({"name": "my_data:made"})


def two_numbers(example, rng):
  return {**example, "inputs": np.ones(2, np.float32)}


def add_in_place(example, rng):
  example["inputs"] += 1
  return example


ARRAYS = data.Arrays(np.zeros((3, 2), np.float32))
# It raises what would end an iteration.
BROKEN = MapDataset.range(4).map(lambda i: next(iter(())))
TOKENS = np.arange(9)
BYTES = TOKENS.astype(np.uint8)
MASKED = np.ma.masked_array([1, 2], [0, 1])
OBJECTS = np.array([[1, 2], None], object)
WORDS = np.array(["x", "y"])
KEYS = jax.random.split(jax.random.key(0))
UNEVEN = {"image": P("replica", None, ("m0", "m1"))}
FLOATS = {"x": np.ones((4, 2), np.float32)}
WIDER = {"x": np.ones((4, 3), np.float32)}
INTEGERS = {"x": np.ones((4, 2), np.int32)}
FLOAT_MASK = {"x": np.ones(4), "mask": np.ones(4)}
HERE = str(pathlib.Path(__file__).parent)


@pytest.mark.parametrize(
  ("call", "error", "words"),
  [
    # Sources.
    (lambda: data.Windows(BYTES, 4)[2], IndexError, "no window 2 of 2"),
    (lambda: data.Windows(BYTES, 0), ValueError, "Windows: length .* 0"),
    (lambda: data.Windows(TOKENS + 2**32, 4)[1], ValueError, "tokens .* int64"),
    (lambda: data.Windows(BYTES * 0.5, 4)[1], ValueError, "tokens .* float64"),
    (lambda: data.Arrays(), ValueError, "none"),
    (lambda: data.Arrays(a=BYTES, b=[1, 2]), ValueError, "'a': 9, 'b': 2"),
    (lambda: data.text("missing"), ValueError, "path.*missing"),
    (lambda: data.text(HERE, length=10**9), ValueError, "'.py'.*train.*10*1"),
    (lambda: data.text(length=0), ValueError, "length.*1.*got 0"),
    (lambda: data.text(eval_every="2"), ValueError, "eval_every.*got '2'"),
    # Splits of a factory.
    (lambda: load_object([1]), TypeError, r"config\.data.*Splits.*list"),
    (lambda: load(evaluation=[]), ValueError, "my_data:made.*eval"),
    (lambda: load(MapDataset.range(2).repeat()), ValueError, "train.*no end"),
    (lambda: load(num_classes=0), ValueError, "num_classes.*got 0"),
    (lambda: load([3]), ValueError, r"train\[0\].*3"),
    (lambda: load(examples(3, mask=1)), ValueError, r"train\[0\].*'mask'"),
    (lambda: load(examples(3, x="a")), ValueError, r"train\[0\].*x.*<U1"),
    (lambda: load(examples(3, np.float64)), ValueError, "float32.*float64"),
    (lambda: load(ARRAYS, augment=add_in_place), ValueError, "read-only"),
    # The augmented example is what has to match.
    (lambda: load(augment=two_numbers), ValueError, r"\(\).*\(2,\)"),
    # Training batches.
    (lambda: iterate(batch_size=0), ValueError, "batch_size .* 0"),
    (lambda: iterate(batch_size=14), ValueError, "=14 must be at most 12"),
    (lambda: iterate(rows=[2, 1]), ValueError, r"rows .*ascending.*\[2, 1\]"),
    (lambda: iterate(seed=-1), ValueError, "seed .* -1"),
    (lambda: read({"x": TOKENS}), ValueError, r"^config.data: .* \(.* \("),
    (lambda: read({"x": WORDS[:1]}), ValueError, "^config.data: .*<U"),
    (lambda: read(None), ValueError, "^config.data: .* must be a dict.*None"),
    (lambda: evaluate(BROKEN), RuntimeError, "StopIteration"),
    # Leaves of a batch.
    (lambda: leaf(OBJECTS), ValueError, r"\[a/b\].*object.*\(2,\)"),
    (lambda: leaf(WORDS), TypeError, r"\[a/b\].*<U1"),
    (lambda: leaf(MASKED), TypeError, r"\[a/b\].*masked"),
    (lambda: leaf(KEYS), TypeError, r"\[a/b\].*key"),
    (lambda: leaf(np.float32(3)), ValueError, r"\[a/b\].*scalar"),
    (lambda: leaf(np.ones(3)), ValueError, r"\[x\] has 2.*\[a/b\] has 3"),
    (lambda: leaf(TOKENS[:2] + 2**31), ValueError, r"\[a/b\].*int64.*21474"),
    (lambda: leaf(np.full(2, 1e300)), ValueError, r"\[a/b\].*float32"),
    (lambda: split({"a": None}), ValueError, "arrays.*None"),
    (lambda: split(rows(3)), ValueError, r"batch\[x\].*3.*2"),
    (lambda: split(rows(0)), ValueError, r"batch\[x\] has no examples"),
    # Specs and meshes.
    (lambda: spec("replica"), TypeError, "PartitionSpec.*'replica'"),
    (lambda: spec(P("model")), ValueError, "axis: model"),
    (lambda: spec(P(("m0", "m0"))), ValueError, "duplicate.*m0"),
    (lambda: spec({"label": P("m1", "m0")}), ValueError, r"label\].*rank 1"),
    (lambda: spec({"imgae": P()}), ValueError, "'imgae'.*image, label"),
    (lambda: spec(UNEVEN), ValueError, r"image\].*axis 2.*4 times.*size is 2"),
    (lambda: distributed(mesh=OTHER_MESH), ValueError, "'replica'.*'data'"),
    # Datasets.
    (lambda: dataset(rows(8)), TypeError, "iterable.*shard_batch"),
    (lambda: iter(dataset(3)), TypeError, "iterable"),
    (lambda: dataset([], prefatch=1), ValueError, "'prefatch'.*'prefetch'"),
    (lambda: iter(dataset([])).get_state(), TypeError, "list_iterator"),
    (lambda: distributed(rows(8), rows(9)), ValueError, "9 .*8.*batch_size"),
    (lambda: distributed(rows(0)), ValueError, "no examples.*batch_size"),
    # Batches that differ from the first one.
    (lambda: distributed(FLOATS, WIDER), ValueError, r"x:.*3\).* 2\)"),
    (lambda: distributed(FLOATS, INTEGERS), ValueError, "x:.*int32.*float32"),
    # Masks and buckets.
    (lambda: distributed(np.ones(8), np.ones(3)), ValueError, "3 .*8.*mask"),
    (lambda: distributed(FLOAT_MASK), ValueError, r"\[mask\].*bool.*float"),
    (lambda: distributed({"mask": FLOATS}), ValueError, r"\[mask\].*a dict"),
    (lambda: distributed(bucket="even"), ValueError, "bucket.*power_.*'even'"),
    (lambda: distributed(mask=False), TypeError, "mask .*False"),
    (lambda: bucketed(mask=None), ValueError, "bucket.*mask=None"),
    (lambda: distributed(bucket_dims=(1,)), ValueError, "bucket_dims.*power_"),
    (lambda: bucketed(bucket_dims={"x": (-1,)}), ValueError, r"\(-1,\).*x"),
    (lambda: bucketed(rows(4), bucket_dims={"y": (1,)}), ValueError, "'y'.*x"),
    (lambda: bucketed((np.ones(4),)), ValueError, "bucket.*dict"),
    (lambda: bucketed(text(3)), ValueError, r"\[text/ids\] has 3 .*1.* 13"),
    (
      lambda: bucketed(text(3), text(3, 14), bucket_dims={"text": (1,)}),
      ValueError,
      "dense:.*14.*13",
    ),
  ],
)
def test_mistakes(call, error, words):
  with pytest.raises(error, match=words):
    call()
