"""Puts the fields of configs into docs/config.md, from their definition."""

from __future__ import annotations

import re
from typing import Any

from flaxshard.train.config import definition

MARK = "<!-- The fields stand here in the site. -->"


def _insert_fields(app: Any, docname: str, source: list[str]) -> None:
  if docname != "config":
    return
  if MARK not in source[0]:
    raise ValueError(f"docs/config.md has no line {MARK!r}.")
  # In the help these are addresses of the site; here, titles of its pages.
  site = r"https://flaxshard\.github\.io/flaxshard/(\S+)\.html"
  fields = re.sub(site, r"[](\1.md)", definition.markdown())
  fields = re.sub(r"`(flaxshard\.[\w.]+)`", r"{py:obj}`\1`", fields)
  source[0] = source[0].replace(MARK, fields)
  # A change of the definition changes the page.
  app.env.note_dependency(definition.__file__)


def setup(app: Any) -> dict[str, bool]:
  """Registers the extension."""
  app.connect("source-read", _insert_fields)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
