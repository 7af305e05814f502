"""Summarizes a train state as text of a page, for `repr`."""

from __future__ import annotations

import collections
from collections.abc import Sequence
import dataclasses
import inspect
import math
import textwrap
from typing import Any

import jax
import numpy as np

from flaxshard.core import trees
from flaxshard.state import fields as fields_lib

PyTree = Any

# Lines for each tree of a state, so that parameters, slots and the states of
# the wrappers fit on a page together.
_MAX_LINES = 10
_WIDTH = 80


def summarize(state: Any) -> str:
  """Returns the fields of a state, its trees as shapes, dtypes and bytes.

  No array is read but scalars. Trees with many leaves are summed up by the
  first keys of their paths. Tracers, `jax.ShapeDtypeStruct`s, deleted arrays
  and leaves that are no arrays are allowed.

  Args:
    state: A Flax dataclass, such as a TrainState.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax
    >>> state = fs.TrainState.create(
    ...   apply_fn=None, params={"w": jnp.ones((4, 2))}, tx=optax.sgd(0.1),
    ...   wrappers=[fs.LossScale(1024.0)])
    >>> print(summarize(state))  # doctest: +ELLIPSIS
    TrainState(
      step=int32[] 0,
      apply_fn=None,
      params: 1 array of float32, 8 elements, 32 B
        w  float32[4,2]
      tx=...
      opt_state=(EmptyState(), EmptyState()),
      ...
    )
  """
  lines = []
  for field in dataclasses.fields(state):
    if field.repr:
      value = getattr(state, field.name)
      if fields_lib.is_array_field(field):
        lines += _tree_lines(field.name, value)
      else:
        lines += _static_lines(field.name, value)
  body = textwrap.indent("\n".join(lines), "  ")
  return f"{type(state).__name__}(\n{body}\n)"


def format_bytes(nbytes: int) -> str:
  """Returns a number of bytes as text, such as `1.5 MiB`."""
  if nbytes < 2**10:
    return f"{nbytes} B"
  # Powers of 1024, up to TiB.
  power = min((nbytes.bit_length() - 1) // 10, 4)
  return f"{nbytes / 2 ** (10 * power):.1f} {'KMGT'[power - 1]}iB"


def _static_lines(name: str, value: Any) -> list[str]:
  if name == "wrappers" and value:
    lines = [f"  {_shorten(wrapper)}," for wrapper in value]
    return ["wrappers=(", *lines, "),"]
  return [f"{name}={_shorten(value)},"]


def _tree_lines(name: str, tree: PyTree) -> list[str]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  if not leaves:
    return [f"{name}={_shorten(tree)},"]
  if jax.tree_util.all_leaves([tree]):
    return [f"{name}={_describe_leaf(tree)},"]
  groups = _group_by_prefix(leaves)
  shown = list(groups)[:_MAX_LINES]
  width = max(map(len, shown))
  lines = [f"{name}: {_describe_leaves([leaf for _, leaf in leaves])}"]
  for prefix in shown:
    group = groups[prefix]
    text = _describe_leaves(group) if group[1:] else _describe_leaf(group[0])
    lines.append(f"  {prefix.ljust(width)}  {text}")
  if len(groups) > len(shown):
    lines.append(f"  ... and {len(groups) - len(shown)} more")
  return lines


def _group_by_prefix(
  leaves: Sequence[tuple[trees.Path, Any]],
) -> dict[str, list[Any]]:
  """Groups leaves by the first keys of their paths.

  It is as many keys as give at most `_MAX_LINES` groups, and at least one.
  """
  groups: dict[str, list[Any]] = {}
  for length in range(1, 1 + max(len(path) for path, _ in leaves)):
    longer = collections.defaultdict(list)
    for path, leaf in leaves:
      longer[trees.path_string(path[:length])].append(leaf)
    if groups and len(longer) > _MAX_LINES:
      break
    groups = longer
  return groups


def _describe_leaves(leaves: Sequence[Any]) -> str:
  plural = "s" if leaves[1:] else ""
  if not all(map(_is_array, leaves)):
    kinds = sorted({type(leaf).__name__ for leaf in leaves})
    return f"{len(leaves)} leaves of type {', '.join(kinds)}"
  size = sum(math.prod(leaf.shape) for leaf in leaves)
  nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
  dtypes = sorted({str(leaf.dtype) for leaf in leaves})
  return (
    f"{len(leaves)} array{plural} of {', '.join(dtypes)}, {size:,} elements, "
    f"{format_bytes(nbytes)}{_deleted(*leaves)}"
  )


def _describe_leaf(leaf: Any) -> str:
  if not _is_array(leaf):
    return _shorten(leaf)
  text = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]{_deleted(leaf)}"
  # device_get: jax.transfer_guard("disallow") allows explicit transfers.
  return f"{text} {jax.device_get(leaf)}" if _is_number(leaf) else text


def _is_array(leaf: Any) -> bool:
  # Tracers and jax.ShapeDtypeStruct as well.
  return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _deleted(*leaves: Any) -> str:
  # A donated array keeps its shape, but has no values.
  is_deleted = any(_is_concrete(x) and x.is_deleted() for x in leaves)
  return ", deleted" if is_deleted else ""


def _is_concrete(leaf: Any) -> bool:
  return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def _is_number(leaf: Any) -> bool:
  if leaf.shape or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
    return False
  if not _is_concrete(leaf):
    return isinstance(leaf, (np.ndarray, np.generic))
  # An array of several processes can be read where it is replicated.
  return not leaf.is_deleted() and leaf.is_fully_replicated


def _shorten(value: Any) -> str:
  if inspect.ismethod(value):
    # The repr of a bound method has that of its module, of many lines.
    return f"{type(value.__self__).__name__}.{value.__name__}"
  if inspect.isfunction(value):
    return value.__qualname__
  return textwrap.shorten(repr(value), _WIDTH, placeholder=" ...")
