"""Makes batches of examples, and checks the examples of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import itertools
from typing import Any

import jax
import numpy as np

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.data import host_batch
from flaxshard.data import sources
from flaxshard.data.sources import Example
from flaxshard.data.sources import Shapes
from flaxshard.data.sources import Splits

Collate = Callable[[Sequence[Any]], Mapping[str, Any]]
# Shape and dtype of each array of an example, by key.
ExampleShapes = Mapping[str, jax.ShapeDtypeStruct]


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
  first, *others = (
    {key: np.shape(x) for key, x in example.items()} for example in examples
  )
  for shapes in others:
    if shapes != first:
      raise ValueError(
        f"config.data: every example must have the shapes {first}, got "
        f"{shapes}. A task with `collate` can pad them."
      )
  return {key: np.stack([x[key] for x in examples]) for key in first}


def check_batch(where: str, batch: Any, rows: int) -> Example:
  """Returns a batch as NumPy arrays, or raises if it cannot be one.

  Args:
    where: Name of the data, for error messages.
    batch: What `collate` has returned.
    rows: Number of examples.

  Raises:
    ValueError: It is no dict of numeric arrays `[rows, ...]`, or has a mask.
  """
  if not isinstance(batch, Mapping) or not batch:
    raise ValueError(
      f"{where} must be a dict of arrays, such as 'inputs' and 'labels', got "
      f"{checks.describe(batch)}."
    )
  if "mask" in batch:
    # `eval_batches` would overwrite it.
    raise ValueError(
      f"{where} must not have the key 'mask', which marks padding in the last "
      "batch; rename it."
    )
  arrays = {key: np.asarray(value) for key, value in batch.items()}
  try:
    flat = host_batch.flatten(arrays)
  except ValueError as e:
    raise ValueError(f"{where}: {e}") from e
  if flat.rows != rows:
    raise ValueError(
      f"{where}: collate must return arrays with a row for each of the {rows} "
      f"examples, got {checks.describe(next(iter(arrays.values())))}."
    )
  return arrays


def check(
  where: str, data: Splits | Shapes, collate: Collate | None = None
) -> ExampleShapes:
  """Checks the first example of each split.

  Reading all may take hours: the iterators check the others when they read
  them.

  Args:
    where: Name of the data, for error messages.
    data: The splits, or the shapes of their examples.
    collate: Makes a batch of examples; None stacks their arrays.

  Returns:
    The shapes of an example after `collate`.

  Raises:
    ValueError: A split is empty, or its first example is not valid.
    TypeError: A split is neither a sequence nor, for training, an iterable.
  """
  if isinstance(data, Shapes):
    zeros = {k: np.zeros(x.shape, x.dtype) for k, x in data.example.items()}
    return _shapes_of(where, zeros, collate)
  if data.num_classes is not None:
    checks.integer(f"{where}: num_classes", data.num_classes, minimum=1)
  train = _example_shapes(where, data, "train", collate)
  if data.eval is not None:
    evaluation = _example_shapes(where, data, "eval", collate)
    if difference := trees.first_difference(evaluation, train):
      raise ValueError(
        f"{where}: examples of eval must have the keys, shapes and dtypes of "
        f"those of train, but differ in {difference}."
      )
  return train


def _example_shapes(
  where: str, splits: Splits, split: str, collate: Collate | None
) -> ExampleShapes:
  """Returns the shapes of the first example of a split after `collate`."""
  source = getattr(splits, split)
  if sources.is_stream(source):
    _check_stream(f"{where}: {split}", source, split == "train")
    first = list(itertools.islice(source, 1))
  else:
    first = [source[0]] if len(source) else []
  if not first:
    raise ValueError(f"{where} has no {split} examples.")
  (example,) = first
  if split == "train" and splits.augment is not None:
    example = splits.augment(example, np.random.default_rng(0))
  return _shapes_of(f"{where}: {split}[0]", example, collate)


def _check_stream(where: str, source: Any, allowed: bool) -> None:
  got = f"got {checks.describe(source)}"
  if not allowed or not isinstance(source, Iterable):
    stream = " or an iterable" if allowed else " or None"
    raise TypeError(f"{where} must be a sequence of examples{stream}, {got}.")
  if iter(source) is source:
    raise TypeError(
      f"{where} can be iterated over only once, {got}. Pass an object whose "
      "`__iter__` starts again, such as a Grain dataset: a resumed run reads "
      "it from its start."
    )


def _shapes_of(
  where: str, example: Any, collate: Collate | None
) -> ExampleShapes:
  try:
    batch = (collate or stack)([example])
  except (ValueError, TypeError, LookupError, AttributeError) as e:
    # An error of `collate` does not say which example it was given.
    kind = TypeError if isinstance(e, TypeError) else ValueError
    raise kind(
      f"{where}: no batch can be made of {checks.describe(example)}: {e}"
    ) from e
  return {
    key: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    for key, x in check_batch(where, batch, 1).items()
  }
