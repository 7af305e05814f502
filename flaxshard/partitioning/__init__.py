"""Meshes, topologies, device assignments and partitioning rules."""

from flaxshard.partitioning.device_assignment import DeviceAssignment
from flaxshard.partitioning.fsdp import FSDP
from flaxshard.partitioning.topology import Topology

__all__ = [
  "FSDP",
  "DeviceAssignment",
  "Topology",
]


def __dir__() -> list[str]:
  return sorted(__all__)
