"""Facts read off the text of a compiled program."""

from flaxshard.compiled.buffers import Buffer
from flaxshard.compiled.buffers import largest_buffers
from flaxshard.compiled.collectives import Collective
from flaxshard.compiled.collectives import collectives

__all__ = ["Buffer", "Collective", "collectives", "largest_buffers"]


def __dir__() -> list[str]:
  return sorted(__all__)
