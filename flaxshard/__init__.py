"""flaxshard: TensorFlow's distributed-training wrappers for Flax."""

from etils import epy

from flaxshard import data
from flaxshard import wrappers
from flaxshard.core.gradients import nonfinite_leaves
from flaxshard.core.indexed_slices import IndexedSlices
from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.core.parameter_groups import freeze
from flaxshard.core.parameter_groups import scale_learning_rates
from flaxshard.core.policy import Policy
from flaxshard.core.version import VERSION as __version__
from flaxshard.partitioning import DeviceAssignment
from flaxshard.partitioning import FSDP
from flaxshard.partitioning import Topology
from flaxshard.processes import initialize
from flaxshard.replicas.context import get_replica_context
from flaxshard.replicas.context import ReplicaContext
from flaxshard.replicas.values import PerReplica
from flaxshard.sparse.optimizer import sparse_rows
from flaxshard.state.create import create_train_state
from flaxshard.state.lora import LoRA
from flaxshard.state.lora import merge_lora
from flaxshard.state.train_state import TrainState
from flaxshard.strategy.strategy import Strategy
from flaxshard.wrappers import Accumulate
from flaxshard.wrappers import AGN
from flaxshard.wrappers import CrossShard
from flaxshard.wrappers import DynamicLossScale
from flaxshard.wrappers import EMA
from flaxshard.wrappers import FixedLossScale
from flaxshard.wrappers import LossScale
from flaxshard.wrappers import Store
from flaxshard.wrappers import wrap

# Imported when asked for: Orbax, Grain and the loop take a second. None of them
# is imported above, or it would stay a proxy.
with epy.lazy_api_imports(globals()):
  from flaxshard import center
  from flaxshard import checkpoint
  from flaxshard import models
  from flaxshard import nnx
  from flaxshard import plans
  from flaxshard import ray
  from flaxshard import tasks
  from flaxshard import testing
  from flaxshard import train
  from flaxshard.center import Worker
  from flaxshard.checkpoint import Checkpointer
  from flaxshard.core import tf_optimizers as optimizers
  from flaxshard.plans.check import check
  from flaxshard.plans.plan import plan
  from flaxshard.train import config
  from flaxshard.train.export import export
  from flaxshard.train.load import load

__all__ = [
  "AGN",
  "EMA",
  "FSDP",
  "Accumulate",
  "Checkpointer",
  "CrossShard",
  "DeviceAssignment",
  "DynamicLossScale",
  "FixedLossScale",
  "IndexedSlices",
  "LoRA",
  "LossScale",
  "PerReplica",
  "Policy",
  "ReplicaContext",
  "Store",
  "Strategy",
  "Topology",
  "TrainState",
  "Worker",
  "__version__",
  "center",
  "check",
  "checkpoint",
  "config",
  "create_train_state",
  "data",
  "export",
  "freeze",
  "get_replica_context",
  "initialize",
  "is_indexed_slices",
  "load",
  "merge_lora",
  "models",
  "nnx",
  "nonfinite_leaves",
  "optimizers",
  "plan",
  "plans",
  "ray",
  "scale_learning_rates",
  "sparse_rows",
  "tasks",
  "testing",
  "train",
  "wrap",
  "wrappers",
]


def __dir__() -> list[str]:
  return sorted(__all__)
