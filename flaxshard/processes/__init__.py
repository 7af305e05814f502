"""Starts the processes of one program and connects them."""

from flaxshard.processes.cluster import Cluster
from flaxshard.processes.initialize import initialize

__all__ = ["Cluster", "initialize"]
