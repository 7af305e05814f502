"""Reads parameters from safetensors files, only those that are asked for."""

from __future__ import annotations

import importlib
import json
from typing import Any

from flaxshard.checkpoint.reader import Path
from flaxshard.checkpoint.reader import SavedLeaf
from flaxshard.core import files

_SUFFIX = ".safetensors"
# The file that lists which file has which tensor, of a model in several files.
_INDEX_SUFFIX = ".safetensors.index.json"

# Shape, dtype, and what reads a part when it is indexed.
_Tensor = tuple[tuple[int, ...], Any, Any]


def find(path: Any) -> Any:
  """Returns the safetensors file or index at a path, or None without one.

  Args:
    path: A file, an index, or a directory with an index or with one file.

  Raises:
    ValueError: A directory has several files and no index.
  """
  if path.is_file():
    return path if path.name.endswith((_SUFFIX, _INDEX_SUFFIX)) else None
  entries = sorted(path.iterdir()) if path.is_dir() else []
  indexes = [p for p in entries if p.name.endswith(_INDEX_SUFFIX)]
  found = indexes or [p for p in entries if p.name.endswith(_SUFFIX)]
  if len(found) > 1:
    raise ValueError(
      f"{path} has several safetensors files or indexes: "
      f"{', '.join(p.name for p in found)}. Give the path of one of them."
    )
  return found[0] if found else None


def open_leaves(file: Any) -> dict[Path, SavedLeaf]:
  """Returns the tensors of a safetensors file, or of all files of an index.

  A name such as `encoder.0.weight` has the path `encoder/0/weight`; slashes
  separate instead of dots in names that have them.

  Args:
    file: The file or the index.

  Raises:
    ImportError: The package safetensors is not installed.
    ValueError: A file is missing or no safetensors file, the index names a
      tensor that its file lacks, or names differ in dots and slashes alone.
  """
  try:
    if file.name.endswith(_INDEX_SUFFIX):
      names = dict(json.loads(file.read_bytes())["weight_map"])
      opened = {n: _open_file(file.parent / n) for n in set(names.values())}
      tensors = {k: opened[name][k] for k, name in names.items()}
    else:
      tensors = _open_file(file)
  except ImportError as e:
    raise ImportError(
      f"{file} needs the package {e.name}: "
      "pip install 'flaxshard[safetensors]'."
    ) from e
  except Exception as e:  # the package has an error of its own
    raise ValueError(f"{file} cannot be read: {e!r}.") from e
  by_path = {
    tuple(name.split("/" if "/" in name else ".")): tensor
    for name, tensor in tensors.items()
  }
  if len(by_path) < len(tensors):
    raise ValueError(
      f"{file} has tensors whose names differ in dots and slashes alone."
    )
  read_leaves = lambda wanted: {path: x for path, (*_, x) in by_path.items()}
  return {
    path: SavedLeaf(shape, dtype, False, file.name, path, read_leaves)
    for path, (shape, dtype, _) in by_path.items()
  }


def _open_file(file: Any) -> dict[str, _Tensor]:
  safetensors = importlib.import_module("safetensors")
  if files.is_bucket(file):
    # The package opens files on disk alone, so the whole file is read.
    load = importlib.import_module("safetensors.numpy").load
    loaded = load(file.read_bytes())
    return {name: (x.shape, x.dtype, x) for name, x in loaded.items()}
  opened = safetensors.safe_open(str(file), framework="numpy")
  return {name: _lazy_tensor(opened, name) for name in opened.keys()}


def _lazy_tensor(opened: Any, name: str) -> _Tensor:
  lazy = opened.get_slice(name)
  shape = tuple(lazy.get_shape())
  # A slice of a scalar is an error. The header has names of dtypes that NumPy
  # does not know.
  x = lazy if shape else opened.get_tensor(name)
  return shape, x[:0].dtype if shape else x.dtype, x
