"""The fields of train states, and classes that get more than they declare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import functools
import types
from typing import Any

from flax import struct


def of_class(cls: Any) -> dict[str, dataclasses.Field[Any]]:
  """Returns the fields of a dataclass by name."""
  return {field.name: field for field in dataclasses.fields(cls)}


def is_data(field: dataclasses.Field[Any]) -> bool:
  """Whether a field of a Flax dataclass is a node of its pytree."""
  return field.metadata.get("pytree_node", True)


def data_names(node: Any) -> list[str]:
  """Returns the names of the fields that are pytree nodes."""
  return [field.name for field in dataclasses.fields(node) if is_data(field)]


def extend(cls: Any, names: Iterable[str]) -> Any:
  """Returns a subclass of `cls` with the fields that it has not got yet.

  The same class for the same fields: jit takes it for the same tree.
  """
  missing = sorted(set(names) - set(of_class(cls)))
  return _extend(cls, tuple(missing)) if missing else cls


@functools.cache
def _extend(cls: Any, names: tuple[str, ...]) -> Any:
  # kw_only: a subclass of the user's may have fields with defaults.
  body = {name: struct.field(kw_only=True) for name in names}
  annotations = {name: "Any" for name in names}
  return types.new_class(
    cls.__name__,
    (cls,),
    exec_body=lambda ns: ns.update(
      body,
      __annotations__=annotations,
      _base_class=cls,
      __module__=cls.__module__,
      __doc__=cls.__doc__,
    ),
  )


def rebuild(cls: Any, values: Mapping[str, Any]) -> Any:
  """Makes a node of `cls` with the fields among the values: to unpickle."""
  return extend(cls, values)(**values)
