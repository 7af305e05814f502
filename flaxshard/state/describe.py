"""Describes the arrays of a state: a table of shardings, and its `repr`."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import itertools
import math
import textwrap
from typing import Any, NamedTuple

from flax.training import train_state
import jax
import numpy as np

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.state import fields as fields_lib
from flaxshard.wrappers import stack

PyTree = Any

# Bytes from which on a replicated array gets a mark: it could be split.
_LARGE = 2**20
# Lines for each tree in the `repr` of a state, so that parameters, slots and
# the states of the wrappers fit on a page together.
_MAX_LINES = 10
_size = checks.format_bytes


class Row(NamedTuple):
  """One array.

  Attributes:
    group: Name of its field of the state, such as `params`.
    path: Path of the array in the field, such as `Dense_0/kernel`.
    shape: Shape of the array.
    dtype: Name of the dtype.
    sharding: Sharding of the array; None if it is not on a device.
    nbytes: Bytes of the whole array.
    bytes_per_device: Bytes on each device that holds a part.
  """

  group: str
  path: str
  shape: tuple[int, ...]
  dtype: str
  sharding: jax.sharding.Sharding | None
  nbytes: int
  bytes_per_device: int

  @property
  def spec(self) -> str:
    """The PartitionSpec, such as `P(None, 'model')`, or the devices."""
    if self.sharding is None:
      return "not placed"
    if isinstance(self.sharding, jax.sharding.NamedSharding):
      return f"P({', '.join(map(repr, self.sharding.spec))})"
    devices: Any = self.sharding.device_set
    return ", ".join(sorted(f"{d.platform}:{d.id}" for d in devices))

  @property
  def mark(self) -> str:
    """An asterisk for 1 MiB or more, replicated over several devices."""
    is_whole = self.bytes_per_device == self.nbytes >= _LARGE
    several = self.sharding is not None and len(self.sharding.device_set) > 1
    return "* " if is_whole and several else ""


@dataclasses.dataclass(frozen=True, repr=False)
class Description:
  """The arrays of a state with their shardings; `str()` is a table.

  Attributes:
    rows: The arrays.
    note: A sentence on how the replicas differ, if a wrapper makes them differ;
      else None.
  """

  rows: tuple[Row, ...]
  note: str | None = None

  @property
  def nbytes(self) -> int:
    """Bytes of all arrays, each counted once."""
    return sum(row.nbytes for row in self.rows)

  @property
  def bytes_per_device(self) -> int:
    """Bytes on the device that holds the most."""
    return max(self._bytes_by_device().values(), default=0)

  @property
  def summary(self) -> str:
    """Number of arrays, their size, and the devices that hold them."""
    return (
      f"arrays: {len(self.rows)}, {_size(self.nbytes)} in all; devices: "
      f"{len(self._bytes_by_device())}, at most "
      f"{_size(self.bytes_per_device)} on each"
    )

  def _bytes_by_device(self) -> dict[Any, int]:
    # Devices may differ: not every array is on every device.
    held: dict[Any, int] = collections.defaultdict(int)
    for row in self.rows:
      for device in row.sharding.device_set if row.sharding else ():
        held[device] += row.bytes_per_device
    return held

  def __repr__(self) -> str:
    return f"Description({self.summary})"

  def __str__(self) -> str:
    table: list[tuple[str, ...]] = []
    for name, rows in itertools.groupby(self.rows, lambda row: row.group):
      table.append((name, "shape", "dtype", "spec", "per device", "whole"))
      group = Description(tuple(rows))
      for r in group.rows:
        sizes = r.mark + _size(r.bytes_per_device), _size(r.nbytes)
        table.append((f"  {r.path}", str(r.shape), r.dtype, r.spec, *sizes))
      sizes = _size(group.bytes_per_device), _size(group.nbytes)
      table.append(("  total", "", "", "", *sizes))
    # One table for all groups, so that their columns align.
    lines = [checks.table(table, numbers=[4, 5])]
    lines.append(self.summary)
    if any(row.mark for row in self.rows):
      lines.append(
        f"* at least {_size(_LARGE)}, replicated over several devices"
      )
    return "\n".join([*lines, *([self.note] if self.note else [])])


def describe(state: PyTree) -> Description:
  """Describes how the arrays of a state are sharded.

  Args:
    state: A TrainState, or any tree of arrays or of `jax.ShapeDtypeStruct`s
      with shardings, such as `create_train_state(..., abstract=True)`.

  Returns:
    A description. Its `str()` is a table: shape, dtype, spec and bytes per
    device of every array, and totals, for each field of the state. An asterisk
    marks arrays of 1 MiB or more that are replicated over several devices. If
    a wrapper makes replicas differ, as `CrossShard` with groups does, a line
    under the table says how.

  Raises:
    TypeError: A leaf is not an array.

  Example:
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("replica",))
    >>> sharding = jax.sharding.NamedSharding(mesh, jax.P(None, "replica"))
    >>> kernel = jax.ShapeDtypeStruct((512, 64), "float32", sharding=sharding)
    >>> print(describe({"kernel": kernel}))
    tree      shape      dtype    spec                per device      whole
      kernel  (512, 64)  float32  P(None, 'replica')   128.0 KiB  128.0 KiB
      total                                            128.0 KiB  128.0 KiB
    arrays: 1, 128.0 KiB in all; devices: 1, at most 128.0 KiB on each
  """
  trees.check_arrays("state", state)
  fields, note = {"tree": state}, None
  if isinstance(state, train_state.TrainState):
    fields = fields_lib.array_fields(state)
    note = stack.divergence(getattr(state, "wrappers", ()))
  rows = [row for name, tree in fields.items() for row in _rows(name, tree)]
  return Description(tuple(rows), note)


def _rows(group: str, tree: PyTree) -> list[Row]:
  """Returns the rows of a field of a state."""
  rows = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    dtype, shape = trees.dtype_of(leaf), np.shape(leaf)
    # A traced array has no device yet.
    is_traced = isinstance(leaf, jax.core.Tracer)
    sharding = None if is_traced else getattr(leaf, "sharding", None)
    nbytes, held = (
      0 if part is None else math.prod(part) * dtype.itemsize
      for part in (shape, sharding and sharding.shard_shape(shape))
    )
    # A field that is one array, such as `step`, has an empty path.
    name = trees.path_string(path) if path else group
    rows.append(Row(group, name, shape, str(dtype), sharding, nbytes, held))
  return rows


def summarize(state: Any) -> str:
  """Returns the fields of a state, its trees as shapes, dtypes and bytes.

  Args:
    state: A Flax dataclass, such as a TrainState, of arrays, tracers,
      `jax.ShapeDtypeStruct`s or anything else. No array is read but scalars.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax
    >>> state = fs.TrainState.create(
    ...   apply_fn=None, params={"w": jnp.ones((4, 2))}, tx=optax.sgd(0.1),
    ...   wrappers=[fs.LossScale(1024.0)])
    >>> print(summarize(state))  # doctest: +ELLIPSIS
    TrainState(
      step: 1 array, 4 B
        step  int32[] 0
      apply_fn=None,
      params: 1 array, 32 B
        w  float32[4,2]
      tx=...
      opt_state=(EmptyState(), EmptyState()),
      ...
    )
  """
  lines = []
  for field in dataclasses.fields(state):
    name, value = field.name, getattr(state, field.name)
    leaves = jax.tree.leaves(value)
    is_tree = bool(leaves) and fields_lib.is_array_field(field)
    if is_tree and all(map(trees.is_array, leaves)):
      rows = _rows(name, value)
      size = _size(sum(row.nbytes for row in rows))
      plural = "s" if rows[1:] else ""
      lines.append(f"  {name}: {len(rows)} array{plural}, {size}")
      for row, x in zip(rows[:_MAX_LINES], leaves, strict=False):
        lines.append(f"    {row.path}  {_describe_array(x)}")
      if rows[_MAX_LINES:]:
        lines.append(f"    ... and {len(rows) - _MAX_LINES} more")
    elif field.repr:
      lines.append(f"  {name}={_shorten(value)},")
  return "\n".join([f"{type(state).__name__}(", *lines, ")"])


def _describe_array(x: Any) -> str:
  """Returns dtype and shape, and the value of a scalar."""
  text = checks.describe(x)
  is_on_device = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
  if not is_on_device or x.shape or trees.is_prng_key(x):
    return text
  # device_get: jax.transfer_guard("disallow") allows explicit transfers.
  return f"{text} {'deleted' if x.is_deleted() else jax.device_get(x)}"


def _shorten(value: Any) -> str:
  # Of functions their names: the repr of a bound method has that of its module.
  if inspect.ismethod(value):
    return f"{type(value.__self__).__name__}.{value.__name__}"
  if inspect.isfunction(value):
    return value.__qualname__
  return textwrap.shorten(repr(value), 80, placeholder=" ...")
