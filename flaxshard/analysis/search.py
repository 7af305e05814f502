"""Searches the largest batch that fits the devices."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import logging
import math
from typing import Any

import ml_collections

from flaxshard.analysis import memory as memory_lib
from flaxshard.analysis import plan as plan_lib
from flaxshard.analysis import tables
from flaxshard.analysis.plan import Plan
from flaxshard.core import checks
from flaxshard.partitioning.topology import Topology
from flaxshard.strategy.strategy import Strategy

_log = logging.getLogger(__name__)

# Examples of each replica in the first try. TPU layouts pad to multiples of 8.
_START = 8
# Tries up to which the next one is predicted; later ones halve the interval.
_MAX_PREDICTED = 6


@dataclasses.dataclass(frozen=True)
class Try:
  """One batch size that was tried.

  Attributes:
    batch_size: Examples in a batch.
    fits: Whether it fits.
    peak: Bytes on a device; None if the compiler did not say.
    peak_is_lower_bound: Whether the compiler gave up at this many.
    hbm: Bytes that a device has.
    seconds: Seconds for tracing and compiling.
  """

  batch_size: int
  fits: bool
  peak: int | None
  peak_is_lower_bound: bool
  hbm: int | None
  seconds: float

  def __str__(self) -> str:
    return (
      f"batch size {self.batch_size}: {' '.join(self._cells()[1:])} "
      f"({self.seconds:.1f} s)"
    )

  def _cells(self) -> list[str]:
    at_least = ">=" if self.peak_is_lower_bound else ""
    share = ""
    if self.peak is not None and self.hbm:
      share = f"{at_least}{self.peak / self.hbm:.1%} of HBM"
    peak = at_least + memory_lib.format_bytes(self.peak)
    verdict = "fits" if self.fits else "does not fit"
    return [str(self.batch_size), peak, share, verdict]


@dataclasses.dataclass(frozen=True, repr=False)
class LargestBatch:
  """The result of `largest_batch`. `str()` is a table.

  Attributes:
    batch_size: The largest batch that was found to fit; 0 if none does.
    plan: Its plan; if none fits, that of the smallest that was tried.
    tries: The batch sizes that were tried, in their order.
    at_limit: Whether the limit of the search fits, so that larger batches may.
  """

  batch_size: int
  plan: Plan
  tries: tuple[Try, ...]
  at_limit: bool = False

  def __str__(self) -> str:
    rows = [
      [*t._cells(), f"{t.seconds:.1f} s"]
      for t in sorted(self.tries, key=lambda t: t.batch_size)
    ]
    found = [i for i, row in enumerate(rows) if row[0] == str(self.batch_size)]
    more = " (the limit of the search)" if self.at_limit else ""
    title = f"largest batch on {self.plan.topology}: {self.batch_size}{more}"
    if not self.batch_size:
      title = f"no batch fits on {self.plan.topology}"
    return tables.Table(
      title,
      rows,
      header=("batch size", "peak", "", "", "compiled in"),
      numbers=frozenset({0, 1, 2, 4}),
      bold=frozenset(found),
    ).text()

  def __repr__(self) -> str:
    return f"LargestBatch({self.batch_size}, {len(self.tries)} tries)"


def largest_batch(
  build: Callable[..., tuple[Any, ...]] | ml_collections.ConfigDict,
  strategy: Strategy | Topology | str,
  *,
  multiple: int = 1,
  within: float = 0.02,
  limit: int = 2**20,
  on_try: Callable[[Try], object] | None = None,
  **options: Any,
) -> LargestBatch:
  """Searches the largest batch whose step fits the devices.

  A few batch sizes are compiled. The memory of the first ones is extrapolated
  to the next, as it is almost a linear function of the batch size. Close to the
  limit the compiler computes values twice rather than keep them, so the largest
  batch may be larger than a line says, and slower.

  Args:
    build: `build(strategy, batch_size=n, **options)` returns
      `(step, state, batch)`, the arguments of `fs.plan`; or a config, whose
      `batch_size` is searched.
    strategy: The strategy, or a topology such as `"v5e:4x4"`; for a config the
      name of a topology.
    multiple: Batch sizes are multiples of this and of the number of replicas.
    within: The search ends when the next batch that is known not to fit is at
      most this much larger, as a fraction. 0: the next multiple.
    limit: The largest batch size to try.
    on_try: Called with each try, such as `print`.
    **options: Further arguments of `build`; for a config fields, such as
      `**{"model.num_layers": 12}`.

  Returns:
    The largest batch, its plan, and all tries.

  Raises:
    TypeError: An argument has the wrong type.
    ValueError: An argument is out of range, or it is unknown what fits: the
      compiler of the devices is not installed, or their memory is unknown.
  """
  within = checks.number("within", within, minimum=0, below=1)
  multiple = checks.integer("multiple", multiple, minimum=1)
  on_try = on_try or _log_try
  if not callable(on_try):
    raise TypeError(
      "largest_batch: on_try must be a function of a try, got "
      f"{checks.describe(on_try)}."
    )
  if isinstance(build, ml_collections.ConfigDict):
    make, replicas = _plan_config(build, strategy, options)
  elif callable(build):
    if not isinstance(strategy, Strategy):
      strategy = Strategy(strategy)
    make, replicas = _plan_built(build, strategy, options)
  else:
    raise TypeError(
      "largest_batch: build must be a function or a config, got "
      f"{checks.describe(build)}."
    )
  unit = math.lcm(multiple, replicas)
  limit = checks.integer("limit", limit, minimum=unit)
  return _search(make, unit, limit // unit, within, on_try)


def _log_try(attempt: Try) -> None:
  _log.info("%s", attempt)


def _plan_built(
  build: Callable[..., tuple[Any, ...]],
  strategy: Strategy,
  options: dict[str, Any],
) -> tuple[Callable[[int], Plan], int]:
  def make(batch_size: int) -> Plan:
    return plan_lib.plan(*build(strategy, batch_size=batch_size, **options))

  return make, strategy.num_replicas_in_sync


def _plan_config(
  config: ml_collections.ConfigDict, topology: Any, options: dict[str, Any]
) -> tuple[Callable[[int], Plan], int]:
  # The loop and its packages are only needed for configs.
  from flaxshard.analysis import config_plan
  from flaxshard.train import devices

  named = Topology.named(checks.string("strategy", topology))
  changed = config_plan.replace_fields(config, options)
  replicas = devices.count_replicas(
    changed, named.num_tasks * named.num_tpus_per_task
  )
  changed.unlock()

  def make(batch_size: int) -> Plan:
    changed.batch_size = batch_size
    return config_plan.plan_config(changed, topology)

  return make, replicas


def _search(
  make: Callable[[int], Plan],
  unit: int,
  limit: int,
  within: float,
  on_try: Callable[[Try], object],
) -> LargestBatch:
  """Searches between 0 and `limit` multiples of `unit`."""
  tries: list[Try] = []
  plans: dict[int, Plan] = {}
  # The most multiples that fit, and the least that do not.
  low, high = 0, limit + 1
  guess = min(_START, limit)
  stride = 1
  while True:
    plan = plans[guess] = make(guess * unit)
    tries.append(_read_try(guess * unit, plan))
    on_try(tries[-1])
    width = high - low
    if tries[-1].fits:
      low = guess
    else:
      high = guess
    gap = max(1, int(low * within))
    if high - low <= gap or low == limit:
      break
    predicted = _predict(tries, plans, unit)
    middle = (low + high) // 2
    if high > limit:
      # More fits than predicted: the compiler trades time for memory.
      guess = predicted if predicted > low else low + gap * stride
      stride *= 2
    elif predicted >= high and stride == 1:
      # It was predicted to fit: only a little less may do so.
      guess = max(high - max(math.ceil(high * within / 2), 1) * stride, middle)
      stride *= 2
    elif high - low > width / 2 or len(tries) > _MAX_PREDICTED:
      # The line does not describe the memory well.
      guess = middle
    else:
      # At the predicted limit, the next one is likely to be too large.
      guess = predicted if predicted > low else low + gap
    guess = min(max(guess, low + 1), high - 1)
  best = plans[low] if low else plans[min(plans)]
  return LargestBatch(low * unit, best, tuple(tries), low == limit)


def _read_try(batch_size: int, plan: Plan) -> Try:
  memory = plan.memory
  if memory.fits is None:
    raise ValueError(
      f"largest_batch: it is unknown what fits a {plan.device_kind} device: "
      f"{' '.join(plan.notes) or 'its memory is unknown.'}"
    )
  return Try(
    batch_size,
    memory.fits,
    memory.peak,
    memory.peak_is_lower_bound,
    memory.hbm,
    plan.seconds,
  )


def _predict(tries: list[Try], plans: dict[int, Plan], unit: int) -> int:
  """Returns the multiples that fit on a line through two known peaks."""
  known = {
    t.batch_size: t.peak
    for t in tries
    if t.peak is not None and not t.peak_is_lower_bound
  }
  hbm = tries[-1].hbm
  if not known or hbm is None:
    # The compiler refused all: half of the least.
    return min(plans) // 2
  # The two that are closest to the limit; without a batch there is the state.
  points = sorted(known.items(), key=lambda item: abs(hbm - item[1]))
  state = next(iter(plans.values())).memory.state_bytes
  (size, peak), (other_size, other_peak) = [*points, (0, state)][:2]
  if (peak - other_peak) * (size - other_size) <= 0:
    return 2 * max(plans)
  slope = (peak - other_peak) / (size - other_size)
  return math.floor((size + (hbm - peak) / slope) / unit)
