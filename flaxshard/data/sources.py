"""Data sources: what the batches of a run are read from.

A source gives examples, each a dict of arrays. The training examples may be a
stream too, which has no length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import operator
from typing import Any, Protocol, SupportsIndex

import jax
import numpy as np

from flaxshard.core import checks

Example = dict[str, Any]


class Source(Protocol):
  """A random-access source of examples, as Grain expects it."""

  def __len__(self) -> int:
    """Returns the number of examples."""
    ...

  def __getitem__(self, index: SupportsIndex) -> Example:
    """Returns example `index`."""
    ...


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
    >>> source = Arrays(np.ones((4, 2)), np.arange(4))
    >>> len(source), int(source[3]["labels"])
    (4, 3)
    >>> Arrays(image=np.ones((4, 8, 8))).image.shape
    (4, 8, 8)
  """

  def __init__(
    self,
    inputs: np.ndarray | None = None,
    labels: np.ndarray | None = None,
    **arrays: np.ndarray,
  ):
    named = {"inputs": inputs, "labels": labels, **arrays}
    self.arrays = {k: x for k, x in named.items() if x is not None}
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

  def __getattr__(self, name: str) -> np.ndarray:
    """Returns the array of a name."""
    # While it is unpickled, there is no `self.arrays` yet.
    arrays = vars(self).get("arrays", {})
    if name not in arrays:
      raise AttributeError(f"Arrays has no array {name!r}.")
    return arrays[name]


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
    >>> window = Windows(np.arange(9), length=4)[1]
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
    return (len(self.tokens) - 1) // self.length

  def __getitem__(self, index: SupportsIndex) -> Example:
    """Returns window `index`: inputs and labels, int32 `[length]`."""
    number = operator.index(index)
    # Iteration ends at an IndexError.
    if not -len(self) <= number < len(self):
      raise IndexError(f"Windows: no window {number} of {len(self)}.")
    start = number % len(self) * self.length
    given = self.tokens[start : start + self.length + 1]
    window = given.astype(np.int32)
    # NumPy wraps large integers around, and cuts off fractions.
    if not np.array_equal(window, given):
      raise ValueError(
        f"Windows: tokens must be integers in int32, got {given.dtype} with "
        f"values from {given.min()} to {given.max()} in window {index}."
      )
    return {"inputs": window[:-1], "labels": window[1:]}


def check_batch_size(argument: str, batch_size: int, splits: Splits) -> None:
  """Raises a ValueError if a batch would have training examples twice."""
  if is_stream(splits.train):
    return
  count = len(splits.train)  # type: ignore[arg-type]
  if batch_size > count:
    raise ValueError(
      f"{argument}={batch_size} must be at most {count}, the number of "
      "training examples."
    )


def is_stream(source: Any) -> bool:
  """Returns whether a source of training examples has no length."""
  return not (hasattr(source, "__len__") and hasattr(source, "__getitem__"))
