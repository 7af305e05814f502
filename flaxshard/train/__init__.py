"""The training loop that `python -m flaxshard` runs."""

from flaxshard.train.loop import train_and_evaluate

__all__ = ["train_and_evaluate"]


def __dir__() -> list[str]:
  return sorted(__all__)
