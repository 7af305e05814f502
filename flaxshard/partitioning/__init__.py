"""Meshes, topologies, device assignments and partitioning rules."""

from flaxshard.partitioning.device_assignment import DeviceAssignment
from flaxshard.partitioning.rules import FSDP
from flaxshard.partitioning.topology import Topology

__all__ = [
  "FSDP",
  "DeviceAssignment",
  "Topology",
]
