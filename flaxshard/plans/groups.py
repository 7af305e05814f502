"""Device groups of a collective, and the mesh axes that they span."""

from __future__ import annotations

import math
import re

import jax
import numpy as np

from flaxshard.partitioning import topology
from flaxshard.plans import hlo

_IOTA = re.compile(
  r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
)
_MESH = re.compile(
  r"replica_groups=mesh\[([^\]]*)\]"
  r"(?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d, ]+))\))?"
  r" \{([^}]*)\}"
)
_LISTS = re.compile(
  r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d, ]*\},?)*)\}"
)
# Of a permutation, and of a transfer between slices.
_PAIRS = re.compile(r"source_target_pairs=|\d->\d")
_MESH_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")

# A transfer between slices names slices (from 1) and devices of a slice.
_SLICE_PRODUCT = re.compile(
  r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+):(\d+)\}"'
)
_SLICE_LISTS = re.compile(r"_xla_megascale_target=\{((?:\{[\d,>-]+\},?)*)\}")
_SLICE_NUMBER = 100_000


def replica_groups(attributes: str, num_devices: int) -> np.ndarray:
  """Returns the groups that an instruction's attributes name.

  All forms are read: lists `{{0,1},{2,3}}`, also of pairs, an empty list (all
  devices), iota `[2,4]<=[4,2]T(1,0)`, and a mesh with its axes
  `mesh['a'=4,'b'=2] {'a'}`, whose axes may be parts `'a':(2)2` of an axis.

  Args:
    attributes: Text of the attributes.
    num_devices: Devices of the program.

  Returns:
    ints [groups, devices]: the numbers of devices; one group of all devices if
    none is named.

  Example:
    >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4).tolist()
    [[0, 2], [1, 3]]
  """
  if match := _IOTA.search(attributes):
    shape, dims, permutation = match.groups()
    return _iota(dims, permutation).reshape(_integers(shape))
  if match := _MESH.search(attributes):
    axes, dims, permutation, numbers, names = match.groups()
    sizes = {k: int(v) for k, v in re.findall(r"'([^']+)'=(\d+)", axes)}
    if dims:
      ids = _iota(dims, permutation)
    elif numbers:
      ids = np.array(_integers(numbers))
    else:
      ids = np.arange(math.prod(sizes.values()))
    return _groups_of_mesh(ids, sizes, names)
  match = _LISTS.search(attributes)
  groups = _lists(match[1] if match else "")
  return groups if groups.size else np.arange(num_devices)[None]


def _lists(text: str) -> np.ndarray:
  """Returns the numbers of lists `{0,1},{2,3}`, as a row for each list."""
  rows = [_integers(part) for part in re.findall(r"\{([^}]*)\}", text)]
  length = max(map(len, rows), default=0)
  # Of lists of several lengths, the first number fills up the shorter ones.
  filled = [row + row[:1] * (length - len(row)) for row in rows]
  return np.array(filled, int).reshape(len(rows), length)


def _integers(text: str) -> tuple[int, ...]:
  return tuple(map(int, re.findall(r"\d+", text)))


def _iota(dims: str, permutation: str | None) -> np.ndarray:
  shape = _integers(dims)
  ids = np.arange(math.prod(shape)).reshape(shape)
  return ids.transpose(_integers(permutation)) if permutation else ids


def _groups_of_mesh(
  ids: np.ndarray, sizes: dict[str, int], names: str
) -> np.ndarray:
  """Returns groups along named axes, each whole or a part of it."""
  places = np.unravel_index(np.arange(ids.size), tuple(sizes.values()))
  others = dict(zip(sizes, places, strict=True))
  along = []
  count = 1
  for name, before, part in _MESH_AXIS.findall(names):
    size = int(part or sizes[name])
    # An axis counts its parts from the left, as the digits of a number.
    step = sizes[name] // (int(before or 1) * size)
    digit = places[list(sizes).index(name)] // step % size
    others[name] = others[name] - digit * step
    along.append(digit)
    count *= size
  # By the group, and in it in the order of the names; the last key is first.
  order = np.lexsort([*along[::-1], *reversed(others.values())])
  return ids.ravel()[order].reshape(-1, count)


class Devices:
  """The devices that a program numbers, in their mesh.

  A program numbers the devices of its mesh in order. In several slices the
  program is that of one slice and numbers the devices of a slice.

  Args:
    program: The program.
    mesh: The mesh that it was compiled for.

  Raises:
    ValueError: The program was compiled for another number of devices.
  """

  def __init__(self, program: hlo.Program, mesh: jax.sharding.Mesh) -> None:
    self._mesh = mesh
    # The slice of each device of the mesh.
    self._slices = np.array(list(map(topology.slice_index, mesh.devices.flat)))
    self._count = program.num_partitions
    # For each slice of the program, positions in the mesh.
    parts = [np.arange(mesh.size)]
    if self._count != mesh.size:
      numbers = np.unique(self._slices)
      parts = [np.flatnonzero(self._slices == number) for number in numbers]
      if any(len(part) != self._count for part in parts):
        raise ValueError(
          f"mesh has {mesh.size} devices in {len(parts)} slices, but the "
          f"program was compiled for {self._count} devices."
        )
    self._positions = np.stack(parts)

  def spanned(
    self, instruction: hlo.Instruction
  ) -> tuple[int, tuple[str, ...], tuple[str, ...], str]:
    """Returns the devices among which an instruction exchanges data.

    Args:
      instruction: A collective, or a `send` between slices.

    Returns:
      `group_size`, `axes`, `along` and `network` of a `Collective`. Of pairs,
      the axes are those along which data moves.
    """
    attributes = instruction.attributes
    if instruction.opcode == "send":
      groups = self._slice_transfer(attributes)
    else:
      numbers = replica_groups(attributes, self._count)
      groups = self._positions[:, numbers].reshape(-1, numbers.shape[1])
    size = max((len(set(group)) for group in groups.tolist()), default=1)
    places = np.unravel_index(groups, self._mesh.devices.shape)
    named = zip(self._mesh.axis_names, places, strict=True)
    along = tuple(name for name, place in named if _differ(place))
    # Devices that differ along some axes alone, and are as many as these have,
    # are all devices along them.
    whole = math.prod(self._mesh.shape[name] for name in along)
    is_whole = groups.shape[1] == whole
    axes = along if is_whole or _PAIRS.search(attributes) else ()
    across = "dcn" if _differ(self._slices[groups]) else "ici"
    return size, axes, along, "none" if size < 2 else across

  def _slice_transfer(self, attributes: str) -> np.ndarray:
    """Returns the groups, or the pairs, of a transfer between slices.

    Two forms are read: slices times devices, `"{1,2}x{0:7}"`, where devices
    with the same number in all slices are a group, and lists of groups or of
    pairs, `{{100000->200001}}`, of 100,000 times the slice plus the device.
    """
    if match := _SLICE_PRODUCT.search(attributes):
      slices = np.array(_integers(match[1])) - 1
      return self._positions[slices, int(match[2]) : int(match[3]) + 1].T
    match = _SLICE_LISTS.search(attributes)
    slices, devices = divmod(_lists(match[1] if match else ""), _SLICE_NUMBER)
    return self._positions[slices - 1, devices]


def _differ(values: np.ndarray) -> bool:
  """Returns whether a row has several values."""
  return bool((values != values[:, :1]).any())
