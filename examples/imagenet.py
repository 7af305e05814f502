"""ImageNet, through TensorFlow Datasets.

Preparing the dataset as ArrayRecord files needs TensorFlow. Reading it does
not: TensorFlow Datasets reads the files, and Pillow decodes the images.
"""

from __future__ import annotations

import functools
import io
import math
from typing import Any

import grain
import jax
import numpy as np

from flaxshard import data

# Left, upper, right and lower edge in pixels, as in Pillow.
Box = tuple[float, float, float, float]

# Mean and standard deviation of ImageNet's pixels in [0, 255], by channel.
MEAN = np.array([0.485, 0.456, 0.406], np.float32) * 255
STD = np.array([0.229, 0.224, 0.225], np.float32) * 255


# ILSVRC 2012 has 1,000 classes: Russakovsky et al., 2015 (arXiv:1409.0575).
_NUM_CLASSES = {"imagenet2012": 1000}


def _imagenet_shapes(
  image_size: int, dataset: str, data_dir: str | None, **others: Any
) -> data.Shapes:
  del others  # which splits are read
  num_classes = _NUM_CLASSES.get(dataset)
  if num_classes is None:
    # The classes of a dataset are known before it is prepared.
    _, builder = _builder(dataset, data_dir)
    num_classes = builder.info.features["label"].num_classes
  example = {
    "inputs": jax.ShapeDtypeStruct((image_size, image_size, 3), np.float32),
    "labels": jax.ShapeDtypeStruct((), np.int32),
  }
  return data.Shapes(example, num_classes)


@data.shapes_from(_imagenet_shapes)
def imagenet(
  *,
  data_dir: str | None = None,
  image_size: int = 224,
  dataset: str = "imagenet2012",
  train_split: str = "train",
  eval_split: str = "validation",
) -> data.Splits:
  """Loads ImageNet: 1,281,167 training and 50,000 validation images.

  Inputs are float32 `[image_size, image_size, 3]`, normalized by channel.
  Labels are int32 scalars. Training images are cropped at random to 8 to 100 %
  of their area, resized, and flipped with probability 1/2. Validation images
  are resized so that their shorter side is 256/224 of the size, and cropped at
  the center.

  Args:
    data_dir: The folder of prepared datasets. None and `""` stand for the
      default of TensorFlow Datasets: `$TFDS_DATA_DIR` or
      `~/tensorflow_datasets`.
    image_size: Height and width of the inputs.
    dataset: The name of the dataset in TensorFlow Datasets. It must have the
      features `image` and `label`, as `"imagenette/160px-v2"` has.
    train_split: The training split. Slices such as `"train[:99%]"` work.
    eval_split: The evaluation split.

  Returns:
    The splits. Training examples are whole uint8 images; `Splits.augment`
    crops and normalizes them.

  Raises:
    ImportError: TensorFlow Datasets or Pillow is not installed.
    ValueError: The dataset is not prepared in `data_dir` as ArrayRecord files,
      has no such split, or has other features.

  Example:
    >>> splits = imagenet(data_dir="/data/tfds")  # doctest: +SKIP
    >>> splits.eval[0]["inputs"].shape  # doctest: +SKIP
    (224, 224, 3)
  """
  tfds, builder = _builder(dataset, data_dir)
  if not builder.info.splits:
    raise ValueError(_not_prepared(builder, dataset, data_dir))
  sources = {}
  splits = {"train_split": train_split, "eval_split": eval_split}
  for argument, split in splits.items():
    try:
      # Decoded with Pillow, which needs no TensorFlow.
      source = builder.as_data_source(
        split, decoders={"image": tfds.decode.SkipDecoding()}
      )
    except NotImplementedError as e:
      # The files have another format, TFRecord by default.
      raise ValueError(_not_prepared(builder, dataset, data_dir)) from e
    except ValueError as e:
      raise ValueError(f"{argument}={split!r}: {e}") from e
    sources[argument] = grain.MapDataset.source(source).map(_decode_example)
  crop_center = functools.partial(_crop_center, image_size)
  return data.Splits(
    train=sources["train_split"],
    eval=sources["eval_split"].map(crop_center),
    num_classes=builder.info.features["label"].num_classes,
    augment=functools.partial(_crop_and_flip, image_size),
  )


def _builder(dataset: str, data_dir: str | None) -> tuple[Any, Any]:
  """Returns TensorFlow Datasets and its builder of a dataset."""
  try:
    import PIL.Image  # noqa: F401
    import tensorflow_datasets as tfds
  except ImportError as e:
    raise ImportError(
      f"config.data 'imagenet' needs {e.name}: "
      "pip install 'flaxshard[imagenet]'"
    ) from e
  try:
    return tfds, tfds.builder(dataset, data_dir=data_dir or None)
  except ValueError as e:
    # The other lines of the message list all datasets of TFDS.
    reason = str(e).partition("\n")[0]
    raise ValueError(f"dataset={dataset!r}: {reason}") from e


