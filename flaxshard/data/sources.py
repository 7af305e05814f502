"""Data sources, and the factories that `config.data` names.

A factory returns `Splits`: sources of examples, each a dict of arrays. The
built-in factories are `"digits"`, `"text"` and `"imagenet"`, whose examples
have `inputs` and integer `labels`. A custom one is named
`"package.module:factory"`:

    config.data = {"name": "my_project.data:flowers", "image_size": 64}

    def flowers(image_size: int) -> flaxshard.data.Splits: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
import inspect
import operator
from typing import Any, Protocol, SupportsIndex, TypeVar

import jax
import numpy as np

from flaxshard.core import checks
from flaxshard.core import registry
from flaxshard.data import collate as collate_lib

Example = dict[str, Any]
_F = TypeVar("_F", bound=Callable[..., "Splits"])

# The attribute of a factory that `shapes_from` sets.
_SHAPES = "flaxshard_shapes"

# Names of modules, so that a factory's dependencies are imported on use only.
FACTORIES = {
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
  splits = call_factory(config)
  check_splits(f"config.data ({config['name']!r})", splits)
  return splits


def call_factory(config: Mapping[str, Any]) -> Splits:
  """Calls the factory that a config names; checks no example.

  Args:
    config: `config.data`; see `load`.

  Raises:
    ValueError, TypeError: As `load`.
  """
  splits = registry.call("config.data", config, FACTORIES)
  if not isinstance(splits, Splits):
    raise TypeError(
      f"config.data ({config['name']!r}) must return flaxshard.data.Splits, "
      f"got {type(splits).__name__}."
    )
  return splits


def check_splits(
  where: str, splits: Splits, collate: collate_lib.Collate | None = None
) -> dict[str, np.ndarray]:
  """Checks the first example of each split.

  Args:
    where: Name of the data, for error messages.
    splits: The splits.
    collate: Makes a batch of examples; None stacks their arrays.

  Returns:
    A batch of one example.

  Raises:
    ValueError: A split is empty, or its first example is not valid.
    TypeError: A split is neither a sequence nor, for training, an iterable.
  """
  for split, source in (("train", splits.train), ("eval", splits.eval)):
    _check_source(where, split, source)
  if splits.num_classes is not None:
    checks.integer(f"{where}: num_classes", splits.num_classes, minimum=1)
  # Only the first examples: reading all may take hours. The iterators check
  # the others when they read them.
  batch = _first_train_batch(where, splits, collate)
  if splits.eval is None:
    return batch
  eval_batch = first_batch(where, splits, collate)
  specs = [
    {key: (x.shape[1:], x.dtype.name) for key, x in b.items()}
    for b in (batch, eval_batch)
  ]
  if specs[0] != specs[1]:
    raise ValueError(
      f"{where}: examples of train and eval must have the same keys, shapes "
      f"and dtypes, got {specs[0]} and {specs[1]}."
    )
  return eval_batch


def first_batch(
  where: str, splits: Splits, collate: collate_lib.Collate | None = None
) -> dict[str, np.ndarray]:
  """Returns a batch of the first evaluation or training example.

  Args:
    where: Name of the data, for error messages.
    splits: The splits.
    collate: Makes a batch of examples; None stacks their arrays.
  """
  if splits.eval is None:
    return _first_train_batch(where, splits, collate)
  return _check_example(f"{where}: eval[0]", splits.eval[0], collate)


def _first_train_batch(
  where: str, splits: Splits, collate: collate_lib.Collate | None
) -> dict[str, np.ndarray]:
  example: Any
  if is_stream(splits.train):
    example = next(iter(splits.train), None)
    if example is None:
      raise ValueError(f"{where} has no train examples.")
  else:
    example = splits.train[0]  # type: ignore[index]
  if splits.augment is not None:
    example = splits.augment(example, np.random.default_rng(0))
  return _check_example(f"{where}: train[0]", example, collate)


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


def _check_source(where: str, split: str, source: Any) -> None:
  if split == "eval" and source is None:
    return
  if not is_stream(source):
    if not len(source):
      raise ValueError(f"{where} has no {split} examples.")
    return
  if split == "eval" or not isinstance(source, Iterable):
    stream = " or an iterable" if split == "train" else " or None"
    raise TypeError(
      f"{where}: {split} must be a sequence of examples{stream}, got "
      f"{checks.describe(source)}."
    )
  if iter(source) is source:
    raise TypeError(
      f"{where}: train can be iterated over only once, got "
      f"{checks.describe(source)}. Pass an object whose `__iter__` starts "
      "again, such as a Grain dataset: a resumed run reads it from its start."
    )


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


def call_factory_for_shapes(config: Mapping[str, Any]) -> Shapes | Splits:
  """Returns the shapes that `shapes_from` gives, or the data without them.

  Args:
    config: `config.data`; see `load`.
  """
  if not (registry.is_dict(config) and "name" in config):
    registry.call("config.data", config, FACTORIES)  # raises
  arguments = dict(config)
  name = arguments.pop("name")
  where = f"config.data ({name!r})"
  factory = registry.lookup("config.data.name", name, FACTORIES)
  get_shapes = getattr(factory, _SHAPES, None)
  if get_shapes is None:
    return call_factory(config)
  signature = inspect.signature(factory)

  # The signature of the factory, which checks the arguments.
  @functools.wraps(factory)
  def call_with_defaults(**kwargs: Any) -> Any:
    bound = signature.bind(**kwargs)
    bound.apply_defaults()
    return get_shapes(**bound.arguments)

  shapes = registry.construct(where, call_with_defaults, arguments)
  if not isinstance(shapes, Shapes) or not isinstance(shapes.example, Mapping):
    raise TypeError(
      f"{where}: the function given to shapes_from must return Shapes of a "
      f"dict, got {shapes!r}."
    )
  return shapes


def collate_shapes(
  where: str,
  example: Mapping[str, Any],
  collate: collate_lib.Collate | None,
) -> dict[str, Any]:
  """Returns the shapes of an example after `collate`.

  Args:
    where: Name of the data, for error messages.
    example: Shapes of an example by key.
    collate: Makes a batch of examples; None stacks their arrays.
  """
  if collate is None:
    return dict(example)
  zeros = {key: np.zeros(x.shape, x.dtype) for key, x in example.items()}
  return shapes_of(_check_example(where, zeros, collate))


def shapes_of(batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes of the examples of a batch, by key."""
  return {
    key: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for key, x in batch.items()
  }


def _check_example(
  where: str, example: Any, collate: collate_lib.Collate | None
) -> dict[str, np.ndarray]:
  """Returns a batch of one example."""
  if collate is None:
    if not isinstance(example, Mapping):
      raise ValueError(
        f"{where} must be a dict of arrays, such as 'inputs' and 'labels', got "
        f"{example!r}."
      )
    collate = collate_lib.stack
  try:
    batch = collate([example])
  except (ValueError, TypeError, LookupError) as e:
    kind = TypeError if isinstance(e, TypeError) else ValueError
    raise kind(f"{where}: {e}") from e
  return collate_lib.check_batch(where, batch, 1)
