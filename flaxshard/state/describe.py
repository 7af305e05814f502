"""Describes the shardings of a state's arrays, in a table."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
import dataclasses
import functools
import html
import math
from typing import Any

from flax.training import train_state
import jax
import numpy as np

from flaxshard.core import ipython
from flaxshard.core import trees
from flaxshard.state import fields as fields_lib
from flaxshard.state import replica_groups
from flaxshard.state import summary

PyTree = Any

# Bytes from which on a replicated array gets a mark: it could be split.
_LARGE = 2**20
# Devices up to which a notebook shows the parts of an array, legibly.
_MAX_GRID = 16
_size = summary.format_bytes
_HEADER = ("shape", "dtype", "spec", "per device", "whole")


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
    large: Whether the array has 1 MiB or more and is replicated over several
      devices.
  """

  path: str
  shape: tuple[int, ...]
  dtype: str
  sharding: jax.sharding.Sharding | None
  nbytes: int
  bytes_per_device: int
  large: bool

  @property
  def spec(self) -> str:
    """The PartitionSpec, such as `P(None, 'model')`, or the single device."""
    if self.sharding is None:
      return "not placed"
    if isinstance(self.sharding, jax.sharding.NamedSharding):
      entries = map(repr, self.sharding.spec)
      return f"P({', '.join(entries)})"
    if len(self.sharding.device_set) == 1:
      device: Any = next(iter(self.sharding.device_set))
      return f"{device.platform}:{device.id}"
    return str(self.sharding)


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
  """The arrays of a state with their shardings.

  `str()` is a table. A notebook shows the table with colors.

  Attributes:
    groups: The arrays by field.
    note: A sentence on how the replicas differ, if a wrapper makes them differ;
      else None.
    shown_in_cell: Number of the IPython cell that has shown it already.
  """

  groups: tuple[Group, ...]
  note: str | None = None
  shown_in_cell: int | None = None

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
    return sum(row.nbytes for row in self.rows)

  @property
  def bytes_per_device(self) -> int:
    """Bytes on the device that holds the most."""
    return max(_bytes_by_device(self.rows).values(), default=0)

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
    table: list[Sequence[str]] = []
    for group in self.groups:
      table.append((group.name, *_HEADER))
      table.extend((f"  {row.path}", *_cells(row)) for row in group.rows)
      table.append(("  total", "", "", "", *_sizes(group)))
    # One set of column widths for all groups, so that their columns align.
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for name, shape, dtype, spec, *sizes in table:
      # Text to the left, sizes to the right.
      text = zip((name, shape, dtype, spec), widths[:4], strict=True)
      numbers = zip(sizes, widths[4:], strict=True)
      cells = [cell.ljust(width) for cell, width in text]
      cells += [cell.rjust(width) for cell, width in numbers]
      lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, *self._footer()])

  def _ipython_display_(self) -> None:
    # IPython shows the value of a cell's last line, which `show` returns.
    if self.shown_in_cell != ipython.cell_number():
      show(self)

  def _repr_html_(self) -> str:
    lines = ['<table style="border-collapse: collapse; text-align: left">']
    for group in self.groups:
      lines.append(_html_row("th", (group.name, *_HEADER, "devices")))
      for row in group.rows:
        lines.append(
          _html_row("td", (row.path, *_cells(row)), _render_grid(row))
        )
      lines.append(
        _html_row("td", ("total", "", "", "", *_sizes(group), ""), bold=True)
      )
    lines.append("</table>")
    lines.extend(f"<p>{html.escape(line)}</p>" for line in self._footer())
    return "\n".join(lines)

  def _footer(self) -> list[str]:
    lines = [self.summary]
    if any(row.large for row in self.rows):
      lines.append(
        f"* at least {_size(_LARGE)}, replicated over several devices"
      )
    if self.note:
      lines.append(self.note)
    return lines


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
    under the table says how. A notebook also shows which device holds which
    part of an array, for up to 16 devices; each part has its own color.

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
  fields = {"tree": state}
  if isinstance(state, train_state.TrainState):
    fields = fields_lib.array_fields(state)
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
  return Description(
    tuple(group for group in groups if group.rows),
    replica_groups.describe_divergence(state),
  )


