"""Describes the arrays of a state: a table of shardings, and its `repr`."""

from __future__ import annotations

import collections
from collections.abc import Iterable
import dataclasses
import inspect
import math
import textwrap
from typing import Any

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
_HEADER = ("shape", "dtype", "spec", "per device", "whole")
# Lines for each tree in the `repr` of a state, so that parameters, slots and
# the states of the wrappers fit on a page together.
_MAX_LINES = 10
_size = checks.format_bytes


@dataclasses.dataclass(frozen=True)
class Row:
  """One array.

  Attributes:
    path: Path of the array in the group, such as `Dense_0/kernel`.
    shape: Shape of the array.
    dtype: Name of the dtype.
    sharding: Sharding of the array; None if it is not on a device.
    nbytes: Bytes of the whole array.
    bytes_per_device: Bytes on each device that holds a part.
  """

  path: str
  shape: tuple[int, ...]
  dtype: str
  sharding: jax.sharding.Sharding | None
  nbytes: int
  bytes_per_device: int

  @property
  def large(self) -> bool:
    """Whether it has 1 MiB or more, replicated over several devices."""
    return (
      self.sharding is not None
      and len(self.sharding.device_set) > 1
      and self.bytes_per_device == self.nbytes >= _LARGE
    )

  @property
  def spec(self) -> str:
    """The PartitionSpec, such as `P(None, 'model')`, or the single device."""
    if self.sharding is None:
      return "not placed"
    if isinstance(self.sharding, jax.sharding.NamedSharding):
      return f"P({', '.join(map(repr, self.sharding.spec))})"
    if len(self.sharding.device_set) == 1:
      device: Any = next(iter(self.sharding.device_set))
      return f"{device.platform}:{device.id}"
    return str(self.sharding)

  def cells(self) -> tuple[str, ...]:
    """Returns the row of the table."""
    mark = "* " if self.large else ""  # the footer explains it
    held = mark + _size(self.bytes_per_device)
    shape = str(self.shape)
    return (
      f"  {self.path}",
      shape,
      self.dtype,
      self.spec,
      held,
      _size(self.nbytes),
    )


@dataclasses.dataclass(frozen=True)
class Group:
  """The arrays of one field of a state, such as `params`.

  Attributes:
    name: Name of the field.
    rows: The arrays of the field.
  """

  name: str
  rows: tuple[Row, ...]

  @property
  def nbytes(self) -> int:
    """Bytes of all arrays, each counted once."""
    return sum(row.nbytes for row in self.rows)

  @property
  def bytes_per_device(self) -> int:
    """Bytes on the device that holds the most."""
    return max(_bytes_by_device(self.rows).values(), default=0)


