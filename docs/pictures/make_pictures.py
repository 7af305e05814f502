"""Draws the pictures of the documentation, each for light and dark pages.

    python docs/pictures/make_pictures.py

A test compares the stored files with what this script draws.
"""

from __future__ import annotations

from collections.abc import Callable
import pathlib

from drawing import Drawing
from drawing import PALETTES
import flow
import house

_HERE = pathlib.Path(__file__).parent

PICTURES: dict[str, Callable[[str], Drawing]] = {
  "idea": flow.idea,
  "step": flow.step,
  "run": flow.run,
  "agn": flow.agn,
  "center": flow.center,
  "checkpoint": flow.checkpoint,
  "house": house.house,
}


def draw() -> dict[str, str]:
  """Returns the text of each picture by its file name."""
  return {
    f"{name}_{scheme}.svg": picture(scheme).svg()
    for name, picture in PICTURES.items()
    for scheme in PALETTES
  }


if __name__ == "__main__":
  for name, text in draw().items():
    (_HERE / name).write_text(text)
