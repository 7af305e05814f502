"""Saves and restores arrays in S3, which Orbax 0.12 cannot do itself.

Orbax reads and writes arrays in file systems and in Google Cloud Storage. Its
public interface `TypeHandler` lets a program replace that part. The handler
here uses TensorStore's S3 driver, through the functions of JAX. The files are
those of Orbax without OCDBT: an array is a folder in the Zarr format. Once
they are copied to a file system, Orbax reads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
import json
import logging
import os
from typing import Any

import jax
from jax.experimental.array_serialization import serialization
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from flaxshard.core import files

# TensorStore's default is 32 attempts, which take a quarter of an hour.
_CONTEXT = ts.Context(
  {"s3_request_retries": {"max_retries": 8, "max_delay": "8s"}}
)

# The file of a Zarr array for attributes, and the one that names PRNG keys.
_ATTRIBUTES = ".zattrs"
_KEY_IMPL = "prng_key_impl"


# Orbax warns of these in each save or restore without OCDBT.
_EXPECTED = ("No ArrayMetadata Store", "Skipping merge of OCDBT")


def is_s3(path: files.Path) -> bool:
  """Returns whether a path is in S3: `s3://...`."""
  return os.fspath(path).startswith("s3://")


def atomicity(path: files.Path) -> ocp.options.AtomicityOptions | None:
  """Returns how Orbax marks complete steps in a directory.

  In S3 a directory cannot be renamed. For other paths, Orbax knows by itself.

  Args:
    path: Path of the directory of the steps.
  """
  if not is_s3(path):
    return None
  mode = ocp.options.AtomicityMode.COMMIT_FILE
  return ocp.options.AtomicityOptions(mode=mode)


def tree_options(path: files.Path) -> dict[str, Any]:
  """Returns the arguments of Orbax's handlers of trees in a directory.

  Args:
    path: Path of a directory of steps, of a step, or of an item.
  """
  if not is_s3(path):
    return {}
  # Adding it again does nothing.
  logging.getLogger("absl").addFilter(_is_of_interest)
  handler = ArrayHandler()
  registry = ocp.type_handlers.create_type_handler_registry(
    (jax.Array, handler), (np.ndarray, handler)
  )
  return {"use_ocdbt": False, "type_handler_registry": registry}


def item_handlers(
  path: files.Path, names: Iterable[str]
) -> dict[str, ocp.CheckpointHandler]:
  """Returns the handlers of trees for an Orbax manager of a directory in S3.

  Args:
    path: Path of the directory.
    names: The names of the items.
  """
  options = tree_options(path)
  return {name: ocp.PyTreeCheckpointHandler(**options) for name in names}


def save_args(items: Mapping[str, Any]) -> dict[str, Any]:
  """Returns Orbax's arguments of items, for the handlers of `item_handlers`.

  `StandardCheckpointHandler` cannot be given another handler of arrays.

  Args:
    items: Orbax's arguments, by item.
  """
  return {
    name: ocp.args.PyTreeSave(args.item)
    if isinstance(args, ocp.args.StandardSave)
    else args
    for name, args in items.items()
  }


def _is_of_interest(record: logging.LogRecord) -> bool:
  return not any(text in str(record.msg) for text in _EXPECTED)


class ArrayHandler(ocp.type_handlers.TypeHandler):
  """Saves and restores `jax.Array`s in S3."""

  def typestr(self) -> str:
    """Returns the type that Orbax writes into the metadata of a tree."""
    return "jax.Array"

  async def metadata(
    self, infos: Sequence[ocp.type_handlers.ParamInfo]
  ) -> list[ocp.metadata.value.ArrayMetadata]:
    """Returns the shape and the dtype of arrays.

    Args:
      infos: Where the arrays are.
    """
    arrays = await asyncio.gather(*(_open(info.path) for info in infos))
    return [
      ocp.metadata.value.ArrayMetadata(
        name=info.name,
        directory=info.parent_dir,
        shape=array.shape,
        sharding=None,
        dtype=jnp.dtype(array.dtype.name),
        storage=ocp.metadata.value.StorageMetadata(
          chunk_shape=array.chunk_layout.read_chunk.shape
        ),
      )
      for info, array in zip(infos, arrays, strict=True)
    ]

  async def serialize(
    self,
    values: Sequence[jax.Array],
    infos: Sequence[ocp.type_handlers.ParamInfo],
    args: Any = None,
  ) -> list[Any]:
    """Copies arrays to the host, and starts to write them.

    Each process writes its shards of replica 0.

    Args:
      values: The arrays.
      infos: Where they are to be written.
      args: Not used.

    Returns:
      Futures of the writes.
    """
    del args
    commits: list[Any] = []
    await asyncio.gather(
      *(
        serialization.async_serialize(
          _save_key_impl(value, info.path),
          _spec(info.path),
          commits,
          context=_CONTEXT,
        )
        for value, info in zip(values, infos, strict=True)
      )
    )
    return commits

  async def deserialize(
    self,
    infos: Sequence[ocp.type_handlers.ParamInfo],
    args: Sequence[ocp.type_handlers.RestoreArgs] | None = None,
  ) -> list[Any]:
    """Reads arrays: each process the parts of its devices.

    Args:
      infos: Where the arrays are.
      args: How to restore each of them; without a sharding, as a NumPy array.
    """
    wanted = args or [ocp.RestoreArgs()] * len(infos)
    reads = map(_read, infos, wanted)
    return list(await asyncio.gather(*reads))


def _save_key_impl(value: jax.Array, path: Any) -> jax.Array:
  """Returns the numbers to save; for PRNG keys, also saves their kind."""
  if not _is_key(value.dtype):
    return value
  if jax.process_index() == 0:
    content = json.dumps({_KEY_IMPL: str(jax.random.key_impl(value))})
    files.write_bytes(path / _ATTRIBUTES, content.encode())
  return jax.random.key_data(value)


def _check_key_impl(dtype: Any, path: Any) -> str:
  """Returns the kind of keys to restore; raises if others were saved."""
  # Only arrays tell their kind, and tracers are arrays.
  found: list[str] = []
  jax.eval_shape(
    lambda key: found.append(str(jax.random.key_impl(key))),
    jax.ShapeDtypeStruct((), dtype),
  )
  saved = json.loads(files.read_bytes(path / _ATTRIBUTES))[_KEY_IMPL]
  if saved != found[0]:
    raise ValueError(
      f"{path} has PRNG keys of kind {saved!r}, not {found[0]!r}."
    )
  return found[0]


def _is_key(dtype: Any) -> bool:
  return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


async def _read(
  info: ocp.type_handlers.ParamInfo, args: ocp.type_handlers.RestoreArgs
) -> Any:
  sharding = getattr(args, "sharding", None)
  if sharding is None:
    array = await (await _open(info.path)).read()
    return np.asarray(array, dtype=args.dtype)
  impl = _check_key_impl(args.dtype, info.path) if _is_key(args.dtype) else ""
  array = await serialization.async_deserialize(
    sharding,
    _spec(info.path),
    dtype=None if impl else args.dtype,
    byte_limiter=info.byte_limiter,
    context=_CONTEXT,
  )
  return jax.random.wrap_key_data(array, impl=impl) if impl else array


def _open(path: Any) -> Any:
  return ts.open(ts.Spec(_spec(path)), open=True, context=_CONTEXT)


def _spec(path: Any) -> dict[str, Any]:
  """Returns TensorStore's specification of an array."""
  kvstore = files.tensorstore_spec(f"{os.fspath(path)}/")
  return {"driver": "zarr", "kvstore": kvstore}
