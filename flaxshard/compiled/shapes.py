"""Shapes in HLO text: types, lengths, layouts and tuples."""

from __future__ import annotations

import dataclasses
import functools
import re

# Bits of one element. Types that are not listed (token, opaque) have no data.
BITS = {
  "pred": 8, "s1": 1, "u1": 1, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8,
  "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
  "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3fn": 8, "f8e4m3b11fnuz": 8,
  "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8, "bf16": 16,
  "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip

_ARRAY = re.compile(r"(\w+)\[([^\]]*)\](?:\{([^}]*)\})?")
_BRACKET_OR_ARRAY = re.compile(r"\w+\[[^\]]*\](?:\{[^}]*\})?|[()]")


@dataclasses.dataclass(frozen=True)
class Array:
  """The shape of one array, and its layout in memory.

  Attributes:
    dtype: HLO's name of the type, such as `bf16`.
    dims: Lengths of the dimensions.
    minor_to_major: Dimensions from the fastest to the slowest; None if the
      text has no layout.
    tiles: Shapes of the tiles, from the outermost: `T(8,128)(2,1)`.
    memory_space: 0 is the device's main memory (HBM). On TPU 1 is VMEM.
    layout: The text of the layout.
  """

  dtype: str
  dims: tuple[int, ...]
  minor_to_major: tuple[int, ...] | None
  tiles: tuple[tuple[int, ...], ...]
  memory_space: int
  layout: str

  @functools.cached_property
  def size(self) -> int:
    """Number of elements."""
    size = 1
    for length in self.dims:
      size *= length
    return size

  @functools.cached_property
  def nbytes(self) -> int:
    """Bytes of the elements, without the padding of the layout."""
    return -(-self.size * BITS.get(self.dtype, 0) // 8)

  @functools.cached_property
  def padded_bytes(self) -> int:
    """Bytes in memory: the physical shape is padded to whole tiles."""
    if not self.tiles or self.minor_to_major is None:
      return self.nbytes
    physical = [self.dims[d] for d in reversed(self.minor_to_major)]
    # A tile of more dimensions than the array sees leading lengths of one.
    # The inner tiles divide the outer one and add no padding but T(8,128)(2,1)
    # of one row, which the outer tile's multiple covers.
    tile = self.tiles[0]
    physical = [1] * (len(tile) - len(physical)) + physical
    for offset, length in enumerate(reversed(tile), 1):
      if length > 0:
        physical[-offset] = -(-physical[-offset] // length) * length
    size = 1
    for length in physical:
      size *= length
    return -(-size * BITS.get(self.dtype, 0) // 8)

  def __str__(self) -> str:
    return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@functools.lru_cache(maxsize=65536)
def parse_shape(text: str) -> tuple[Array, ...]:
  """Returns the arrays of a shape: one, or the leaves of a tuple in order."""
  return tuple(_array(match) for match in _ARRAY.finditer(text))


@functools.lru_cache(maxsize=65536)
def element_ranges(shape: str) -> tuple[tuple[int, int], ...]:
  """Returns which leaves each element of a tuple's shape has.

  Example:
    >>> element_ranges("((f32[2]{0}, s32[]), f32[4]{0})")
    ((0, 2), (2, 3))
  """
  if not shape.startswith("("):
    return ((0, 1),)
  ranges: list[tuple[int, int]] = []
  leaves = depth = 0
  start = 0
  for match in _BRACKET_OR_ARRAY.finditer(shape, 1, len(shape) - 1):
    token = match[0]
    if token == "(":
      start = leaves if not depth else start
      depth += 1
    elif token == ")":
      depth -= 1
      if not depth:
        ranges.append((start, leaves))
    else:
      leaves += 1
      if not depth:
        ranges.append((leaves - 1, leaves))
  return tuple(ranges)


def _array(match: re.Match[str]) -> Array:
  dtype, dims, layout = match.groups()
  # "<=8" is a dynamic length with its bound.
  lengths = tuple(int(d.strip("<=? ")) for d in dims.split(",") if d.strip())
  order, _, rest = (layout or "").partition(":")
  space = re.search(r"S\((\d+)\)", rest)
  tiles = re.match(r"T((?:\([\d,*]*\))+)", rest)
  return Array(
    dtype,
    lengths,
    tuple(map(int, order.split(","))) if order else (None if lengths else ()),
    tuple(
      tuple(int(n) if n.isdigit() else 0 for n in tile.split(",") if n)
      for tile in re.findall(r"\(([^)]*)\)", tiles[1] if tiles else "")
    ),
    int(space[1]) if space else 0,
    layout or "",
  )
