"""Seconds that a program's collectives need on the links between chips.

The model, a simple one, whose times are lower bounds:

- The chips of a group lie along some dimensions of the torus. A collective uses
  the links of all these dimensions at once: both directions of a ring, one
  direction of a line, which has an end. A line is what a group has that is
  shorter than the ring, or a slice without one (`chips.has_ring`).
- All groups of a collective run at the same time. Where several groups send
  over the same link, as those of every second chip do, they share it.
- Bytes are those of ring algorithms over the k chips of a group in a slice:
  2(k-1)/k of the operand for an all-reduce, (k-1)/k of the result for an
  all-gather, (k-1)/k of the operand for a reduce-scatter. In an all-to-all half
  of the bytes cross the middle of each dimension. In a collective-permute a
  device sends its operand once, in one direction, to the next of its axis.
- Between s slices, the m devices of a group in one slice each carry one m-th:
  2(s-1)/s/m of the operand for an all-reduce, and so on.
- Latency, and the transfers between two cores of a chip, take no time.

Source: J. Austin et al., How to Scale Your Model, part 3,
https://jax-ml.github.io/scaling-book/sharding/
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np

from flaxshard.analysis import chips
from flaxshard.compiled.collectives import Collective

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
  """Where the groups of a collective lie.

  Attributes:
    dimensions: Dimensions of the torus along which a group has several chips.
    chips: Chips of a group in one slice.
    slices: Slices that a group spans.
  """

  dimensions: tuple[Dimension, ...]
  chips: int
  slices: int


@dataclasses.dataclass(frozen=True)
class LinkTime:
  """Traffic of the collectives along the same mesh axes in one step.

  Attributes:
    axes: Mesh axes along which the groups lie; empty if unknown.
    network: "ici" between the chips of a slice, "dcn" between slices.
    links: The links that are used, in words.
    nbytes: Bytes that a device sends.
    seconds: Seconds on the links; None if their speed is unknown.
  """

  axes: tuple[str, ...]
  network: str
  links: str
  nbytes: float
  seconds: float | None


def link_times(
  traffic: Iterable[Collective],
  mesh: jax.sharding.Mesh,
  device: chips.Device | None,
  period: float = 1,
) -> tuple[LinkTime, ...]:
  """Returns the times on the links, by mesh axes and network.

  Args:
    traffic: The collectives of a program.
    mesh: The mesh that the program was compiled for.
    device: What is known of the mesh's devices; None: nothing.
    period: Steps between two commits of AGN.

  Returns:
    One entry for each set of mesh axes and network that has traffic.
  """
  found: dict[tuple[tuple[str, ...], str], LinkTime] = {}
  routes: dict[tuple[str, ...], Route | None] = {}
  for collective in traffic:
    if collective.network == "none" or collective.group_size < 2:
      continue
    runs = collective.executions_per_step(period)
    axes = collective.axes or _axes_in_slice(mesh, collective)
    if axes not in routes:
      routes[axes] = find_route(mesh, axes, device)
    for time in _times(collective, axes, routes[axes], device):
      key = (axes, time.network)
      before = found.get(
        key, dataclasses.replace(time, nbytes=0.0, seconds=0.0)
      )
      seconds = None
      if before.seconds is not None and time.seconds is not None:
        seconds = before.seconds + runs * time.seconds
      nbytes = before.nbytes + runs * time.nbytes
      found[key] = dataclasses.replace(before, nbytes=nbytes, seconds=seconds)
  return tuple(found.values())


def _axes_in_slice(
  mesh: jax.sharding.Mesh, collective: Collective
) -> tuple[str, ...]:
  """Returns the axes whose part in one slice has as many devices as a group.

  In several slices, the compiler splits an all-reduce of all devices into one
  in each slice, whose groups are not those of a whole mesh axis, and one
  between the slices. The result is empty if no axes, or several, match.
  """
  slices = np.array([getattr(d, "slice_index", 0) for d in mesh.devices.flat])
  if collective.network != "ici" or len(np.unique(slices)) == 1:
    return ()
  slices = slices.reshape(mesh.devices.shape)
  found = []
  for count in range(1, len(mesh.axis_names) + 1):
    for axes in itertools.combinations(mesh.axis_names, count):
      index = tuple(
        slice(None) if axis in axes else 0 for axis in mesh.axis_names
      )
      group = slices[index]
      if np.sum(group == slices.flat[0]) == collective.group_size:
        # An axis of one device adds nothing to a group.
        found.append(tuple(a for a in axes if mesh.shape[a] > 1))
  return found[0] if len(set(found)) == 1 else ()


def _times(
  collective: Collective,
  axes: tuple[str, ...],
  route: Route | None,
  device: chips.Device | None,
) -> list[LinkTime]:
  """Returns the times of one execution, on each network that it uses."""
  link = device and device.chip.link_bandwidth
  if route is None:
    # The groups are those of no mesh axes, or the devices have no coordinates.
    known = Route((), collective.group_size, 1)
    between_slices = collective.network == "dcn"
    speed = device and device.dcn_bandwidth if between_slices else link
    if device is not None and device.chip.ring is None and link:
      speed = link * device.chip.links
    nbytes = _ring_bytes(collective, known.chips)
    words = "between slices" if between_slices else "as over one link"
    return [
      LinkTime(
        axes,
        collective.network,
        words,
        nbytes,
        nbytes / speed if speed else None,
      )
    ]
  times = []
  if route.chips > 1 and route.dimensions:
    times.append(
      LinkTime(
        axes,
        "ici",
        ", ".join(map(str, route.dimensions)),
        _ring_bytes(collective, route.chips),
        _ici_seconds(collective, route, link) if link else None,
      )
    )
  if collective.network == "dcn" and route.slices > 1:
    nbytes = _ring_bytes(collective, route.slices)
    if not _is_personal(collective):
      nbytes /= max(collective.group_size // route.slices, 1)
    speed = device and device.dcn_bandwidth
    times.append(
      LinkTime(
        axes,
        "dcn",
        f"{route.slices} slices",
        nbytes,
        nbytes / speed if speed else None,
      )
    )
  return times


def _is_personal(collective: Collective) -> bool:
  """Returns whether each device has other bytes for each of the others."""
  return collective.kind in (
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
  )


def _ring_bytes(collective: Collective, n: int) -> float:
  """Returns the bytes that a device sends to the n - 1 others of a ring."""
  # The result of an all-gather is the same, whichever way it comes.
  return dataclasses.replace(collective, group_size=n).link_bytes


def _ici_seconds(collective: Collective, route: Route, link: float) -> float:
  if collective.kind == "collective-permute":
    sharing = max(dimension.sharing for dimension in route.dimensions)
    return collective.operand_bytes * sharing / link
  if _is_personal(collective):
    return max(
      collective.operand_bytes
      * dimension.length
      / 4
      / dimension.bandwidth(link)
      for dimension in route.dimensions
    )
  speed = sum(dimension.bandwidth(link) for dimension in route.dimensions)
  return _ring_bytes(collective, route.chips) / speed


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
