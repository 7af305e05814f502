"""Makes batches of examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flaxshard.core import checks

Example = dict[str, Any]
Collate = Callable[[Sequence[Any]], Mapping[str, Any]]


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
  shapes = {key: np.shape(x) for key, x in examples[0].items()}
  for example in examples:
    check_shapes(shapes, {key: np.shape(x) for key, x in example.items()})
  return {key: np.stack([x[key] for x in examples]) for key in shapes}


def check_shapes(
  wanted: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
  """Raises a ValueError if an example has other shapes than the first one."""
  if shapes != wanted:
    raise ValueError(
      f"config.data: every example must have the shapes {dict(wanted)}, got "
      f"{dict(shapes)}. A task with `collate` can pad them."
    )


def check_batch(where: str, batch: Any, rows: int) -> Example:
  """Returns a batch as NumPy arrays, or raises if it cannot be one.

  Args:
    where: Name of the data, for the error message.
    batch: What `collate` has returned.
    rows: Number of examples.

  Raises:
    ValueError: It is no dict of numeric arrays `[rows, ...]`, or has a mask.
  """
  if not isinstance(batch, Mapping) or not batch:
    raise ValueError(
      f"{where} must be a dict of arrays, got {checks.describe(batch)}."
    )
  if "mask" in batch:
    # `eval_batches` would overwrite it.
    raise ValueError(
      f"{where} must not have the key 'mask', which marks padding in the last "
      "batch; rename it."
    )
  arrays = {key: np.asarray(value) for key, value in batch.items()}
  for key, value in arrays.items():
    # JAX has no arrays of strings or objects.
    if not np.issubdtype(value.dtype, np.number) and value.dtype != np.bool_:
      raise ValueError(f"{where}: {key} must be numeric, got {value.dtype}.")
    if value.shape[:1] != (rows,):
      raise ValueError(
        f"{where}: collate must return arrays with a row for each of the "
        f"{rows} examples; {key} has the shape {value.shape}."
      )
  return arrays


def collate_rows(
  examples: Sequence[Any],
  shapes: Mapping[str, tuple[int, ...]],
  collate: Collate,
) -> Example:
  """Returns a checked batch of examples.

  Args:
    examples: The examples.
    shapes: Shapes of an example after `collate`, by key.
    collate: Makes a batch of a sequence of examples.

  Raises:
    ValueError: The batch is not valid, or has other shapes.
  """
  batch = check_batch("config.data: a batch", collate(examples), len(examples))
  check_shapes(shapes, {k: x.shape[1:] for k, x in batch.items()})
  return batch
