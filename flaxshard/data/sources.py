"""Data sources, and the factories that `config.data` names.

A factory returns `Splits`: random-access sources of examples, each a dict with
`inputs` and integer `labels`. The built-in factories are `"digits"`, `"text"`
and `"imagenet"`. A custom one is named `"package.module:factory"`:

    config.data = {"name": "my_project.data:flowers", "image_size": 64}

    def flowers(image_size: int) -> flaxshard.data.Splits: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
import inspect
from typing import Any, Protocol, SupportsIndex, TypeVar

import jax
import numpy as np

from flaxshard.core import checks
from flaxshard.core import registry

Example = dict[str, Any]
_F = TypeVar("_F", bound=Callable[..., "Splits"])

# The attribute of a factory that `shapes_from` sets.
_SHAPES = "flaxshard_shapes"

# Names of modules, so that a factory's dependencies are imported on use only.
_FACTORIES = {
  "digits": "flaxshard.data.builtin:digits",
  "text": "flaxshard.data.builtin:text",
  "imagenet": "flaxshard.data.imagenet:imagenet",
}


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
    train: Training examples `{"inputs": array, "labels": integer array}`. More
      keys are allowed, but not `"mask"`.
    eval: Evaluation examples with the same keys, shapes and dtypes.
    num_classes: Labels are in `[0, num_classes)`.
    augment: `augment(example, rng)` is applied to each training example. Its
      NumPy generator is seeded per example.
  """

  train: Source
  eval: Source
  num_classes: int
  augment: Callable[[Example, np.random.Generator], Example] | None = None


