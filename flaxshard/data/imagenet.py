"""ImageNet, through TensorFlow Datasets.

Prepared ArrayRecord files are read without TensorFlow, and images are decoded
by Pillow; only preparing the files needs TensorFlow.
"""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any, SupportsIndex

import numpy as np

from flaxshard.data.sources import Example
from flaxshard.data.sources import Source
from flaxshard.data.sources import Splits

Box = tuple[float, float, float, float]

# Mean and deviation of the pixels of ImageNet, by channel, of 255.
MEAN = np.array([0.485, 0.456, 0.406], np.float32) * 255
STD = np.array([0.229, 0.224, 0.225], np.float32) * 255


def imagenet(
  *,
  data_dir: str | None = None,
  image_size: int = 224,
  dataset: str = "imagenet2012",
  train_split: str = "train",
  eval_split: str = "validation",
) -> Splits:
  """ImageNet's 1,281,167 training and 50,000 validation images.

  Inputs are float32 `[image_size, image_size, 3]`, normalized by channel;
  labels are int32 scalars. Training images are cropped at random, to 8 % of
  their area at least, resized, and flipped half of the time; validation images
  are resized to 256/224 of the size by their shorter side and cropped in the
  centre.

  Args:
    data_dir: Where TensorFlow Datasets keeps prepared datasets; None or `""` is
      its default, `$TFDS_DATA_DIR` or `~/tensorflow_datasets`.
    image_size: Height and width of the inputs.
    dataset: Its name there, or that of another dataset with the features
      `image` and `label`, such as `"imagenette/160px-v2"`.
    train_split: Which split to train on; slices such as `"train[:99%]"` work.
    eval_split: Which split is held out.

  Returns:
    The splits. Examples of the train split hold the whole uint8 images; its
    `augment` makes them inputs.

  Raises:
    ImportError: TensorFlow Datasets or Pillow is not installed.
    ValueError: The dataset is not prepared in `data_dir` as ArrayRecord files,
      has no such split or other features; `image_size` is not positive.

  Example:
    >>> splits = imagenet(data_dir="/data/tfds")  # doctest: +SKIP
    >>> splits.eval[0]["inputs"].shape  # doctest: +SKIP
    (224, 224, 3)
  """
  if not isinstance(image_size, int) or image_size < 1:
    raise ValueError(
      f"config.data.image_size must be a positive integer, got {image_size!r}."
    )
  try:
    import PIL.Image  # noqa: F401
    import tensorflow_datasets as tfds
  except ImportError as e:
    raise ImportError(
      f"config.data 'imagenet' needs {e.name}: "
      "pip install 'flaxshard[imagenet]'"
    ) from e
  try:
    builder = tfds.builder(dataset, data_dir=data_dir or None)
  except ValueError as e:
    # TFDS goes on to list every dataset there is.
    reason = str(e).partition("\n")[0]
    raise ValueError(f"config.data.dataset={dataset!r}: {reason}") from e
  if not builder.info.splits:
    raise ValueError(_not_prepared(builder, dataset, data_dir))
  features = builder.info.features
  for name, kind in (
    ("image", tfds.features.Image),
    ("label", tfds.features.ClassLabel),
  ):
    if name not in features or not isinstance(features[name], kind):
      raise ValueError(
        f"config.data.dataset={dataset!r} must have the features image (an "
        f"Image) and label (a ClassLabel); it has {features!r}."
      )
  sources = []
  for argument, split in (
    ("train_split", train_split),
    ("eval_split", eval_split),
  ):
    try:
      source = builder.as_data_source(
        split, decoders={"image": tfds.decode.SkipDecoding()}
      )
    except NotImplementedError as e:  # files of another format
      raise ValueError(_not_prepared(builder, dataset, data_dir)) from e
    except ValueError as e:
      raise ValueError(f"config.data.{argument}={split!r}: {e}") from e
    sources.append(Images(source))
  return Splits(
    train=sources[0],
    eval=CenterCropped(sources[1], image_size),
    num_classes=features["label"].num_classes,
    augment=RandomCropAndFlip(image_size),
  )


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
  """A source of whole images.

  Attributes:
    source: Examples `{"image": bytes of an image file, "label": int}`.
  """

  source: Any

  def __len__(self) -> int:
    """Returns the number of images."""
    return len(self.source)

  def __getitem__(self, index: SupportsIndex) -> Example:
    """Returns example `index`: inputs uint8 `[h, w, 3]`, labels int32 `[]`."""
    example = self.source[index]
    return {
      "inputs": decode(example["image"]),
      "labels": np.int32(example["label"]),
    }


