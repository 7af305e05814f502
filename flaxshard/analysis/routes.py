"""Places of a collective's groups in the torus of a TPU slice."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from flaxshard.analysis import chips

_DIMENSIONS = "xyz"


@dataclasses.dataclass(frozen=True)
class Dimension:
  """The links of one dimension of the torus that a group uses.

  Attributes:
    name: "x", "y" or "z".
    length: Number of chips of the group along it.
    is_ring: Whether the group has both directions of a ring.
    sharing: Number of groups that send over the same links.
  """

  name: str
  length: int
  is_ring: bool
  sharing: int

  def bandwidth(self, link_bandwidth: float) -> float:
    """Returns the bytes per second that a chip of the group can send."""
    return link_bandwidth * (2 if self.is_ring else 1) / self.sharing

  def __str__(self) -> str:
    shared = f" shared by {self.sharing}" if self.sharing > 1 else ""
    return f"{self.name}: {'ring' if self.is_ring else 'line'}{shared}"


@dataclasses.dataclass(frozen=True)
class Route:
  """The place of a collective's groups in the torus.

  Attributes:
    dimensions: Dimensions of the torus along which a group has several chips.
    chips: Chips of a group in one slice.
    slices: Slices that a group spans.
  """

  dimensions: tuple[Dimension, ...]
  chips: int
  slices: int


def find_route(
  mesh: jax.sharding.Mesh,
  axes: Sequence[str],
  device: chips.Device | None,
) -> Route | None:
  """Returns where groups along mesh axes lie; None if it cannot be said.

  Args:
    mesh: The mesh, whose devices have coordinates on TPU.
    axes: The mesh axes.
    device: What is known of the devices; None: nothing.
  """
  first: Any = mesh.devices.flat[0]
  if not axes or device is None or getattr(first, "coords", None) is None:
    return None
  # Chips that are all connected with all are in no torus. JAX gives GPUs
  # coordinates as well.
  if device.chip.ring is None:
    return None
  places = np.array(
    [
      (
        getattr(d, "slice_index", 0) or 0,
        *d.coords,
        getattr(d, "core_on_chip", 0),
      )
      for d in mesh.devices.flat
    ]
  )
  number = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
  positions = [mesh.axis_names.index(axis) for axis in axes]
  last = range(-len(positions), 0)
  groups = np.moveaxis(number, positions, last)
  size = math.prod(groups.shape[-len(positions) :])
  return _route_of_groups(places[groups.reshape(-1, size)], device.chip)


def _route_of_groups(groups: np.ndarray, chip: chips.Chip) -> Route:
  """Returns the route of groups [group, member, (slice, x, y, z, core)]."""
  slices = np.unique(groups[0, :, 0])
  everywhere = groups.reshape(-1, groups.shape[-1])
  in_slice = everywhere[everywhere[:, 0] == slices[0]]
  rank = chip.links // 2
  origin = in_slice[:, 1 : 1 + rank].min(axis=0)
  sides = in_slice[:, 1 : 1 + rank].max(axis=0) - origin + 1
  members = groups[0][groups[0, :, 0] == slices[0]]
  dimensions = []
  for d in range(rank):
    stops = np.unique(members[:, 1 + d])
    if len(stops) == 1:
      continue
    ring = chips.has_ring(
      chip, tuple(map(int, sides)), d
    ) and _is_spread_evenly(stops, int(sides[d]))
    sharing = _count_sharing(groups, members[0], 1 + d, stops, ring)
    dimensions.append(Dimension(_DIMENSIONS[d], len(stops), ring, sharing))
  num_chips = len(np.unique(members[:, 1:4], axis=0))
  return Route(tuple(dimensions), num_chips, len(slices))


def _is_spread_evenly(stops: np.ndarray, length: int) -> bool:
  step, rest = divmod(length, len(stops))
  return rest == 0 and bool(np.all(np.diff(stops) == step))


def _count_sharing(
  groups: np.ndarray,
  member: np.ndarray,
  column: int,
  stops: np.ndarray,
  is_ring: bool,
) -> int:
  """Returns how many groups send over the busiest link that a group uses.

  Args:
    groups: The places of the members of all groups.
    member: The place of one member, through which the line of chips goes.
    column: The column of the dimension along which the line goes.
    stops: Where on the line the group has chips.
    is_ring: Whether the group goes all the way around.
  """
  # The cores of a chip have the same links.
  others = [c for c in range(4) if c != column]
  on_line = np.all(groups[:, :, others] == member[others], axis=-1)
  # The links of a line, by the chip at their lower end.
  links = np.zeros(int(groups[:, :, column].max()) + 1, int)
  for group, is_on_line in zip(groups, on_line, strict=True):
    found = group[is_on_line, column]
    if len(found) and found.min() < found.max():
      links[found.min() : found.max()] += 1
  # Every group of a ring uses all of its links.
  used = links if is_ring else links[stops.min() : stops.max()]
  return max(int(used.max()), 1)