@dataclasses.dataclass(frozen=True)
class Shapes:
  """Shapes of the data, for a plan.

  Attributes:
    example: Shape and dtype of each array of an example, without a batch
      dimension, by key: `inputs` and `labels` at least.
    num_classes: Labels are in `[0, num_classes)`.
  """

  example: Mapping[str, jax.ShapeDtypeStruct]
  num_classes: int


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
  """A source over arrays in memory.

  Attributes:
    inputs: `[examples, ...]`.
    labels: `[examples, ...]`, integers.

  Example:
    >>> source = Arrays(np.ones((4, 2)), np.arange(4))
    >>> len(source), int(source[3]["labels"])
    (4, 3)
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
    start = int(index) * self.length
    given = self.tokens[start : start + self.length + 1]
    window = given.astype(np.int32)
    # NumPy wraps large integers around, and cuts off fractions.
    if not np.array_equal(window, given):
      raise ValueError(
        f"Windows: tokens must be integers in int32, got {given.dtype} with "
        f"values from {given.min()} to {given.max()} in window {index}."
      )
    return {"inputs": window[:-1], "labels": window[1:]}


def load(config: Mapping[str, Any]) -> Splits:
  """Calls the factory that a config names.

  Args:
    config: `config.data`: `{"name": ..., **arguments}`. The name is a built-in
      one or `"package.module:factory"`. The other entries are the arguments of
      the factory.

  Returns:
    The splits. The first example of each was checked.

  Raises:
    ValueError: The name or an argument is unknown, a split is empty, or its
      first example is not valid.
    TypeError: The factory does not return `Splits`.

  Example:
    >>> splits = load({"name": "digits"})
    >>> len(splits.train), len(splits.eval), splits.num_classes
    (1437, 360, 10)
  """
  splits = registry.call("config.data", config, _FACTORIES)
  name = f"config.data ({config['name']!r})"
  if not isinstance(splits, Splits):
    raise TypeError(
      f"{name} must return flaxshard.data.Splits, got {type(splits).__name__}."
    )
  for split, source in (("train", splits.train), ("eval", splits.eval)):
    if not len(source):
      raise ValueError(f"{name} has no {split} examples.")
  checks.integer(f"{name}: num_classes", splits.num_classes, minimum=1)
  # Only the first examples: reading all may take hours. The iterators check
  # the others when they read them.
  train: Any = splits.train[0]
  if splits.augment is not None:
    train = splits.augment(train, np.random.default_rng(0))
  train_spec = _check_example(f"{name}: train[0]", train, splits.num_classes)
  eval_spec = _check_example(
    f"{name}: eval[0]", splits.eval[0], splits.num_classes
  )
  if train_spec != eval_spec:
    raise ValueError(
      f"{name}: examples of train and eval must have the same keys, shapes and "
      f"dtypes, got {train_spec} and {eval_spec}."
    )
  return splits


def shapes_from(get_shapes: Callable[..., Shapes]) -> Callable[[_F], _F]:
  """Gives a factory a function that returns the shapes of its data.

  A plan of a config calls it, so that the data need not exist. Without it, a
  plan calls the factory and reads one example.

  Args:
    get_shapes: Takes the arguments of the factory by name, those with a default
      too, and returns `Shapes`.

  Returns:
    A decorator of the factory.

  Example:
    >>> def flower_shapes(image_size, **_):
    ...   shape = (image_size, image_size, 3)
    ...   example = {
    ...     "inputs": jax.ShapeDtypeStruct(shape, np.float32),
    ...     "labels": jax.ShapeDtypeStruct((), np.int32),
    ...   }
    ...   return Shapes(example, num_classes=5)
    >>> @shapes_from(flower_shapes)
    ... def flowers(image_size: int = 64, path: str = "") -> Splits: ...
  """

  def set_shapes(factory: _F) -> _F:
    vars(factory)[_SHAPES] = get_shapes
    return factory

  return set_shapes


def load_shapes(config: Mapping[str, Any]) -> Shapes:
  """Returns the shapes of the data that a config names.

  The data is read only if its factory has no `shapes_from`.

  Args:
    config: `config.data`; see `load`.

  Raises:
    ValueError, TypeError: As `load`.

  Example:
    >>> load_shapes({"name": "text", "length": 64}).example["inputs"].shape
    (64,)
  """
  if not (registry.is_dict(config) and "name" in config):
    registry.call("config.data", config, _FACTORIES)  # raises
  arguments = dict(config)
  name = arguments.pop("name")
  where = f"config.data ({name!r})"
  factory = registry.lookup("config.data.name", name, _FACTORIES)
  get_shapes = getattr(factory, _SHAPES, None)
  if get_shapes is None:
    splits = load(config)
    return Shapes(
      {
        key: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype)
        for key, x in splits.eval[0].items()
      },
      splits.num_classes,
    )
  signature = inspect.signature(factory)

  # The signature of the factory, which checks the arguments.
  @functools.wraps(factory)
  def call_with_defaults(**kwargs: Any) -> Any:
    bound = signature.bind(**kwargs)
    bound.apply_defaults()
    return get_shapes(**bound.arguments)

  shapes = registry.construct(where, call_with_defaults, arguments)
  if not isinstance(shapes, Shapes) or not {"inputs", "labels"} <= set(
    shapes.example
  ):
    raise TypeError(
      f"{where}: the function given to shapes_from must return Shapes with "
      f"'inputs' and 'labels', got {shapes!r}."
    )
  return shapes


def _check_example(where: str, example: Any, num_classes: int) -> Any:
  """Returns the shape and dtype of each array of a valid example, by key."""
  if not isinstance(example, Mapping) or not {"inputs", "labels"} <= set(
    example
  ):
    raise ValueError(
      f"{where} must be a dict with 'inputs' and 'labels', got {example!r}."
    )
  if "mask" in example:
    # `eval_batches` would overwrite it.
    raise ValueError(
      f"{where} must not have the key 'mask', which marks padding in the last "
      "batch; rename it."
    )
  arrays = {key: np.asarray(value) for key, value in example.items()}
  for key, value in arrays.items():
    # JAX has no arrays of strings or objects.
    if not np.issubdtype(value.dtype, np.number) and value.dtype != np.bool_:
      raise ValueError(f"{where}: {key} must be numeric, got {value.dtype}.")
  check_labels(where, arrays["labels"], num_classes)
  return {key: (x.shape, x.dtype.name) for key, x in arrays.items()}


def check_labels(where: str, labels: Any, num_classes: int) -> None:
  """Raises a ValueError unless labels are integers in `[0, num_classes)`.

  Args:
    where: Name of the data, for the error message.
    labels: An array of any shape.
    num_classes: The number of classes.
  """
  labels = np.asarray(labels)
  if not np.issubdtype(labels.dtype, np.integer):
    raise ValueError(f"{where}: labels must be integers, got {labels.dtype}.")
  if labels.min() < 0 or labels.max() >= num_classes:
    raise ValueError(
      f"{where}: labels must lie in [0, {num_classes}), got "
      f"{labels.min()} to {labels.max()}."
    )
