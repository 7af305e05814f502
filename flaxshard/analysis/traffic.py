"""Groups the collectives of a step by what they are for."""

from __future__ import annotations

import collections
from collections.abc import Sequence
import dataclasses

from flaxshard.analysis import tables
from flaxshard.compiled.collectives import Collective
from flaxshard.state import summary

_HEADER = (
  "purpose", "kind", "axes", "links", "count", "bytes", "sent", "parameters",
)  # fmt: skip

# Parameters that a row names; the number of the others follows.
_MAX_NAMES = 3


@dataclasses.dataclass(frozen=True)
class TrafficRow:
  """Collectives of one kind and purpose. Bytes are per step and device.

  Attributes:
    purpose: What they are for, such as "gradients".
    kind: Such as "all-reduce".
    axes: The mesh axes of their groups.
    network: "ici", or "dcn" if a group has devices of several slices.
    count: Executions in a step, those of AGN's commit divided by its period.
    nbytes: Bytes of the operands; of the results, for an all-gather.
    link_bytes: Bytes that a device sends, with ring algorithms.
    conditional: Whether some of them stand in a branch that need not run.
    parameters: Paths of the parameters that they concern, as far as known.
  """

  purpose: str
  kind: str
  axes: tuple[str, ...]
  network: str
  count: float
  nbytes: float
  link_bytes: float
  conditional: bool
  parameters: tuple[str, ...]

  @property
  def shown_parameters(self) -> str:
    """The first parameters, and how many more there are."""
    names = ", ".join(self.parameters[:_MAX_NAMES])
    more = len(self.parameters) - _MAX_NAMES
    return f"{names} and {more} more" if more > 0 else names


def rows_of(
  collectives: Sequence[Collective], period: int, *, each: bool = False
) -> tuple[TrafficRow, ...]:
  """Returns the traffic of a step, the most bytes first.

  Args:
    collectives: The collectives of its program.
    period: Steps between two commits of AGN; 1 without AGN.
    each: Whether each collective is a row of its own.
  """
  groups: dict[tuple[object, ...], list[Collective]] = collections.defaultdict(
    list
  )
  for i, c in enumerate(collectives):
    key = (
      c.purpose, c.kind, c.axes, c.network, c.in_conditional, c.in_commit,
    )  # fmt: skip
    groups[(*key, i) if each else key].append(c)
  rows = []
  for group in groups.values():
    first = group[0]
    counts = [c.executions_per_step(period) for c in group]
    names = {name: None for c in group for name in c.parameters}
    pairs = list(zip(counts, group, strict=True))
    rows.append(
      TrafficRow(
        first.purpose,
        first.kind,
        first.axes,
        first.network,
        count=sum(counts),
        nbytes=sum(n * c.payload_bytes for n, c in pairs),
        link_bytes=sum(n * c.link_bytes for n, c in pairs),
        conditional=first.in_conditional,
        parameters=tuple(names),
      )
    )
  return tuple(sorted(rows, key=lambda row: -row.link_bytes))


def table_of(rows: Sequence[TrafficRow], period: int) -> tables.Table:
  """Returns the traffic as a table, with the sum at its end.

  Args:
    rows: The rows.
    period: Steps between two commits of AGN; 1 without AGN.
  """
  title = "traffic per step and device"
  if period > 1:
    title += f", that of commits and updates divided by {period} batches"
  sent = sum(row.link_bytes for row in rows)
  total = ["total", *[""] * (len(_HEADER) - 1)]
  total[_HEADER.index("sent")] = summary.format_bytes(round(sent))
  return tables.Table(
    title,
    [*map(_cells, rows), total],
    _HEADER,
    numbers=frozenset({4, 5, 6}),
    bold=frozenset({len(rows)}),
  )


def _cells(row: TrafficRow) -> tuple[str, ...]:
  return (
    row.purpose,
    row.kind,
    ", ".join(row.axes) or "other groups",
    row.network.upper() if row.network != "none" else "none",
    f"{row.count:.4g}" + (" if" if row.conditional else ""),
    summary.format_bytes(round(row.nbytes)),
    summary.format_bytes(round(row.link_bytes)),
    row.shown_parameters,
  )
