"""Names the devices of a mesh as topologies are named."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from flaxshard.partitioning import tpu_generations


def name_devices(device: Any, mesh: jax.sharding.Mesh | None) -> str:
  """Returns the name of the topology of some devices, such as `"v5e:2x4"`.

  Args:
    device: One of the devices.
    mesh: Their mesh; None for one device.

  Returns:
    The name if the devices are whole slices of TPUs, else their number and
    kind, such as "8 of cpu".
  """
  devices = [device] if mesh is None else list(mesh.devices.flat)
  name = _topology_name(devices)
  return name or f"{len(devices)} of {device.device_kind}"


def _topology_name(devices: list[Any]) -> str | None:
  kind = devices[0].device_kind
  generations = [
    g for g in tpu_generations.GENERATIONS.values() if g.device_kind == kind
  ]
  if not generations or not all(hasattr(d, "coords") for d in devices):
    return None
  generation = generations[0]
  slices = len({getattr(d, "slice_index", 0) for d in devices})
  coords = np.array([d.coords for d in devices])
  sides = coords.max(axis=0) - coords.min(axis=0) + 1
  whole = slices * int(sides.prod()) * generation.devices_per_chip
  if whole != len(devices):
    return None
  shown = "x".join(map(str, sides[: generation.rank]))
  return f"{f'{slices}*' if slices > 1 else ''}{generation.name}:{shown}"
