"""Data sources, their batches, and the factories that `config.data` names.

A factory returns `Splits`. The built-in factories are `"digits"`, `"text"` and
`"imagenet"`, whose examples have `inputs` and integer `labels`. A custom one is
named `"package.module:factory"`:

    config.data = {"name": "my_project.data:flowers", "image_size": 64}

    def flowers(image_size: int) -> flaxshard.data.Splits: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import fnmatch
import functools
import inspect
import os
import pathlib
import sysconfig
from typing import Any, TypeVar

import jax
import numpy as np

from flaxshard.core import checks
from flaxshard.core import registry
from flaxshard.data import sources
from flaxshard.data.batching import eval_batches
from flaxshard.data.batching import train_iterator
from flaxshard.data.sources import Arrays
from flaxshard.data.sources import Example
from flaxshard.data.sources import Shapes
from flaxshard.data.sources import Source
from flaxshard.data.sources import Splits
from flaxshard.data.sources import Windows

__all__ = [
  "Arrays",
  "Example",
  "Shapes",
  "Source",
  "Splits",
  "Windows",
  "digits",
  "eval_batches",
  "load",
  "shapes_from",
  "text",
  "train_iterator",
]

_F = TypeVar("_F", bound=Callable[..., Splits])

# The attribute of a factory that `shapes_from` sets.
_SHAPES = "flaxshard_shapes"


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
    >>> import flaxshard as fs
    >>> splits = fs.data.load({"name": "digits"})
    >>> len(splits.train), len(splits.eval), splits.num_classes
    (1437, 360, 10)
  """
  splits: Splits = call_factory(config)
  sources.check(f"config.data ({config['name']!r})", splits)
  return splits


def call_factory(
  config: Mapping[str, Any], *, shapes_only: bool = False
) -> Any:
  """Returns the splits of the factory that a config names, or their shapes.

  No example is checked.

  Args:
    config: `config.data`; see `load`.
    shapes_only: Whether to return the shapes that `shapes_from` gives, if the
      factory has them.

  Raises:
    ValueError, TypeError: As `load`.
  """
  where, factory, arguments = registry.find("config.data", config, FACTORIES)
  kind: type = Splits
  if shapes_only and hasattr(factory, _SHAPES):
    factory, kind = getattr(factory, _SHAPES), Shapes
  made = registry.construct(where, factory, arguments)
  if not isinstance(made, kind):
    raise TypeError(
      f"{where} must return flaxshard.data.{kind.__name__}, got "
      f"{type(made).__name__}."
    )
  return made


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
    >>> import flaxshard as fs, jax, numpy as np
    >>> def flower_shapes(image_size, **_):
    ...   shape = (image_size, image_size, 3)
    ...   example = {
    ...     "inputs": jax.ShapeDtypeStruct(shape, np.float32),
    ...     "labels": jax.ShapeDtypeStruct((), np.int32),
    ...   }
    ...   return fs.data.Shapes(example, num_classes=5)
    >>> @fs.data.shapes_from(flower_shapes)
    ... def flowers(image_size: int = 64, path: str = ""):
    ...   ...  # reads the images, and returns fs.data.Splits
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


def digits() -> Splits:
  """Loads scikit-learn's 1,797 images of handwritten digits.

  Every fifth image is an evaluation example. Inputs are float32 `[8, 8, 1]` in
  [0, 1], labels int32 scalars in [0, 10).

  Returns:
    The splits: 1,437 training and 360 evaluation examples.

  Raises:
    ImportError: scikit-learn is not installed.

  Example:
    >>> import flaxshard as fs
    >>> fs.data.digits().train[0]["inputs"].shape
    (8, 8, 1)
  """
  with checks.extra("config.data 'digits'", "train"):
    from sklearn import datasets
  images, labels = datasets.load_digits(return_X_y=True)
  # Pixels are whole numbers from 0 to 16.
  inputs = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
  labels = labels.astype(np.int32)
  is_eval = np.arange(len(labels)) % 5 == 0
  return Splits(
    train=Arrays(inputs[~is_eval], labels[~is_eval]),
    eval=Arrays(inputs[is_eval], labels[is_eval]),
    num_classes=10,
  )


def _text_shapes(length: int, **others: Any) -> Shapes:
  del others  # which files are read
  tokens = jax.ShapeDtypeStruct((length,), np.int32)
  return Shapes({"inputs": tokens, "labels": tokens}, num_classes=256)


@shapes_from(_text_shapes)
def text(
  path: str = "", suffix: str = ".py", length: int = 128, eval_every: int = 20
) -> Splits:
  """Loads text files as windows of bytes, for a byte-level language model.

  Inputs and labels are int32 `[length]`; a label is the byte after its input.

  Args:
    path: A folder, searched recursively. `""` is the standard library of the
      running Python, without installed packages.
    suffix: The ending of the names of the files to load.
    length: Number of bytes in a window.
    eval_every: Every n-th file, sorted by path, is evaluation data.

  Returns:
    The splits.

  Raises:
    ValueError: `path` is not a folder, or a split is smaller than one window;
      `length` or `eval_every` is out of range.

  Example:
    >>> import flaxshard as fs
    >>> splits = fs.data.text(length=16)
    >>> splits.train[0]["inputs"].shape, splits.num_classes
    ((16,), 256)
  """
  length = checks.integer("length", length, minimum=1)
  eval_every = checks.integer("eval_every", eval_every, minimum=2)
  root = pathlib.Path(path or sysconfig.get_paths()["stdlib"]).expanduser()
  if not root.is_dir():
    raise ValueError(f"path={path!r} is not a folder.")
  # Installed packages are in a subfolder of the standard library.
  excluded = {"site-packages", "dist-packages", "__pycache__"}
  files = []
  for folder, subfolders, names in os.walk(root):
    if not path:
      subfolders[:] = {*subfolders} - excluded
    found = fnmatch.filter(names, f"*{suffix}")
    files += [pathlib.Path(folder, name) for name in found]
  files = sorted(filter(pathlib.Path.is_file, files))
  # Whole files, so that no window of evaluation data is near a training window.
  eval_files = files[eval_every - 1 :: eval_every]
  train_files = [f for i, f in enumerate(files, 1) if i % eval_every]
  windows = {}
  for split, chosen in (("train", train_files), ("eval", eval_files)):
    joined = b"\0".join(file.read_bytes() for file in chosen)
    if len(joined) <= length:
      raise ValueError(
        f"path={str(root)!r} has {len(files)} files with the "
        f"suffix {suffix!r}: the {split} split has {len(joined)} bytes, but "
        f"needs at least {length + 1}."
      )
    windows[split] = Windows(np.frombuffer(joined, np.uint8), length)
  return Splits(windows["train"], windows["eval"], num_classes=256)


FACTORIES: dict[str, Any] = {
  "digits": digits,
  "text": text,
  # Imported on use only: it needs other packages.
  "imagenet": "flaxshard.examples.imagenet:imagenet",
}
