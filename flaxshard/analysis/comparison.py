"""Plans beside each other, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import html
import math
from typing import Any

from flaxshard.analysis import charts
from flaxshard.analysis import memory as memory_lib
from flaxshard.analysis import tables
from flaxshard.analysis.plan import Plan
from flaxshard.core import checks


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One row of a comparison.

  Attributes:
    choices: What was chosen, by option: `{"rules": "fsdp"}`.
    plan: The plan; None if there is none.
    error: Why there is no plan.
  """

  choices: Mapping[str, str]
  plan: Plan | None
  error: str | None = None

  @property
  def name(self) -> str:
    """The choices in one line."""
    return ", ".join(value for value in self.choices.values() if value)

  @property
  def fits(self) -> bool | None:
    """Whether it fits the devices; None if unknown."""
    return False if self.plan is None else self.plan.memory.fits

  @property
  def step_seconds(self) -> float | None:
    """The roofline's time of a step."""
    if self.plan is None or self.plan.cost is None:
      return None
    return self.plan.cost.step_seconds

  @property
  def examples_per_second(self) -> float | None:
    """Examples per second of all devices at the roofline's time."""
    step = self.step_seconds
    if self.plan is None or self.plan.batch_size is None or not step:
      return None
    return self.plan.batch_size / step


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
  """Plans beside each other, the best first.

  First come those that fit, then those of which that is unknown, then those
  that do not fit, then those that cannot be built. Each group is ordered by
  examples per second at the roofline's time, or by the time of a step if the
  size of a batch is unknown, or by memory if the time is.

  `str()` is a table; a notebook shows it with a picture.

  Attributes:
    candidates: The plans, the best first.
  """

  candidates: tuple[Candidate, ...]

  @property
  def best(self) -> Candidate | None:
    """The first candidate, if it fits and its time is known."""
    first = self.candidates[0]
    return first if first.fits and first.step_seconds is not None else None

  def __getitem__(self, name: str) -> Plan:
    """Returns the plan of a name.

    Raises:
      KeyError: There is no such name, or its plan could not be made.
    """
    for candidate in self.candidates:
      if candidate.name == name:
        if candidate.plan is None:
          raise KeyError(f"{name!r} has no plan: {candidate.error}")
        return candidate.plan
    names = [candidate.name for candidate in self.candidates]
    raise KeyError(
      f"{name!r} is not one of {', '.join(map(repr, names))}."
      f"{checks.did_you_mean(str(name), names)}"
    )

  def __str__(self) -> str:
    return self._table().text()

  def __repr__(self) -> str:
    best = "none" if self.best is None else self.best.name
    return f"Comparison({len(self.candidates)} plans, best: {best})"

  def to_dict(self) -> list[dict[str, Any]]:
    """Returns the rows as dicts, lists, strings and numbers, as in JSON."""
    return [
      {
        "name": c.name,
        "choices": dict(c.choices),
        "best": c is self.best,
        "error": c.error,
        "plan": None if c.plan is None else c.plan.to_dict(),
      }
      for c in self.candidates
    ]

  def plot(self, path: str | None = None) -> Any:
    """Draws memory, traffic and time of the plans beside each other.

    Args:
      path: File to write a PNG to; None writes none.

    Returns:
      The `matplotlib.figure.Figure`, which a notebook shows.
    """
    return charts.plot_plans(self._plans_by_name(), path)

  def _plans_by_name(self) -> dict[str, Plan]:
    return {c.name: c.plan for c in self.candidates if c.plan is not None}

  def _repr_html_(self) -> str:
    note = "" if self.best is None else f"best: {html.escape(self.best.name)}"
    picture = charts.svg_if_possible(self._plans_by_name())
    return f"{self._table().html()}<p>{note}</p>{picture}"

  def _table(self) -> tables.Table:
    options = list(self.candidates[0].choices)
    header = [
      "", *options, "devices", "state", "temporaries", "peak", "of HBM", "ICI",
      "DCN", "step", "bound", "MFU", "examples/s", "",
    ]  # fmt: skip
    rows = [self._row(candidate, options) for candidate in self.candidates]
    # An empty column says nothing.
    kept = [
      i
      for i, name in enumerate(header)
      if i == 0 or name in options or any(row[i] for row in rows)
    ]
    first = 1 + len(options)
    return tables.Table(
      "plans per step and device, the best first"
      if self.best
      else "plans per step and device",
      [[row[i] for i in kept] for row in rows],
      header=[header[i] for i in kept],
      numbers=frozenset(
        position
        for position, i in enumerate(kept)
        if first < i < len(header) - 1 and header[i] != "bound"
      ),
      bold=frozenset({0} if self.best else ()),
    )

  def _row(self, candidate: Candidate, options: Sequence[str]) -> list[str]:
    mark = "*" if candidate is self.best else ""
    cells = [mark, *(candidate.choices[option] for option in options)]
    plan = candidate.plan
    if plan is None:
      return [*cells, *[""] * 11, candidate.error or ""]
    memory, cost = plan.memory, plan.cost
    at_least = ">=" if memory.peak_is_lower_bound else ""
    share = ""
    if memory.peak is not None and memory.hbm:
      share = f"{at_least}{memory.peak / memory.hbm:.0%}"
    over = f"over by {at_least}{memory_lib.format_bytes(memory.excess)}"
    cells += [
      plan.topology,
      memory_lib.format_bytes(memory.state_bytes),
      memory_lib.format_bytes(memory.temporaries),
      at_least + memory_lib.format_bytes(memory.peak),
      share,
    ]
    if cost is None:
      cells += [""] * 6
    else:
      rate = candidate.examples_per_second
      cells += [
        _sent(plan, "ici"),
        _sent(plan, "dcn"),
        tables.format_seconds(cost.step_seconds),
        cost.bound or "",
        "" if cost.mfu is None else f"{cost.mfu:.1%}",
        "" if rate is None else tables.format_rate(rate, "").strip(),
      ]
    return [*cells, over if memory.fits is False else ""]


def _sent(plan: Plan, network: str) -> str:
  """Returns the bytes that a device sends over a network, as text."""
  assert plan.cost is not None
  times = plan.cost.link_times
  nbytes = sum(time.nbytes for time in times if time.network == network)
  return memory_lib.format_bytes(round(nbytes)) if nbytes else ""


def rank(candidates: Iterable[Candidate]) -> Comparison:
  """Returns the candidates as a comparison, the best first."""
  candidates = list(candidates)
  known = [c for c in candidates if c.plan is not None]
  by_rate = all(
    c.examples_per_second is not None for c in known if c.step_seconds
  )

  def key(candidate: Candidate) -> tuple[float, ...]:
    if candidate.plan is None:
      return (3, 0, 0)
    group = {True: 0, None: 1, False: 2}[candidate.fits]
    step, rate = candidate.step_seconds, candidate.examples_per_second
    time = math.inf if step is None else step
    if by_rate and rate is not None:
      time = 1 / rate
    memory = candidate.plan.memory
    nbytes = memory.state_bytes if memory.peak is None else memory.peak
    return (group, time, nbytes)

  return Comparison(tuple(sorted(candidates, key=key)))
