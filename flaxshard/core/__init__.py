"""What all other packages use: trees, gradients, precision, registries."""

from flaxshard.core.gradients import nonfinite_leaves
from flaxshard.core.policy import Policy

__all__ = ["Policy", "nonfinite_leaves"]
