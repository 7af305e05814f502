"""Reads parameters from safetensors files, only those that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import importlib
import json
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.checkpoint import reader
from flaxshard.checkpoint import step_names
from flaxshard.core import files

_SUFFIX = ".safetensors"
# Names of files that torch.save writes; Flax's msgpack files have others.
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
# The file that lists which file has which tensor, of a model in several files.
_INDEX_SUFFIX = ".safetensors.index.json"

# Names of dtypes in a file's header, where NumPy has another name. Source:
# https://github.com/huggingface/safetensors, "Format".
_DTYPES = {
  "BOOL": "bool",
  "BF16": "bfloat16",
  "F8_E4M3": "float8_e4m3fn",
  "F8_E5M2": "float8_e5m2",
}
_KINDS = {"F": "float", "I": "int", "U": "uint", "C": "complex"}

Path = tuple[str, ...]


def find(path: step_names.Directory) -> step_names.Directory | None:
  """Returns the safetensors file or index at a path, or None without one.

  Args:
    path: A file, an index, or a directory with an index or with one file.

  Raises:
    ValueError: A directory has several files and no index, or the file is one
      of PyTorch.
  """
  if path.name.endswith((_SUFFIX, _INDEX_SUFFIX)) and path.is_file():
    return path
  if path.name.endswith(_TORCH_SUFFIXES) and path.is_file():
    raise ValueError(
      f"{path} is a file of PyTorch. Save its tensors as safetensors: "
      "safetensors.torch.save_file(torch.load(path), new_path)."
    )
  if not path.is_dir():
    return None
  entries = sorted(path.iterdir())
  indexes = [p for p in entries if p.name.endswith(_INDEX_SUFFIX)]
  found = indexes or [p for p in entries if p.name.endswith(_SUFFIX)]
  if len(found) > 1:
    kind = "indexes" if indexes else "safetensors files and no index"
    raise ValueError(
      f"{path} has several {kind}: {', '.join(p.name for p in found)}. Give "
      "the path of one of them."
    )
  return found[0] if found else None


def open_tree(file: step_names.Directory) -> reader.SavedTree:
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
    importlib.import_module("safetensors.numpy")
  except ImportError as e:
    raise ImportError(
      f"{file} is read by the package safetensors: "
      'pip install "flaxshard[safetensors]".'
    ) from e
  if file.name.endswith(_INDEX_SUFFIX):
    names = _read_index(file)
    by_file = {
      name: _open_file(file.parent / name) for name in set(names.values())
    }
    tensors = {k: by_file[name][k] for k, name in names.items()}
  else:
    tensors = _open_file(file)
  by_path = {_path_of(name): tensor for name, tensor in tensors.items()}
  if len(by_path) < len(tensors):
    raise ValueError(
      f"{file} has tensors whose names differ in dots and slashes alone."
    )

  def read_leaves(
    wanted: Mapping[Path, jax.ShapeDtypeStruct],
  ) -> dict[Path, Any]:
    return {
      path: jax.make_array_from_callback(
        asked.shape, asked.sharding, by_path[path][1]
      )
      for path, asked in wanted.items()
    }

  return reader.SavedTree(
    file.name, {path: leaf for path, (leaf, _) in by_path.items()}, read_leaves
  )


# Shape and dtype of a tensor, and a function that reads a part of it.
_Tensor = tuple[jax.ShapeDtypeStruct, Callable[[Any], np.ndarray]]


def _open_file(file: step_names.Directory) -> dict[str, _Tensor]:
  safetensors = importlib.import_module("safetensors")
  try:
    if files.is_bucket(file):
      # The package opens files on disk alone, so the whole file is read.
      loaded = importlib.import_module("safetensors.numpy").load(
        epath.Path(file).read_bytes()
      )
      return {
        name: (jax.ShapeDtypeStruct(x.shape, x.dtype), x.__getitem__)
        for name, x in loaded.items()
      }
    opened = safetensors.safe_open(str(file), framework="numpy")
    return {name: _lazy_tensor(opened, name) for name in opened.keys()}
  except FileNotFoundError as e:
    raise ValueError(f"{file}, which the index names, is missing.") from e
  except safetensors.SafetensorError as e:
    raise ValueError(f"{file} is no safetensors file: {e}.") from e


def _lazy_tensor(opened: Any, name: str) -> _Tensor:
  part = opened.get_slice(name)
  shape = tuple(part.get_shape())

  def read(index: Any) -> np.ndarray:
    # A slice of a scalar is an error.
    return part[index] if shape else opened.get_tensor(name)

  return jax.ShapeDtypeStruct(shape, _dtype_of(part.get_dtype())), read


def _dtype_of(name: str) -> Any:
  if name in _DTYPES:
    return jnp.dtype(_DTYPES[name])
  kind, bits = name[:1], name[1:]
  return jnp.dtype(f"{_KINDS.get(kind, kind)}{bits}")


def _read_index(file: step_names.Directory) -> dict[str, str]:
  """Returns the name of the file of each tensor."""
  try:
    names = dict(json.loads(file.read_bytes())["weight_map"])
  except (ValueError, KeyError, TypeError) as e:
    raise ValueError(f"{file} is no index of safetensors files: {e!r}.") from e
  return names


def _path_of(name: str) -> Path:
  return tuple(name.split("/" if "/" in name else "."))
