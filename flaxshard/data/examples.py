"""Makes batches of examples, and checks the first examples of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import itertools
from typing import Any

import jax
import numpy as np

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.data import sharding
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
  try:
    rows = sharding.flatten(arrays).rows
  except ValueError as e:
    raise ValueError(f"config.data: {e}") from e
  if rows != len(examples):
    raise ValueError(
      "config.data: collate must return arrays with a row for each of the "
      f"{len(examples)} examples, got "
      f"{checks.describe(next(iter(arrays.values())))}."
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
  return train


def _first(where: str, source: Any, *, may_be_stream: bool) -> Any:
  """Returns the first example of a split."""
  got = f"got {checks.describe(source)}"
  if not sources.is_stream(source):
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
) -> ExampleShapes:
  try:
    batch = make_batch([example], collate)
  except (ValueError, TypeError, LookupError, AttributeError) as e:
    # An error of `collate` does not say which example it was given.
    kind = TypeError if isinstance(e, TypeError) else ValueError
    raise kind(
      f"{where}: no batch can be made of {checks.describe(example)}: {e}"
    ) from e
  return {
    key: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for key, x in batch.items()
  }
