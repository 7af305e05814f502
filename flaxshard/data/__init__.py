"""Data sources, and their distribution over the devices of a strategy."""

from flaxshard.data.batching import eval_batches
from flaxshard.data.batching import train_iterator
from flaxshard.data.factories import digits
from flaxshard.data.factories import load
from flaxshard.data.factories import shapes_from
from flaxshard.data.factories import text
from flaxshard.data.sources import Arrays
from flaxshard.data.sources import Example
from flaxshard.data.sources import Shapes
from flaxshard.data.sources import Source
from flaxshard.data.sources import Splits
from flaxshard.data.sources import Windows

__all__ = [
  "Arrays",
  "Example",
  "Shapes",
  "Source",
  "Splits",
  "Windows",
  "digits",
  "eval_batches",
  "load",
  "shapes_from",
  "text",
  "train_iterator",
]
