"""Times of several functions, taken in turn, and their ratios."""

from collections.abc import Callable, Sequence
import random
import statistics
import time


def rounds(
  variants: dict[str, Callable[[], None]], count: int
) -> dict[str, list[float]]:
  """Returns the seconds of each variant, called in turn and in any order."""
  times: dict[str, list[float]] = {name: [] for name in variants}
  names = list(variants)
  for fn in variants.values():
    fn()
  for _ in range(count):
    random.shuffle(names)
    for name in names:
      start = time.perf_counter()
      variants[name]()
      times[name].append(time.perf_counter() - start)
  return times


def quartiles(
  seconds: Sequence[float], yardstick: Sequence[float]
) -> list[float]:
  """Returns the quartiles of the ratios to a yardstick, round by round."""
  ratios = [a / b for a, b in zip(seconds, yardstick, strict=True)]
  return statistics.quantiles(ratios, n=4)