@dataclasses.dataclass(frozen=True, eq=False)
class CenterCropped:
  """A source of the centres of another one's images.

  Attributes:
    source: Examples with inputs uint8 `[h, w, 3]`.
    image_size: Height and width of the inputs that come out.
  """

  source: Source
  image_size: int

  def __len__(self) -> int:
    """Returns the number of images."""
    return len(self.source)

  def __getitem__(self, index: SupportsIndex) -> Example:
    """Returns example `index`, inputs float32 `[image_size, image_size, 3]`."""
    example = self.source[index]
    image = example["inputs"]
    height, width, _ = image.shape
    box = center_box(height, width)
    return {
      **example,
      "inputs": normalize(resize(image, box, self.image_size)),
    }


@dataclasses.dataclass(frozen=True)
class RandomCropAndFlip:
  """Crops an image at random, resizes it, and flips it half of the time.

  Attributes:
    image_size: Height and width of the inputs that come out.
  """

  image_size: int

  def __call__(self, example: Example, rng: np.random.Generator) -> Example:
    """Returns the example with inputs float32 `[image_size, image_size, 3]`.

    Args:
      example: Its inputs are uint8 `[h, w, 3]`.
      rng: Draws the crop and the flip.
    """
    image = example["inputs"]
    height, width, _ = image.shape
    box = random_box(height, width, rng)
    image = resize(image, box, self.image_size)
    if rng.random() < 0.5:
      image = image[:, ::-1]
    return {**example, "inputs": normalize(image)}


def decode(data: bytes) -> np.ndarray:
  """Decodes an image file to uint8 `[h, w, 3]`."""
  from PIL import Image

  with Image.open(io.BytesIO(data)) as image:
    return np.asarray(image.convert("RGB"))


def resize(image: np.ndarray, box: Box, size: int) -> np.ndarray:
  """Resizes a part of an image, bilinearly and with antialiasing.

  Args:
    image: uint8 `[h, w, 3]`.
    box: Left, upper, right and lower edge of the part, in pixels.
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
  """Takes uint8 `[..., 3]` to float32 of mean 0 and deviation 1, on average."""
  return (image.astype(np.float32) - MEAN) / STD


def center_box(height: int, width: int) -> Box:
  """Returns the central square of 224/256 of an image's shorter side.

  Resized to 224, it is what resizing the shorter side to 256 and cropping 224
  gives, with one interpolation and nothing rounded.

  Example:
    >>> center_box(256, 300)
    (38.0, 16.0, 262.0, 240.0)
  """
  side = min(height, width) * 224 / 256
  left, upper = (width - side) / 2, (height - side) / 2
  return left, upper, left + side, upper + side


def random_box(height: int, width: int, rng: np.random.Generator) -> Box:
  """Draws a crop as Inception was trained with.

  Args:
    height: Of the image.
    width: Of the image.
    rng: The generator.

  Returns:
    A box of whole pixels that has 8 to 100 % of the image's area and sides in a
    ratio of 3/4 to 4/3, up to rounding. If none of ten draws fits into the
    image, the largest central box in that ratio.
  """
  for _ in range(10):
    area = rng.uniform(0.08, 1.0) * height * width
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
  where = f", data_dir={data_dir!r}" if data_dir else ""
  return (
    f"config.data.dataset={dataset!r} is not prepared as ArrayRecord files in "
    f"{builder.data_dir}. This prepares it, once, with tensorflow and "
    "importlib_resources installed (ImageNet's ILSVRC2012_img_train.tar and "
    "ILSVRC2012_img_val.tar have to lie in downloads/manual of the data_dir): "
    f'python -c "import tensorflow_datasets as tfds; tfds.builder({dataset!r}'
    f"{where}, file_format='array_record').download_and_prepare()\""
  )
