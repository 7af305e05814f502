"""Tables as aligned text and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import html


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
