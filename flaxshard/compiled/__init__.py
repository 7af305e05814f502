"""Facts read off the text of a compiled program."""

from flaxshard.compiled.collectives import Collective
from flaxshard.compiled.collectives import collectives

__all__ = ["Collective", "collectives"]


def __dir__() -> list[str]:
  return sorted(__all__)
