"""Boxes, text and arrows as SVG, in a light and a dark variant.

Widths are in pixels of the SVG. A picture is at most 480 wide, so that text of
15 is still read on a phone, where the picture is shown at about 350.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import dataclasses
import html

_SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial"
_MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono'"


@dataclasses.dataclass(frozen=True)
class Kind:
  """The colours of one kind of thing.

  Attributes:
    fill: Inside of a box.
    line: Border of a box, or an arrow.
    text: Text.
  """

  fill: str
  line: str
  text: str


# What Flax, optax and Orbax have; what flaxshard adds; paper and remarks; what
# replicas send to each other.
PALETTES = {
  "light": {
    "plain": Kind("#f0f2f5", "#6e7781", "#1f2328"),
    "ours": Kind("#dbeeff", "#0969da", "#0a3f86"),
    "paper": Kind("#ffffff", "#8c959f", "#57606a"),
    "sent": Kind("#fff1d6", "#9a6700", "#6f4a00"),
  },
  "dark": {
    "plain": Kind("#2a2f36", "#9198a1", "#f0f3f6"),
    "ours": Kind("#10335c", "#58a6ff", "#b6dcff"),
    "paper": Kind("#161b22", "#6e7681", "#b1bac4"),
    "sent": Kind("#3d2e0a", "#d29922", "#f0cd79"),
  },
}


class Drawing:
  """An SVG under construction.

  Args:
    width: Width in pixels.
    height: Height in pixels.
    scheme: "light" or "dark".
    title: What the picture shows, for those who do not see it.
  """

  def __init__(self, width: int, height: int, scheme: str, title: str):
    self._size = (width, height)
    self._kinds = PALETTES[scheme]
    self._title = title
    self._parts: list[str] = []

  def box(
    self,
    x: float,
    y: float,
    width: float,
    height: float,
    kind: str,
    *,
    dashed: bool = False,
  ) -> None:
    """Draws a box with its upper left corner at (x, y)."""
    colors = self._kinds[kind]
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    self._parts.append(
      f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
      f'rx="7" fill="{colors.fill}" stroke="{colors.line}" '
      f'stroke-width="1.5"{dash}/>'
    )

  def text(
    self,
    x: float,
    y: float,
    text: str,
    kind: str = "paper",
    *,
    size: float = 15,
    bold: bool = False,
    mono: bool = False,
    anchor: str = "start",
  ) -> None:
    """Writes a line of text whose baseline is at y.

    Args:
      x: Where it starts, or its middle or end; see `anchor`.
      y: The baseline.
      text: The text.
      kind: Gives its colour.
      size: Size of the font.
      bold: Whether it is bold.
      mono: Whether all letters have the same width, as in code.
      anchor: "start", "middle" or "end": what of the text is at `x`.
    """
    family = f"{_MONO}, monospace" if mono else f"{_SANS}, sans-serif"
    weight = ' font-weight="600"' if bold else ""
    self._parts.append(
      f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" '
      f'font-family="{family}" fill="{self._kinds[kind].text}" '
      f'text-anchor="{anchor}"{weight} xml:space="preserve">'
      f"{html.escape(text, quote=False)}</text>"
    )

  def lines(
    self, x: float, y: float, texts: Iterable[str], kind: str, step: float = 21
  ) -> None:
    """Writes lines of code below each other."""
    for i, text in enumerate(texts):
      self.text(x, y + i * step, text, kind, mono=True)

  def arrow(
    self,
    points: Sequence[tuple[float, float]],
    kind: str = "paper",
    *,
    head: bool = True,
    dashed: bool = False,
  ) -> None:
    """Draws a line through points, with an arrow head at the last one."""
    color = self._kinds[kind].line
    path = " L".join(f"{x:g} {y:g}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    self._parts.append(
      f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="1.8"'
      f'{dash} stroke-linejoin="round"/>'
    )
    if head:
      self._parts.append(_head(points[-2], points[-1], color))

  def svg(self) -> str:
    """Returns the picture."""
    width, height = self._size
    title = html.escape(self._title, quote=False)
    return "\n".join(
      [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{title}</title>",
        *self._parts,
        "</svg>\n",
      ]
    )


def _head(
  start: tuple[float, float], tip: tuple[float, float], color: str
) -> str:
  """Returns a triangle at `tip` that points away from `start`."""
  dx, dy = tip[0] - start[0], tip[1] - start[1]
  length = (dx * dx + dy * dy) ** 0.5
  dx, dy = dx / length, dy / length
  corners = [
    tip,
    (tip[0] - 8 * dx + 4.5 * dy, tip[1] - 8 * dy - 4.5 * dx),
    (tip[0] - 8 * dx - 4.5 * dy, tip[1] - 8 * dy + 4.5 * dx),
  ]
  path = " ".join(f"{x:.4g},{y:.4g}" for x, y in corners)
  return f'<polygon points="{path}" fill="{color}"/>'
