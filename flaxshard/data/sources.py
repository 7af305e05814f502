"""Data: sources, and batches through Grain.

`config.data` names a factory and its arguments. A factory returns `Splits`:
random-access sources of examples, each a dict with `inputs` and integer
`labels`. `"digits"`, `"text"` and `"imagenet"` come with flaxshard; one's own
is named `"package.module:factory"`:

    config.data = {"name": "my_project.data:flowers", "image_size": 64}

    def flowers(image_size: int) -> flaxshard.data.Splits: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import pathlib
import sysconfig
from typing import Any, Protocol, SupportsIndex

import grain
import numpy as np

from flaxshard.core import registry

Example = dict[str, Any]


class Source(Protocol):
  """A random-access source of examples, as Grain takes them."""

  def __len__(self) -> int:
    """Returns the number of examples."""
    ...

  def __getitem__(self, index: SupportsIndex) -> Example:
    """Returns example `index`."""
    ...


@dataclasses.dataclass(frozen=True)
class Splits:
  """What a data factory returns.

  Attributes:
    train: Examples `{"inputs": array, "labels": int array}`.
    eval: The held-out examples, alike.
    num_classes: Labels lie in `[0, num_classes)`.
    augment: Applied to each training example with a seeded generator.
  """

  train: Source
  eval: Source
  num_classes: int
  augment: Callable[[Example, np.random.Generator], Example] | None = None


def load(config: Mapping[str, Any]) -> Splits:
  """Calls the factory that `config.data` names with its other fields.

  Args:
    config: `{"name": ..., **arguments}`.

  Returns:
    The splits.

  Raises:
    ValueError: An unknown name or argument; an empty split.
    TypeError: The factory returned something else.

  Example:
    >>> splits = load({"name": "digits"})
    >>> len(splits.train), len(splits.eval), splits.num_classes
    (1437, 360, 10)
  """
  splits = registry.call("config.data", config, _FACTORIES)
  if not isinstance(splits, Splits):
    raise TypeError(
      f"config.data: {config['name']!r} must return flaxshard.data.Splits, "
      f"got {type(splits).__name__}."
    )
  _check_splits(f"config.data ({config['name']!r})", splits)
  return splits


def _check_splits(where: str, splits: Splits) -> None:
  for split in ("train", "eval"):
    if not len(getattr(splits, split)):
      raise ValueError(f"{where} has no {split} examples.")
  if not splits.num_classes >= 1:
    raise ValueError(
      f"{where}: num_classes must be at least 1, got {splits.num_classes!r}."
    )
  train: Any = splits.train[0]
  if splits.augment is not None:
    train = splits.augment(train, np.random.default_rng(0))
  shapes = {}
  for split, example in (("train", train), ("eval", splits.eval[0])):
    example_of = f"{where}: example 0 of {split}"
    if not isinstance(example, Mapping) or not {"inputs", "labels"} <= set(
      example
    ):
      raise ValueError(
        f"{example_of} must be a dict with 'inputs' and 'labels', "
        f"got {example!r}."
      )
    if "mask" in example:
      raise ValueError(
        f"{example_of} has a 'mask', which here tells what fills up the last "
        "batch; call it otherwise."
      )
    arrays = {key: np.asarray(value) for key, value in example.items()}
    for key, value in arrays.items():
      if not (
        np.issubdtype(value.dtype, np.number)
        or np.issubdtype(value.dtype, np.bool_)
      ):
        raise ValueError(f"{example_of}: {key} is {value.dtype}, no number.")
    check_labels(example_of, arrays["labels"], splits.num_classes)
    shapes[split] = {k: (v.shape, v.dtype.name) for k, v in arrays.items()}
  if shapes["train"] != shapes["eval"]:
    raise ValueError(
      f"{where}: examples of train and eval differ: {shapes['train']} and "
      f"{shapes['eval']}."
    )


def check_labels(where: str, labels: Any, num_classes: int) -> None:
  """Raises a ValueError unless labels are integers in [0, num_classes)."""
  labels = np.asarray(labels)
  if not np.issubdtype(labels.dtype, np.integer):
    raise ValueError(f"{where}: labels must be integers, got {labels.dtype}.")
  if labels.min() < 0 or labels.max() >= num_classes:
    raise ValueError(
      f"{where}: labels must lie in [0, {num_classes}), got "
      f"{labels.min()} to {labels.max()}."
    )


def train_iterator(
  splits: Splits,
  *,
  batch_size: int,
  seed: int,
  process_index: int = 0,
  process_count: int = 1,
) -> grain.DatasetIterator:
  """Returns an endless iterator over this process's part of global batches.

  The order is a function of `seed` alone: each epoch is shuffled anew, batch n
  has the same examples however many processes share it, and
  `get_state` / `set_state` continue exactly.

  Args:
    splits: The data.
    batch_size: The global batch size, a multiple of `process_count`.
    seed: Seeds shuffling and augmentation.
    process_index: This process.
    process_count: All of them.

  Returns:
    An iterator over dicts of arrays `[batch_size / process_count, ...]`.
  """
  dataset = grain.MapDataset.source(splits.train).seed(seed).shuffle().repeat()
  if splits.augment is not None:
    dataset = dataset.random_map(_Augment(splits.augment))
  # After what is random: its seeds count examples of all processes.
  dataset = dataset[process_index::process_count]
  dataset = dataset.map(_CheckShapes(_shapes(splits.eval[0])))
  return iter(_batch(dataset, splits, batch_size // process_count))


def eval_batches(
  splits: Splits,
  *,
  batch_size: int,
  process_index: int = 0,
  process_count: int = 1,
) -> grain.IterDataset:
  """Returns this process's part of the held-out batches, each example once.

  The last batch is filled up to `batch_size`; `mask` (bool `[batch]`) is False
  where it is.
  """
  padded = -(-len(splits.eval) // batch_size) * batch_size
  source = _Padded(splits.eval, padded)
  dataset = grain.MapDataset.source(source)[process_index::process_count]
  dataset = dataset.map(_CheckShapes(_shapes(source[0])))
  return _batch(dataset, splits, batch_size // process_count)


def _batch(
  dataset: grain.MapDataset, splits: Splits, size: int
) -> grain.IterDataset:
  dataset = dataset.batch(size, drop_remainder=True)
  dataset = dataset.map(_CheckLabels(splits.num_classes))
  return dataset.to_iter_dataset(_READ_OPTIONS)


def digits() -> Splits:
  """scikit-learn's 1,797 handwritten digits; every fifth one is held out.

  Inputs are float32 `[8, 8, 1]` in [0, 1], labels int32 scalars in [0, 10).
  """
  try:
    from sklearn import datasets
  except ImportError as e:
    raise ImportError(
      "config.data 'digits' needs scikit-learn: pip install 'flaxshard[train]'"
    ) from e
  images, labels = datasets.load_digits(return_X_y=True)
  inputs = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
  labels = labels.astype(np.int32)
  held_out = np.arange(len(labels)) % 5 == 0
  return Splits(
    train=Arrays(inputs[~held_out], labels[~held_out]),
    eval=Arrays(inputs[held_out], labels[held_out]),
    num_classes=10,
  )


def text(
  path: str = "", suffix: str = ".py", length: int = 128, eval_every: int = 20
) -> Splits:
  """Bytes of text files, cut into windows for a byte-level language model.

  Inputs and labels are int32 `[length]`: bytes, and the byte after each.

  Args:
    path: A folder, searched through; empty: the standard library of the running
      Python, without installed packages.
    suffix: Which files, by the end of their names.
    length: Bytes in a window.
    eval_every: Every n-th file, by sorted path, is held out.

  Raises:
    ValueError: `path` is no folder, or has too few bytes in such files.
  """
  if not isinstance(path, str):
    raise TypeError(f"config.data.path must be a string, got {path!r}.")
  root = pathlib.Path(path or sysconfig.get_paths()["stdlib"]).expanduser()
  if not root.is_dir():
    raise ValueError(f"config.data.path={path!r} is not a folder.")
  for argument, value, least in (
    ("length", length, 1),
    ("eval_every", eval_every, 2),
  ):
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
      raise ValueError(
        f"config.data.{argument} must be an integer of at least {least}, "
        f"got {value!r}."
      )
  installed = {"site-packages", "dist-packages", "__pycache__"}
  files = sorted(
    f
    for f in root.rglob(f"*{suffix}")
    if f.is_file() and (path or not installed & set(f.relative_to(root).parts))
  )
  held_out = set(files[eval_every - 1 :: eval_every])
  sources = {}
  for split, chosen in (
    ("train", [f for f in files if f not in held_out]),
    ("eval", [f for f in files if f in held_out]),
  ):
    joined = b"\0".join(f.read_bytes() for f in chosen)
    if len(joined) <= length:
      raise ValueError(
        f"config.data.path={str(root)!r} has {len(files)} files that end in "
        f"{suffix!r}; the {split} split gets {len(joined)} bytes of them, at "
        f"least {length + 1} are needed."
      )
    sources[split] = Windows(np.frombuffer(joined, np.uint8), length)
  return Splits(sources["train"], sources["eval"], num_classes=256)


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
  """A source over arrays that are in memory.

  Attributes:
    inputs: `[examples, ...]`.
    labels: `[examples, ...]`.
  """

  inputs: np.ndarray
  labels: np.ndarray

  def __len__(self) -> int:
    """Returns the number of examples."""
    return len(self.labels)

  def __getitem__(self, index: SupportsIndex) -> Example:
    """Returns example `index`."""
    return {"inputs": self.inputs[index], "labels": self.labels[index]}


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
  """A source of windows over a sequence of tokens, without overlap.

  Attributes:
    tokens: `[tokens]`, integers.
    length: Tokens in a window.
  """

  tokens: np.ndarray
  length: int

  def __len__(self) -> int:
    """Returns the number of windows."""
    return (len(self.tokens) - 1) // self.length

  def __getitem__(self, index: SupportsIndex) -> Example:
    """Returns window `index` and its labels, one token later."""
    start = int(index) * self.length
    window = self.tokens[start : start + self.length + 1].astype(np.int32)
    return {"inputs": window[:-1], "labels": window[1:]}


@dataclasses.dataclass(frozen=True, eq=False)
class _Padded:
  source: Source
  length: int

  def __len__(self) -> int:
    return self.length

  def __getitem__(self, index: SupportsIndex) -> Example:
    index = int(index)
    real = index < len(self.source)
    return {**self.source[index if real else 0], "mask": np.bool_(real)}


@dataclasses.dataclass(frozen=True)
class _Augment(grain.transforms.RandomMap):
  fn: Callable[[Example, np.random.Generator], Example]

  def random_map(self, element: Example, rng: np.random.Generator) -> Example:
    return self.fn(element, rng)


def _shapes(example: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  return {key: np.shape(x) for key, x in example.items()}


@dataclasses.dataclass(frozen=True)
class _CheckShapes(grain.transforms.Map):
  shapes: Mapping[str, tuple[int, ...]]

  def map(self, element: Example) -> Example:
    shapes = _shapes(element)
    if shapes != self.shapes:
      raise ValueError(
        f"config.data: every example must have the shapes {self.shapes}, got "
        f"{shapes}."
      )
    return element


@dataclasses.dataclass(frozen=True)
class _CheckLabels(grain.transforms.Map):
  num_classes: int

  def map(self, element: Example) -> Example:
    # On the device a label out of range would be a NaN, or another class.
    check_labels("config.data", element["labels"], self.num_classes)
    return element


_READ_OPTIONS = grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)

_FACTORIES: dict[str, Any] = {
  "digits": digits,
  "text": text,
  "imagenet": "flaxshard.data.imagenet:imagenet",
}
