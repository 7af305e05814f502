"""Facts read off the text of a compiled program."""

from flaxshard.compiled.buffers import Buffer
from flaxshard.compiled.buffers import largest_buffers
from flaxshard.compiled.collectives import Collective
from flaxshard.compiled.collectives import collectives
from flaxshard.compiled.memory_errors import MemoryShortage
from flaxshard.compiled.memory_errors import parse_memory_error

__all__ = [
  "Buffer",
  "Collective",
  "MemoryShortage",
  "collectives",
  "largest_buffers",
  "parse_memory_error",
]


def __dir__() -> list[str]:
  return sorted(__all__)
