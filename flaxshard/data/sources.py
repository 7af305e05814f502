"""Data sources: what the batches of a run are read from, and made of.

A source gives examples, each a dict of arrays. The training examples may be a
stream too, which has no length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import itertools
import operator
import sys
from typing import Any, Protocol, SupportsIndex

import jax
import numpy as np

from flaxshard.core import checks
from flaxshard.core import registry
from flaxshard.core import trees
from flaxshard.data import sharding

Example = dict[str, Any]
Collate = Callable[[Sequence[Any]], Mapping[str, Any]]


class Source(Protocol):
  """A random-access source of examples, as Grain expects it."""

  def __len__(self) -> int:
    """Returns the number of examples."""

  def __getitem__(self, index: SupportsIndex) -> Example:
    """Returns example `index`."""


@dataclasses.dataclass(frozen=True)
class Splits:
  """The training and evaluation data that a factory returns.

  Attributes:
    train: Training examples: dicts of numeric arrays with the same keys, shapes
      and dtypes. The key `"mask"` is reserved. The classification task reads
      `"inputs"` and `"labels"`. A task with `collate` may have other examples.
      A stream of examples, any iterable without `len` such as a Grain
      `IterDataset`, is read in its own order, and again from its start after
      its end.
    eval: Evaluation examples, like the training examples; None if there are
      none.
    num_classes: Number of classes of the labels, or None.
    augment: `augment(example, rng)` is applied to each training example. Its
      NumPy generator is seeded per example.
  """

  train: Source | Iterable[Any]
  eval: Source | None = None
  num_classes: int | None = None
  augment: Callable[[Example, np.random.Generator], Example] | None = None


@dataclasses.dataclass(frozen=True)
class Shapes:
  """Shapes of the data, for a plan.

  Attributes:
    example: Shape and dtype of each array of an example, without a batch
      dimension, by key.
    num_classes: Number of classes of the labels, or None.
  """

  example: Mapping[str, jax.ShapeDtypeStruct]
  num_classes: int | None = None


class Arrays:
  """A source over arrays in memory, which are also its attributes.

  Args:
    inputs: `[examples, ...]`, or None.
    labels: `[examples, ...]`, or None.
    **arrays: Arrays `[examples, ...]` of other names.

  Raises:
    ValueError: There is no array, or the numbers of examples differ.

  Example:
    >>> import flaxshard as fs, numpy as np
    >>> source = fs.data.Arrays(np.ones((4, 2)), np.arange(4))
    >>> len(source), int(source[3]["labels"])
    (4, 3)
    >>> fs.data.Arrays(image=np.ones((4, 8, 8))).image.shape
    (4, 8, 8)
  """

  inputs: np.ndarray
  labels: np.ndarray

  def __init__(
    self,
    inputs: np.ndarray | None = None,
    labels: np.ndarray | None = None,
    **arrays: np.ndarray,
  ):
    named = {"inputs": inputs, "labels": labels, **arrays}
    self.arrays = {
      name: _read_only(x) for name, x in named.items() if x is not None
    }
    # An array may have the name "arrays".
    vars(self).update(self.arrays, arrays=self.arrays)
    lengths = {name: len(x) for name, x in self.arrays.items()}
    if len(set(lengths.values())) != 1:
      raise ValueError(
        "Arrays: needs arrays with the same number of examples, got "
        f"{lengths or 'none'}."
      )

  def __len__(self) -> int:
    """Returns the number of examples."""
    return len(next(iter(self.arrays.values())))

  def __getitem__(self, index: SupportsIndex) -> Example:
    """Returns example `index`."""
    return {name: x[index] for name, x in self.arrays.items()}


def _read_only(x: Any) -> Any:
  """Returns a view, so that no `augment` changes the data for later epochs."""
  if isinstance(x, np.ndarray):
    x = x.view()
    x.flags.writeable = False
  return x


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
  """A source of non-overlapping windows over a sequence of tokens.

  The labels of a window are its tokens, shifted by one.

  Attributes:
    tokens: `[tokens]`, integers.
    length: Number of tokens in a window.

  Raises:
    TypeError: `length` is not an integer.
    ValueError: `length` is out of range, or tokens that are read do not fit
      int32.

  Example:
    >>> import flaxshard as fs, numpy as np
    >>> window = fs.data.Windows(np.arange(9), length=4)[1]
    >>> window["inputs"].tolist(), window["labels"].tolist()
    ([4, 5, 6, 7], [5, 6, 7, 8])
  """

  tokens: np.ndarray
  length: int

  def __post_init__(self) -> None:
    checks.integer("Windows: length", self.length, minimum=1)

  def __len__(self) -> int:
    """Returns the number of windows."""
    # The last label needs one token more than the inputs.
    return max(len(self.tokens) - 1, 0) // self.length

  def __getitem__(self, index: SupportsIndex) -> Example:
    """Returns window `index`: inputs and labels, int32 `[length]`."""
    number = operator.index(index)
    # Iteration ends at an IndexError.
    if not -len(self) <= number < len(self):
      raise IndexError(f"Windows: no window {number} of {len(self)}.")
    start = number % len(self) * self.length
    given = np.asarray(self.tokens[start : start + self.length + 1])
    window = given.astype(np.int32)
    # NumPy wraps large integers around, and cuts off fractions.
    if not np.array_equal(window, given):
      raise ValueError(
        f"Windows: tokens must be integers in int32, got {given.dtype} with "
        f"values from {given.min()} to {given.max()} in window {index}."
      )
    return {"inputs": window[:-1], "labels": window[1:]}


def check_batch_size(
  argument: str, batch_size: int, splits: Splits
) -> int | None:
  """Returns the number of training examples; None if they are a stream.

  Raises:
    ValueError: A batch would have examples twice.
  """
  if is_stream(splits.train):
    return None
  count = len(splits.train)  # type: ignore[arg-type]
  if batch_size > count:
    raise ValueError(
      f"{argument}={batch_size} must be at most {count}, the number of "
      "training examples."
    )
  return count


def is_stream(source: Any) -> bool:
  """Returns whether a source of training examples has no length."""
  return not (hasattr(source, "__len__") and hasattr(source, "__getitem__"))


def stack(examples: Sequence[Mapping[str, Any]]) -> Example:
  """Stacks the arrays of each key of examples.

  Args:
    examples: Dicts of arrays with the same keys and shapes.

  Returns:
    A batch: a dict of arrays `[len(examples), ...]`.

  Raises:
    ValueError: Examples differ.

  Example:
    >>> stack([{"inputs": 1}, {"inputs": 2}])["inputs"].tolist()
    [1, 2]
  """
  for example in examples:
    if not isinstance(example, Mapping):
      raise ValueError(
        "config.data: an example must be a dict of arrays, got "
        f"{checks.describe(example)}. A task with `collate` can have others."
      )
  first, *others = ({k: np.shape(x) for k, x in e.items()} for e in examples)
  for shapes in others:
    if shapes != first:
      raise ValueError(
        f"config.data: every example must have the shapes {first}, got "
        f"{shapes}. A task with `collate` can pad them."
      )
  return {key: np.stack([x[key] for x in examples]) for key in first}


def make_batch(examples: Sequence[Any], collate: Collate | None) -> Example:
  """Returns a batch of examples as NumPy arrays.

  Args:
    examples: The examples.
    collate: Makes a batch of them; None stacks their arrays.

  Raises:
    ValueError: It is no dict of numeric arrays with a row for each example, or
      has a mask.
  """
  batch: Any = (collate or stack)(examples)
  if not isinstance(batch, Mapping) or not batch:
    raise ValueError(
      "config.data: a batch must be a dict of arrays, such as 'inputs' and "
      f"'labels', got {checks.describe(batch)}."
    )
  if "mask" in batch:
    # `eval_batches` would overwrite it.
    raise ValueError(
      "config.data: a batch must not have the key 'mask', which marks padding "
      "in the last batch; rename it."
    )
  arrays = {key: np.asarray(value) for key, value in batch.items()}
  with registry.errors_name("config.data"):
    rows = sharding.flatten(arrays).rows
  if rows != len(examples):
    raise ValueError(
      "config.data: collate must return arrays with a row for each of the "
      f"{len(examples)} examples, got "
      f"{checks.describe(next(iter(arrays.values())))}."
    )
  return arrays


def check(
  where: str, data: Splits | Shapes, collate: Collate | None = None
) -> Shapes:
  """Checks the first example of each split, and returns the shapes.

  Reading all may take hours: the iterators check the others when they read
  them.

  Args:
    where: Name of the data, for error messages.
    data: The splits, or the shapes of their examples.
    collate: Makes a batch of examples; None stacks their arrays.

  Returns:
    Those of an example after `collate`.

  Raises:
    ValueError: A split is empty, or its first example is not valid.
    TypeError: `data` has another type, or a split is neither a sequence nor,
      for training, an iterable.
  """
  if isinstance(data, Shapes):
    zeros = {k: np.zeros(x.shape, x.dtype) for k, x in data.example.items()}
    return Shapes(_shapes_of(where, zeros, collate), data.num_classes)
  if not isinstance(data, Splits):
    raise TypeError(
      f"{where} must be flaxshard.data.Splits, got {checks.describe(data)}."
    )
  if data.num_classes is not None:
    checks.integer(f"{where}: num_classes", data.num_classes, minimum=1)
  example = _first(f"{where}: train", data.train, may_be_stream=True)
  if data.augment is not None:
    example = data.augment(example, np.random.default_rng(0))
  train = _shapes_of(f"{where}: train[0]", example, collate)
  if data.eval is not None:
    example = _first(f"{where}: eval", data.eval, may_be_stream=False)
    evaluation = _shapes_of(f"{where}: eval[0]", example, collate)
    if difference := trees.first_difference(evaluation, train):
      raise ValueError(
        f"{where}: examples of eval must have the keys, shapes and dtypes of "
        f"those of train, but differ in {difference}."
      )
  return Shapes(train, data.num_classes)


def _first(where: str, source: Any, *, may_be_stream: bool) -> Any:
  """Returns the first example of a split."""
  got = f"got {checks.describe(source)}"
  if isinstance(source, Mapping) and 0 not in source:
    raise TypeError(
      f"{where} must be a sequence of examples, {got}: "
      "flaxshard.data.Arrays(**arrays) makes one."
    )
  if not is_stream(source):
    if len(source) == sys.maxsize:
      raise ValueError(f"{where} has no end, {got}: do not call `repeat`.")
    found = [source[0]] if len(source) else []
  elif not may_be_stream or not isinstance(source, Iterable):
    allowed = " or an iterable" if may_be_stream else " or None"
    raise TypeError(f"{where} must be a sequence of examples{allowed}, {got}.")
  elif iter(source) is source:
    raise TypeError(
      f"{where} can be iterated over only once, {got}. Pass an object whose "
      "`__iter__` starts again, such as a Grain dataset: a resumed run reads "
      "it from its start."
    )
  else:
    found = list(itertools.islice(source, 1))
  if not found:
    raise ValueError(f"{where} has no examples.")
  return found[0]


def _shapes_of(
  where: str, example: Any, collate: Collate | None
) -> dict[str, jax.ShapeDtypeStruct]:
  # An error of `collate` does not say which example it was given.
  where = f"{where}: no batch can be made of {checks.describe(example)}"
  with registry.errors_name(where, LookupError, AttributeError):
    batch = make_batch([example], collate)
  return {
    key: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for key, x in batch.items()
  }
