"""Trees, gradients, precision policies, registries: used by all packages."""

from flaxshard.core.gradients import nonfinite_leaves
from flaxshard.core.policy import Policy

__all__ = ["Policy", "nonfinite_leaves"]
