"""Plans and checks of a train step, without running it.

The package is not called `plan`: that is the function `flaxshard.plan`.
"""

from flaxshard.plans.findings import Finding
from flaxshard.plans.findings import Findings
from flaxshard.plans.plan import Memory
from flaxshard.plans.plan import Plan
from flaxshard.plans.traffic import Collective
from flaxshard.plans.traffic import collectives

__all__ = [
  "Collective",
  "Finding",
  "Findings",
  "Memory",
  "Plan",
  "collectives",
]
