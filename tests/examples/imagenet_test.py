"""ImageNet: crops, normalization, and reading with TensorFlow Datasets."""

import io
import sys
import types

import numpy as np
import pytest

from flaxshard import data
from flaxshard.examples import imagenet

Image = pytest.importorskip("PIL.Image")

SIZES = [(30, 40), (64, 20), (1, 50), (48, 48)]


def _encode(image, mode="RGB"):
  file = io.BytesIO()
  Image.fromarray(image).convert(mode).save(file, "PNG")
  return file.getvalue()


class FakeBuilder:
  """The part of a TFDS builder that `imagenet` uses."""

  def __init__(self, name, data_dir):
    if name == "no_such":
      raise ValueError("Dataset no_such not found.\nAvailable datasets: ...")
    self.data_dir = f"{data_dir}/{name}/1.0.0"
    self.name = name
    splits = {} if name == "unprepared" else {"train": 4, "validation": 3}
    label = types.SimpleNamespace(num_classes=7)
    self.info = types.SimpleNamespace(features={"label": label}, splits=splits)

  def as_data_source(self, split, decoders):
    assert decoders == {"image": "skipped"}
    if self.name == "tfrecord":
      raise NotImplementedError("not random access")
    if split not in self.info.splits:
      raise ValueError(f"Unknown split {split!r}.")
    return [
      {"image": _encode(np.full((h, w, 3), 10 * i, np.uint8)), "label": i}
      for i, (h, w) in enumerate(SIZES[: self.info.splits[split]])
    ]


@pytest.fixture
def fake_tfds(monkeypatch):
  fake = types.ModuleType("tensorflow_datasets")
  fake.builder = FakeBuilder
  fake.decode = types.SimpleNamespace(SkipDecoding=lambda: "skipped")
  monkeypatch.setitem(sys.modules, "tensorflow_datasets", fake)


def _load(**fields):
  return data.load({"name": "imagenet", "data_dir": "/d", **fields})


def _constant(value, size):
  image = np.full((size, size, 3), value, np.float32)
  return (image - imagenet.MEAN) / imagenet.STD


def test_examples_are_decoded_cropped_and_normalized(fake_tfds):
  splits = _load(image_size=16)
  assert (len(splits.train), len(splits.eval)) == (4, 3)
  assert splits.num_classes == 7
  for i, (h, w) in enumerate(SIZES):
    example = splits.train[i]
    assert example["inputs"].shape == (h, w, 3)
    assert example["inputs"].dtype == np.uint8
    examples = [splits.augment(example, np.random.default_rng(i))]
    if i < 3:
      examples.append(splits.eval[i])
    for example in examples:
      assert example["inputs"].dtype == np.float32
      np.testing.assert_allclose(example["inputs"], _constant(10 * i, 16))
      assert isinstance(example["labels"], np.int32)
      assert example["labels"] == i


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"dataset": "unprepared"}, "'unprepared'.*/d/unprepared"),
    ({"dataset": "tfrecord"}, "python -c.*data_dir='/d'.*'array_record'"),
    ({"dataset": "no_such"}, "dataset='no_such'.*not found.(?!.*Available)"),
    ({"eval_split": "test"}, "eval_split='test'.*Unknown split"),
  ],
)
def test_mistakes(fake_tfds, fields, words):
  with pytest.raises(ValueError, match=f"(?s){words}"):
    _load(**fields)


def test_gray_images_are_converted_to_rgb():
  image = np.arange(12, dtype=np.uint8).reshape(3, 4)
  decoded = imagenet.decode(_encode(image, "L"))
  np.testing.assert_array_equal(decoded, np.stack([image] * 3, -1))


def test_the_center_box_equals_resizing_and_cropping():
  rng = np.random.default_rng(0)
  image = rng.integers(0, 256, (256, 300, 3), np.uint8)
  resized = imagenet.resize(image, imagenet.center_box(256, 300), 224)
  np.testing.assert_array_equal(resized, image[16:240, 38:262])


def test_random_boxes_are_inside_the_image_with_the_stated_sizes():
  rng = np.random.default_rng(0)
  height, width = 200, 300
  boxes = [imagenet.random_box(height, width, rng) for _ in range(300)]
  left, upper, right, lower = np.array(boxes).T
  assert left.min() >= 0 and upper.min() >= 0
  assert right.max() <= width and lower.max() <= height
  area = (right - left) * (lower - upper) / (height * width)
  ratio = (right - left) / (lower - upper)
  assert 0.075 < area.min() < 0.15 and 0.85 < area.max() <= 1
  assert 0.73 < ratio.min() < 0.8 and 1.25 < ratio.max() < 1.36
