"""Tables as aligned text and as HTML, and figures in them."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import html
import math


@dataclasses.dataclass(frozen=True)
class Table:
  """A table with a title.

  Attributes:
    title: The title.
    rows: The rows; all have the same number of cells.
    header: The names of the columns; empty for none.
    numbers: Positions of the columns that are aligned to the right.
    bold: Positions of the rows that stand out.
  """

  title: str
  rows: Sequence[Sequence[str]]
  header: Sequence[str] = ()
  numbers: frozenset[int] = frozenset()
  bold: frozenset[int] = frozenset()

  def text(self) -> str:
    """Returns the table as lines of aligned columns."""
    lines = [self.header, *self.rows] if self.header else list(self.rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = []
    for line in lines:
      cells = [
        cell.rjust(width) if i in self.numbers else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(line, widths, strict=True))
      ]
      shown.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join([self.title, *shown])

  def html(self) -> str:
    """Returns the table as HTML."""
    lines = [f"<h4>{html.escape(self.title)}</h4>"]
    lines.append('<table style="border-collapse: collapse">')
    if self.header:
      lines.append(self._html_row("th", self.header, False))
    lines.extend(
      self._html_row("td", row, i in self.bold)
      for i, row in enumerate(self.rows)
    )
    return "\n".join([*lines, "</table>"])

  def _html_row(self, tag: str, row: Sequence[str], bold: bool) -> str:
    cells = []
    for i, cell in enumerate(row):
      side = "right" if i in self.numbers else "left"
      text = html.escape(cell)
      text = f"<b>{text}</b>" if bold and text else text
      style = f"padding: 1px 8px; text-align: {side}"
      cells.append(f'<{tag} style="{style}">{text}</{tag}>')
    return f"<tr>{''.join(cells)}</tr>"


def format_seconds(seconds: float | None) -> str:
  """Returns a time as text, such as "1.25 ms"; "unknown" for None.

  Example:
    >>> format_seconds(0.00125), format_seconds(0.0), format_seconds(None)
    ('1.25 ms', '0 s', 'unknown')
  """
  if seconds is None:
    return "unknown"
  if seconds == 0:
    return "0 s"
  for unit, size in (("s", 1.0), ("ms", 1e-3)):
    if seconds >= size:
      return f"{seconds / size:.3g} {unit}"
  return f"{seconds / 1e-6:.3g} µs"


def format_rate(value: float | None, unit: str) -> str:
  """Returns a figure with an SI prefix: "197 TFLOP/s"; "unknown" for None.

  Args:
    value: The figure.
    unit: Its unit, such as "FLOP/s".
  """
  if value is None:
    return "unknown"
  if value == 0:
    return f"0 {unit}"
  power = min(max(int(math.log10(value) // 3), 0), 5)
  return f"{value / 1000**power:.3g} {' kMGTP'[power].strip()}{unit}"
