"""Plans of a train step: memory, traffic and cost, without running it."""

from flaxshard.analysis.comparison import Comparison
from flaxshard.analysis.cost import Cost
from flaxshard.analysis.memory import Memory
from flaxshard.analysis.plan import Plan
from flaxshard.analysis.search import LargestBatch

__all__ = ["Comparison", "Cost", "LargestBatch", "Memory", "Plan"]


def __dir__() -> list[str]:
  return sorted(__all__)