def _decode_example(example: data.Example) -> data.Example:
  """Returns inputs uint8 `[h, w, 3]` and labels int32 `[]`."""
  return {
    "inputs": decode(example["image"]),
    "labels": np.int32(example["label"]),
  }


def _crop_center(size: int, example: data.Example) -> data.Example:
  """Returns an example with the center of the image, normalized."""
  image = example["inputs"]
  height, width, _ = image.shape
  image = resize(image, center_box(height, width), size)
  return {**example, "inputs": normalize(image)}


def _crop_and_flip(
  size: int, example: data.Example, rng: np.random.Generator
) -> data.Example:
  """Returns an example with a random part of the image, normalized."""
  image = example["inputs"]
  height, width, _ = image.shape
  image = resize(image, random_box(height, width, rng), size)
  if rng.random() < 0.5:
    image = image[:, ::-1]
  return {**example, "inputs": normalize(image)}


def decode(content: bytes) -> np.ndarray:
  """Decodes the contents of an image file to uint8 `[h, w, 3]`."""
  # Imported here, so that this module can be imported without Pillow.
  from PIL import Image

  with Image.open(io.BytesIO(content)) as image:
    # ImageNet has a few gray and CMYK images.
    return np.asarray(image.convert("RGB"))


def resize(image: np.ndarray, box: Box, size: int) -> np.ndarray:
  """Resizes a part of an image bilinearly, with antialiasing.

  Args:
    image: uint8 `[h, w, 3]`.
    box: The part; its edges may be fractions of pixels.
    size: Height and width of the result.

  Returns:
    uint8 `[size, size, 3]`.
  """
  from PIL import Image

  resized = Image.fromarray(image).resize(
    (size, size), Image.Resampling.BILINEAR, box
  )
  return np.asarray(resized)


def normalize(image: np.ndarray) -> np.ndarray:
  """Normalizes uint8 `[..., 3]` by ImageNet's mean and deviation to float32."""
  return (image.astype(np.float32) - MEAN) / STD


def center_box(height: int, width: int) -> Box:
  """Returns the central square with 224/256 of the shorter side of an image.

  Resizing this square to 224 equals resizing the shorter side to 256 and then
  cropping 224, but interpolates only once and rounds no size.

  Args:
    height: Height of the image.
    width: Width of the image.

  Example:
    >>> center_box(256, 300)
    (38.0, 16.0, 262.0, 240.0)
  """
  side = min(height, width) * 224 / 256
  left, upper = (width - side) / 2, (height - side) / 2
  return left, upper, left + side, upper + side


def random_box(height: int, width: int, rng: np.random.Generator) -> Box:
  """Draws a random crop, as in the training of Inception.

  Args:
    height: Height of the image.
    width: Width of the image.
    rng: The generator.

  Returns:
    A box of whole pixels with 8 to 100 % of the image's area and an aspect
    ratio from 3/4 to 4/3, up to rounding. If none of ten draws fits into the
    image: the largest central box with such a ratio.

  References:
    Szegedy et al., Going deeper with convolutions, 2014 (arXiv:1409.4842).
  """
  for _ in range(10):
    area = rng.uniform(0.08, 1.0) * height * width
    # Uniform in the logarithm, so that 3/4 and 4/3 are equally likely.
    ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
    if 0 < w <= width and 0 < h <= height:
      left = int(rng.integers(width - w + 1))
      upper = int(rng.integers(height - h + 1))
      return left, upper, left + w, upper + h
  w = min(width, max(1, round(height * 4 / 3)))
  h = min(height, max(1, round(width * 4 / 3)))
  left, upper = (width - w) // 2, (height - h) // 2
  return left, upper, left + w, upper + h


def _not_prepared(builder: Any, dataset: str, data_dir: str | None) -> str:
  """Returns an error message with the command that prepares a dataset."""
  where = f", data_dir={data_dir!r}" if data_dir else ""
  return (
    f"dataset={dataset!r} is not prepared as ArrayRecord files in "
    f"{builder.data_dir}. To prepare it, install tensorflow and "
    "importlib_resources, put ImageNet's ILSVRC2012_img_train.tar and "
    "ILSVRC2012_img_val.tar into downloads/manual of the data_dir, and run: "
    f'python -c "import tensorflow_datasets as tfds; tfds.builder({dataset!r}'
    f"{where}, file_format='array_record').download_and_prepare()\""
  )
