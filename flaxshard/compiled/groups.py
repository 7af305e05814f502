"""Device groups of a collective, and the mesh axes that they span."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import itertools
import math
import re

import jax
import numpy as np

from flaxshard.compiled import hlo

_IOTA = re.compile(
  r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
)
_MESH = re.compile(
  r"replica_groups=mesh\[([^\]]*)\]"
  r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
  r" \{([^}]*)\}"
)
_MESH_LIST = re.compile(
  r"replica_groups=mesh\[([^\]]*)\], device_ids=\(([\d, ]+)\) \{([^}]*)\}"
)
_LISTS = re.compile(r"replica_groups=\{((?:\{[\d, ]*\},?)*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")

# A transfer between slices names slices (from 1) and devices of a slice.
_SLICE_PRODUCT = re.compile(
  r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+):(\d+)\}"'
)
_SLICE_LISTS = re.compile(r"_xla_megascale_target=\{((?:\{[\d,>-]+\},?)*)\}")
_SLICE_NUMBER = 100_000

Groups = tuple[tuple[int, ...], ...]


def replica_groups(attributes: str, num_devices: int) -> Groups | None:
  """Returns the groups that an instruction's attributes name.

  All forms are read: lists `{{0,1},{2,3}}`, an empty list (all devices), iota
  `[2,4]<=[4,2]T(1,0)`, and a mesh with its axes
  `mesh['a'=4,'b'=2] {'a'}`, whose axes may be parts `'a':(2)2` of an axis.

  Args:
    attributes: Text of the attributes.
    num_devices: Devices of the program, for an empty list.

  Returns:
    Groups of device numbers; None if the attributes have no groups.

  Example:
    >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
  """
  if match := _IOTA.search(attributes):
    shape, dims, permutation = match.groups()
    return _rows(_iota(dims, permutation).reshape(_integers(shape)))
  if match := _MESH.search(attributes):
    axes, dims, permutation, names = match.groups()
    sizes = _mesh_sizes(axes)
    if dims:
      ids = _iota(dims, permutation)
    else:
      ids = np.arange(math.prod(sizes.values()))
    return _groups_of_mesh(ids, sizes, names)
  if match := _MESH_LIST.search(attributes):
    axes, numbers, names = match.groups()
    ids = np.array(_integers(numbers))
    return _groups_of_mesh(ids, _mesh_sizes(axes), names)
  if match := _LISTS.search(attributes):
    lists = re.findall(r"\{([\d, ]*)\}", match[1])
    groups = tuple(_integers(text) for text in lists)
    return groups or (tuple(range(num_devices)),)
  return None


def source_target_pairs(attributes: str) -> Groups | None:
  """Returns the pairs of a collective-permute, or None."""
  match = _PAIRS.search(attributes)
  if match is None:
    return None
  return tuple(_integers(text) for text in re.findall(r"\{([^}]*)\}", match[1]))


def _iota(dims: str, permutation: str | None) -> np.ndarray:
  shape = _integers(dims)
  ids = np.arange(math.prod(shape)).reshape(shape)
  return ids.transpose(_integers(permutation)) if permutation else ids


def _mesh_sizes(axes: str) -> dict[str, int]:
  return {k: int(v) for k, v in re.findall(r"'([^']+)'=(\d+)", axes)}


def _groups_of_mesh(
  ids: np.ndarray, sizes: dict[str, int], names: str
) -> Groups:
  # Split each axis that is named in part: (before, the part, after).
  shape: list[int] = []
  chosen: dict[tuple[str, int], int] = {}
  parts: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
  order: list[tuple[str, int]] = []
  for name, before, size in _MESH_AXIS.findall(names):
    part = (int(before), int(size)) if before else (1, sizes[name])
    parts[name].append(part)
    order.append((name, part[0]))
  for name, length in sizes.items():
    done = 1
    for before, size in sorted(parts[name]):
      shape.append(before // done)
      chosen[name, before] = len(shape)
      shape.append(size)
      done = before * size
    shape.append(length // done)
  group_dims = [chosen[key] for key in order]
  rest = [d for d in range(len(shape)) if d not in group_dims]
  split = ids.reshape(shape).transpose(rest + group_dims)
  size = math.prod(shape[d] for d in group_dims)
  return _rows(split.reshape(-1, size))


def _rows(ids: np.ndarray) -> Groups:
  return tuple(tuple(int(i) for i in row) for row in ids)


def _integers(text: str) -> tuple[int, ...]:
  return tuple(int(part) for part in text.split(",") if part.strip())


@dataclasses.dataclass(frozen=True)
class DeviceNumbers:
  """Positions in the mesh of the devices that a program numbers.

  A program numbers the devices of its mesh in order. In several slices the
  program is that of one slice and numbers the devices of a slice.

  Attributes:
    mesh: The mesh.
    positions: For each slice of the program, positions in `mesh.devices.flat`.
    slices: For each position, the number of its slice.
  """

  mesh: jax.sharding.Mesh
  positions: tuple[tuple[int, ...], ...]
  slices: tuple[int, ...]

  def to_positions(self, groups: Sequence[Sequence[int]]) -> Groups:
    """Returns groups of positions for groups of one slice's numbers."""
    return tuple(
      tuple(positions[i] for i in group)
      for positions in self.positions
      for group in groups
    )

  def slice_transfer(self, attributes: str) -> tuple[Groups, bool] | None:
    """Returns the groups of a transfer between slices through the hosts.

    Two forms are read: slices times devices, `"{1,2}x{0:7}"`, where devices
    with the same number in all slices are a group, and lists of groups or of
    pairs, `{{100000->200001}}`, of 100,000 times the slice plus the device.

    Args:
      attributes: Attributes of the `send` instruction.

    Returns:
      Groups of positions in the mesh, and whether they are pairs of source and
      target. None if the attributes name no slices.
    """
    if match := _SLICE_PRODUCT.search(attributes):
      slices = [int(number) - 1 for number in match[1].split(",")]
      devices = range(int(match[2]), int(match[3]) + 1)
      return tuple(
        tuple(self.positions[number][device] for number in slices)
        for device in devices
      ), False
    if match := _SLICE_LISTS.search(attributes):
      groups = []
      for text in re.findall(r"\{([^}]*)\}", match[1]):
        numbers = [
          divmod(int(number), _SLICE_NUMBER)
          for number in re.findall(r"\d+", text)
        ]
        groups.append(tuple(self.positions[s - 1][d] for s, d in numbers))
      return tuple(groups), "->" in match[1]
    return None

  def axes(self, groups: Groups) -> tuple[str, ...]:
    """Returns the mesh axes whose groups these are; () if none are."""
    wanted = {frozenset(group) for group in groups}
    size = max(map(len, groups), default=1)
    names = [n for n, length in self.mesh.shape.items() if length > 1]
    for count in range(1, len(names) + 1):
      for axes in itertools.combinations(names, count):
        if math.prod(self.mesh.shape[n] for n in axes) != size:
          continue
        if self._groups_along(axes) == wanted:
          return axes
    return ()

  def axes_of_pairs(self, pairs: Groups) -> tuple[str, ...]:
    """Returns the mesh axes along which any pair of devices differs."""
    shape = tuple(self.mesh.shape.values())
    moved: set[int] = set()
    for source, target in pairs:
      here = np.unravel_index(source, shape)
      there = np.unravel_index(target, shape)
      moved.update(d for d in range(len(shape)) if here[d] != there[d])
    return tuple(self.mesh.axis_names[d] for d in sorted(moved))

  def network(self, groups: Groups) -> str:
    """Returns "dcn" if a group spans slices, else "ici", or "none"."""
    if all(len(set(group)) < 2 for group in groups):
      return "none"
    slices = self.slices
    spans = any(len({slices[i] for i in group}) > 1 for group in groups)
    return "dcn" if spans else "ici"

  def _groups_along(self, axes: tuple[str, ...]) -> set[frozenset[int]]:
    shape = tuple(self.mesh.shape.values())
    chosen = [self.mesh.axis_names.index(name) for name in axes]
    rest = [d for d in range(len(shape)) if d not in chosen]
    ids = np.arange(self.mesh.size).reshape(shape).transpose(rest + chosen)
    size = math.prod(shape[d] for d in chosen)
    return {frozenset(map(int, row)) for row in ids.reshape(-1, size)}


def device_numbers(
  program: hlo.Program, mesh: jax.sharding.Mesh
) -> DeviceNumbers:
  """Returns the positions in the mesh of a program's devices.

  Raises:
    ValueError: The program was compiled for another number of devices.
  """
  devices = list(mesh.devices.flat)
  slices = tuple(getattr(d, "slice_index", 0) or 0 for d in devices)
  if program.num_partitions == len(devices):
    positions: Groups = (tuple(range(len(devices))),)
  else:
    positions = tuple(
      tuple(i for i, of in enumerate(slices) if of == number)
      for number in sorted(set(slices))
    )
    if any(len(part) != program.num_partitions for part in positions):
      raise ValueError(
        f"mesh has {len(devices)} devices in {len(positions)} slices, but the"
        f" program was compiled for {program.num_partitions} devices."
      )
  return DeviceNumbers(mesh, positions, slices)