def show(description: Description) -> Description:
  """Prints a description; a notebook shows it as HTML.

  Args:
    description: The description.

  Returns:
    The description. As the value of the same cell it is not shown again.
  """
  cell = ipython.cell_number()
  if cell is None:
    print(description)
    return description
  from IPython import display

  content = {
    "text/plain": str(description),
    "text/html": description._repr_html_(),
  }
  display.display(content, raw=True)
  return dataclasses.replace(description, shown_in_cell=cell)


def _row(path: str, leaf: Any) -> Row:
  dtype, shape = trees.dtype_of(leaf), np.shape(leaf)
  # A traced array has no device yet.
  is_traced = isinstance(leaf, jax.core.Tracer)
  sharding = None if is_traced else getattr(leaf, "sharding", None)
  nbytes = math.prod(shape) * dtype.itemsize
  bytes_per_device = 0
  large = False
  if sharding is not None:
    part_shape = sharding.shard_shape(shape)
    bytes_per_device = math.prod(part_shape) * dtype.itemsize
    replicated = bytes_per_device == nbytes and len(sharding.device_set) > 1
    large = replicated and nbytes >= _LARGE
  return Row(path, shape, str(dtype), sharding, nbytes, bytes_per_device, large)


def _bytes_by_device(rows: Iterable[Row]) -> dict[Any, int]:
  # Devices may differ: not every array is on every device.
  held: dict[Any, int] = collections.defaultdict(int)
  for row in rows:
    if row.sharding is not None:
      for device in row.sharding.device_set:
        held[device] += row.bytes_per_device
  return held


def _cells(row: Row) -> tuple[str, ...]:
  mark = "* " if row.large else ""  # the footer explains it
  return (
    str(row.shape),
    row.dtype,
    row.spec,
    mark + _size(row.bytes_per_device),
    _size(row.nbytes),
  )


def _sizes(group: Group) -> tuple[str, str]:
  return _size(group.bytes_per_device), _size(group.nbytes)


def _html_row(
  tag: str, cells: Iterable[str], markup: str = "", *, bold: bool = False
) -> str:
  style = ' style="padding: 1px 8px; text-align: left"'
  parts = [html.escape(cell) for cell in cells]
  if bold:
    parts = [f"<b>{part}</b>" if part else "" for part in parts]
  if markup:
    parts.append(markup)
  return f"<tr>{''.join(f'<{tag}{style}>{p}</{tag}>' for p in parts)}</tr>"


def _render_grid(row: Row) -> str:
  """Returns an HTML table of the parts of an array, with their devices."""
  if row.sharding is None:
    return "–"
  count = len(row.sharding.device_set)
  if count > _MAX_GRID:
    return f"{count} devices"
  return _render_parts(row.sharding, row.shape)


# Many arrays of a state have the same sharding and shape.
@functools.lru_cache
def _render_parts(
  sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> str:
  # Device ids by the start of their part, which identifies it.
  parts: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
  indices: dict[Any, Any] = dict(sharding.devices_indices_map(shape))
  for device, index in indices.items():
    parts[tuple(s.start or 0 for s in index)].append(device.id)
  split = [d for d in range(len(shape)) if len({key[d] for key in parts}) > 1]
  lines: dict[Any, list[str]] = collections.defaultdict(list)
  for i, start in enumerate(sorted(parts)):
    # Hues at equal distances, so that no two parts look alike.
    hue = round(360 * i / len(parts))
    color = f"hsl({hue}, 70%, 82%)" if len(parts) > 1 else "#eee"
    devices = " ".join(map(str, sorted(parts[start])))
    # If several dimensions are split, the first one runs down, in rows, and
    # the others run to the right.
    lines[start[split[0]] if len(split) > 1 else 0].append(
      f'<td style="background: {color}; color: #000; padding: 1px 6px; '
      f'border: 1px solid #fff; text-align: center">{devices}</td>'
    )
  rows = "".join(f"<tr>{''.join(cells)}</tr>" for cells in lines.values())
  return f'<table style="border-collapse: collapse">{rows}</table>'
