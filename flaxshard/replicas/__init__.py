"""Per-replica values, and the collectives over replicas."""

from flaxshard.replicas.context import get_replica_context
from flaxshard.replicas.context import ReplicaContext
from flaxshard.replicas.values import PerReplica

__all__ = ["PerReplica", "ReplicaContext", "get_replica_context"]
