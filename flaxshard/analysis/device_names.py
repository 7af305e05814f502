"""Names the devices of a mesh as topologies are named."""

from __future__ import annotations

from typing import Any

import jax

from flaxshard.partitioning.topology import Topology


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
  try:
    name = Topology.from_devices(devices).name
  except ValueError:  # they do not fill a box of chips
    name = None
  return name or f"{len(devices)} of {device.device_kind}"
