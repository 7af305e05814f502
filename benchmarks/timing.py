"""Times several functions in turn, and compares them round by round."""

from collections.abc import Callable, Sequence
import random
import statistics
import time


def rounds(
  variants: dict[str, Callable[[], None]], count: int
) -> dict[str, list[float]]:
  """Returns the seconds of each variant in each round.

  Every variant is called once before the first round. In each round all are
  called, in a random order.

  Args:
    variants: Functions by name.
    count: Number of rounds.
  """
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
  seconds: Sequence[float], reference: Sequence[float]
) -> list[float]:
  """Returns the quartiles of the ratios to a reference in the same round."""
  ratios = [a / b for a, b in zip(seconds, reference, strict=True)]
  return statistics.quantiles(ratios, n=4)
