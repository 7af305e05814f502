"""Plans of a train step: memory, traffic and cost, without running it."""

from flaxshard.analysis.compare import Comparison
from flaxshard.analysis.cost import Cost
from flaxshard.analysis.memory import Memory
from flaxshard.analysis.plan import Plan

__all__ = ["Comparison", "Cost", "Memory", "Plan"]


def __dir__() -> list[str]:
  return sorted(__all__)
