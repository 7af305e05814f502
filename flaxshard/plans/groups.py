"""Device groups of a collective, and the mesh axes that they span."""

from __future__ import annotations

import math
import re

import jax
import numpy as np

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

Groups = tuple[tuple[int, ...], ...]


def replica_groups(attributes: str, num_devices: int) -> Groups:
  """Returns the groups that an instruction's attributes name.

  All forms are read: lists `{{0,1},{2,3}}`, also of pairs, an empty list (all
  devices), iota `[2,4]<=[4,2]T(1,0)`, and a mesh with its axes
  `mesh['a'=4,'b'=2] {'a'}`, whose axes may be parts `'a':(2)2` of an axis.

  Args:
    attributes: Text of the attributes.
    num_devices: Devices of the program.

  Returns:
    Groups of device numbers; one of all devices if none are named.

  Example:
    >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
  """
  if match := _IOTA.search(attributes):
    shape, dims, permutation = match.groups()
    return _rows(_iota(dims, permutation).reshape(_integers(shape)))
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
  groups = _lists(match[1]) if match else ()
  return groups or (tuple(range(num_devices)),)


def _lists(text: str) -> Groups:
  return tuple(_integers(part) for part in re.findall(r"\{([^}]*)\}", text))


def _integers(text: str) -> tuple[int, ...]:
  return tuple(map(int, re.findall(r"\d+", text)))


def _iota(dims: str, permutation: str | None) -> np.ndarray:
  shape = _integers(dims)
  ids = np.arange(math.prod(shape)).reshape(shape)
  return ids.transpose(_integers(permutation)) if permutation else ids


def _rows(ids: np.ndarray) -> Groups:
  return tuple(tuple(map(int, row)) for row in ids)


def _groups_of_mesh(
  ids: np.ndarray, sizes: dict[str, int], names: str
) -> Groups:
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
  return _rows(ids.ravel()[order].reshape(-1, count))


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
    devices = list(mesh.devices.flat)
    self._slices = [getattr(d, "slice_index", 0) or 0 for d in devices]
    self._count = program.num_partitions
    # For each slice of the program, positions in the mesh.
    self._positions = [list(range(len(devices)))]
    if self._count != len(devices):
      self._positions = [
        [i for i, of in enumerate(self._slices) if of == number]
        for number in sorted(set(self._slices))
      ]
      if any(len(part) != self._count for part in self._positions):
        raise ValueError(
          f"mesh has {len(devices)} devices in {len(self._positions)} slices, "
          f"but the program was compiled for {self._count} devices."
        )

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
      groups = tuple(
        tuple(positions[i] for i in group)
        for positions in self._positions
        for group in replica_groups(attributes, self._count)
      )
    size = max((len(set(group)) for group in groups), default=1)
    along = self._differing_axes(groups)
    # Devices that differ along some axes alone, and are as many as these have,
    # are all devices along them.
    whole = math.prod(self._mesh.shape[name] for name in along)
    is_whole = all(len(group) == whole for group in groups)
    axes = along if is_whole or _PAIRS.search(attributes) else ()
    across = any(len({self._slices[i] for i in group}) > 1 for group in groups)
    network = "none" if size < 2 else "dcn" if across else "ici"
    return size, axes, along, network

  def _differing_axes(self, groups: Groups) -> tuple[str, ...]:
    """Returns the mesh axes along which devices of any group differ."""
    shape = self._mesh.devices.shape
    differ = np.zeros(len(shape), bool)
    for group in groups:
      places = np.array(np.unravel_index(group, shape))
      differ |= (places != places[:, :1]).any(axis=1)
    names = zip(self._mesh.axis_names, differ, strict=True)
    return tuple(name for name, is_different in names if is_different)

  def _slice_transfer(self, attributes: str) -> Groups:
    """Returns the groups, or the pairs, of a transfer between slices.

    Two forms are read: slices times devices, `"{1,2}x{0:7}"`, where devices
    with the same number in all slices are a group, and lists of groups or of
    pairs, `{{100000->200001}}`, of 100,000 times the slice plus the device.
    """
    if match := _SLICE_PRODUCT.search(attributes):
      devices = range(int(match[2]), int(match[3]) + 1)
      slices = _integers(match[1])
      return tuple(
        tuple(self._positions[s - 1][d] for s in slices) for d in devices
      )
    match = _SLICE_LISTS.search(attributes)
    return tuple(
      tuple(
        self._positions[n // _SLICE_NUMBER - 1][n % _SLICE_NUMBER]
        for n in group
      )
      for group in (_lists(match[1]) if match else ())
    )
