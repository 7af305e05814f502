"""The factories of data that `config.data` names.

A factory returns `Splits`. The built-in factories are `"digits"`, `"text"` and
`"imagenet"`, whose examples have `inputs` and integer `labels`. A custom one is
named `"package.module:factory"`:

    config.data = {"name": "my_project.data:flowers", "image_size": 64}

    def flowers(image_size: int) -> flaxshard.data.Splits: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
import inspect
from typing import Any, TypeVar

from flaxshard.core import registry
from flaxshard.data import examples
from flaxshard.data.sources import Shapes
from flaxshard.data.sources import Splits

_F = TypeVar("_F", bound=Callable[..., Splits])

# The attribute of a factory that `shapes_from` sets.
_SHAPES = "flaxshard_shapes"

# Names of modules, so that a factory's dependencies are imported on use only.
FACTORIES = {
  "digits": "flaxshard.data.builtin:digits",
  "text": "flaxshard.data.builtin:text",
  "imagenet": "flaxshard.examples.imagenet:imagenet",
}


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
  examples.check_splits(f"config.data ({config['name']!r})", splits)
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
    >>> import jax, numpy as np
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
    signature = inspect.signature(factory)

    # The signature of the factory, which checks the arguments.
    @functools.wraps(factory)
    def call_with_defaults(**kwargs: Any) -> Any:
      bound = signature.bind(**kwargs)
      bound.apply_defaults()
      return get_shapes(**bound.arguments)

    vars(factory)[_SHAPES] = call_with_defaults
    return factory

  return set_shapes


def call_factory_for_shapes(config: Mapping[str, Any]) -> Shapes | Splits:
  """Returns the shapes that `shapes_from` gives, or the data without them.

  Args:
    config: `config.data`, a checked dict; see `load`.
  """
  arguments = dict(config)
  name = arguments.pop("name")
  factory = registry.lookup("config.data.name", name, FACTORIES)
  get_shapes = getattr(factory, _SHAPES, None)
  if get_shapes is None:
    return call_factory(config)
  where = f"config.data ({name!r})"
  shapes = registry.construct(where, get_shapes, arguments)
  if not isinstance(shapes, Shapes):
    raise TypeError(
      f"{where}: the function given to shapes_from must return Shapes, got "
      f"{shapes!r}."
    )
  return shapes