@dataclasses.dataclass(frozen=True, repr=False)
class Description:
  """The arrays of a state with their shardings; `str()` is a table.

  Attributes:
    groups: The arrays by field.
    note: A sentence on how the replicas differ, if a wrapper makes them differ;
      else None.
  """

  groups: tuple[Group, ...]
  note: str | None = None

  @property
  def rows(self) -> tuple[Row, ...]:
    """The arrays of all groups."""
    return tuple(row for group in self.groups for row in group.rows)

  @property
  def num_devices(self) -> int:
    """Number of devices that hold an array."""
    return len(_bytes_by_device(self.rows))

  @property
  def nbytes(self) -> int:
    """Bytes of all arrays, each counted once."""
    return Group("", self.rows).nbytes

  @property
  def bytes_per_device(self) -> int:
    """Bytes on the device that holds the most."""
    return Group("", self.rows).bytes_per_device

  @property
  def summary(self) -> str:
    """Number of arrays, their size, and the devices that hold them."""
    return (
      f"arrays: {len(self.rows)}, {_size(self.nbytes)} in all; devices: "
      f"{self.num_devices}, at most {_size(self.bytes_per_device)} on each"
    )

  def __repr__(self) -> str:
    return f"Description({self.summary})"

  def __str__(self) -> str:
    table: list[tuple[str, ...]] = []
    for group in self.groups:
      table.append((group.name, *_HEADER))
      table.extend(row.cells() for row in group.rows)
      sizes = _size(group.bytes_per_device), _size(group.nbytes)
      table.append(("  total", "", "", "", *sizes))
    # One set of column widths for all groups, so that their columns align.
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
      # Text to the left, sizes to the right.
      cells = [
        cell.rjust(width) if i >= 4 else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
      ]
      lines.append("  ".join(cells).rstrip())
    lines.append(self.summary)
    if any(row.large for row in self.rows):
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
  groups = (
    Group(
      name,
      tuple(
        # A field that is one array, such as `step`, has an empty path.
        _row(trees.path_string(path) if path else name, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
      ),
    )
    for name, tree in fields.items()
  )
  return Description(tuple(group for group in groups if group.rows), note)


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
    value = getattr(state, field.name)
    if not field.repr:
      continue
    if field.name == "wrappers" and value:
      lines += ["wrappers=(", *(f"  {_shorten(w)}," for w in value), "),"]
    elif (
      fields_lib.is_array_field(field)
      and not jax.tree_util.all_leaves([value])
      and jax.tree.leaves(value)
    ):
      lines += _tree_lines(field.name, value)
    else:
      lines.append(f"{field.name}={_describe_leaf(value)},")
  body = textwrap.indent("\n".join(lines), "  ")
  return f"{type(state).__name__}(\n{body}\n)"


def _row(path: str, leaf: Any) -> Row:
  dtype, shape = trees.dtype_of(leaf), np.shape(leaf)
  # A traced array has no device yet.
  is_traced = isinstance(leaf, jax.core.Tracer)
  sharding = None if is_traced else getattr(leaf, "sharding", None)
  held = 0
  if sharding is not None:
    held = math.prod(sharding.shard_shape(shape)) * dtype.itemsize
  nbytes = math.prod(shape) * dtype.itemsize
  return Row(path, shape, str(dtype), sharding, nbytes, held)


def _bytes_by_device(rows: Iterable[Row]) -> dict[Any, int]:
  # Devices may differ: not every array is on every device.
  held: dict[Any, int] = collections.defaultdict(int)
  for row in rows:
    if row.sharding is not None:
      for device in row.sharding.device_set:
        held[device] += row.bytes_per_device
  return held


def _tree_lines(name: str, tree: PyTree) -> list[str]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  arrays = [x for _, x in leaves if _is_array(x)]
  size = sum(math.prod(x.shape) for x in arrays)
  nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
  dtypes = sorted({str(x.dtype) for x in arrays})
  lines = [
    f"{name}: {len(leaves)} array{'s' if leaves[1:] else ''} of "
    f"{', '.join(dtypes)}, {size:,} elements, {_size(nbytes)}"
  ]
  shown = [(trees.path_string(p), x) for p, x in leaves[:_MAX_LINES]]
  width = max(len(path) for path, _ in shown)
  lines += [f"  {p.ljust(width)}  {_describe_leaf(x)}" for p, x in shown]
  if len(leaves) > len(shown):
    lines.append(f"  ... and {len(leaves) - len(shown)} more")
  return lines


def _describe_leaf(leaf: Any) -> str:
  if not _is_array(leaf):
    return _shorten(leaf)
  text = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
  if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
    return text
  if leaf.is_deleted():  # a donated array keeps its shape alone
    return f"{text}, deleted"
  is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
  if leaf.shape or is_key or not leaf.is_fully_replicated:
    return text
  # device_get: jax.transfer_guard("disallow") allows explicit transfers.
  return f"{text} {jax.device_get(leaf)}"


def _is_array(leaf: Any) -> bool:
  # Tracers and jax.ShapeDtypeStruct as well.
  return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _shorten(value: Any) -> str:
  if inspect.ismethod(value):
    # The repr of a bound method has that of its module, of many lines.
    return f"{type(value.__self__).__name__}.{value.__name__}"
  if inspect.isfunction(value):
    return value.__qualname__
  return textwrap.shorten(repr(value), 80, placeholder=" ...")
