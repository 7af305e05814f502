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

from collections.abc import Iterable
import dataclasses
import itertools

import jax
import numpy as np

from flaxshard.analysis import chips
from flaxshard.analysis import routes
from flaxshard.compiled.collectives import Collective


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
  found: dict[tuple[tuple[str, ...], str], list[LinkTime]] = {}
  known: dict[tuple[str, ...], routes.Route | None] = {}
  for collective in traffic:
    if collective.network == "none" or collective.group_size < 2:
      continue
    axes = collective.axes or _axes_in_slice(mesh, collective)
    if axes not in known:
      known[axes] = routes.find_route(mesh, axes, device)
    runs = collective.executions_per_step(period)
    for time in _times(collective, axes, known[axes], device):
      times = found.setdefault((axes, time.network), [])
      times.append(_repeat(time, runs))
  return tuple(map(_sum, found.values()))


def _repeat(time: LinkTime, runs: float) -> LinkTime:
  return dataclasses.replace(
    time,
    nbytes=time.nbytes * runs,
    seconds=None if time.seconds is None else time.seconds * runs,
  )


def _sum(times: list[LinkTime]) -> LinkTime:
  seconds = [time.seconds for time in times if time.seconds is not None]
  return dataclasses.replace(
    times[0],
    nbytes=sum(time.nbytes for time in times),
    seconds=sum(seconds) if len(seconds) == len(times) else None,
  )


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
  route: routes.Route | None,
  device: chips.Device | None,
) -> list[LinkTime]:
  """Returns the times of one execution, on each network that it uses."""
  link = device and device.chip.link_bandwidth
  dcn = device and device.dcn_bandwidth
  if route is None:
    nbytes = collective.link_bytes
    if collective.network == "dcn":
      words, speed = "between slices", dcn
    elif device is not None and device.chip.ring is None and link:
      words, speed = "all links", link * device.chip.links
    else:
      words, speed = "as over one link", link
    seconds = nbytes / speed if speed else None
    return [LinkTime(axes, collective.network, words, nbytes, seconds)]
  times = []
  if route.chips > 1 and route.dimensions:
    words = ", ".join(map(str, route.dimensions))
    nbytes = _ring_bytes(collective, route.chips)
    seconds = _ici_seconds(collective, route, link) if link else None
    times.append(LinkTime(axes, "ici", words, nbytes, seconds))
  if collective.network == "dcn" and route.slices > 1:
    nbytes = _ring_bytes(collective, route.slices)
    if not _is_personal(collective):
      nbytes /= max(collective.group_size // route.slices, 1)
    seconds = nbytes / dcn if dcn else None
    words = f"{route.slices} slices"
    times.append(LinkTime(axes, "dcn", words, nbytes, seconds))
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


def _ici_seconds(
  collective: Collective, route: routes.Route, link: float
) -> float:
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
