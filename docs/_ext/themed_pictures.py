"""Pictures for light and for dark pages, in the HTML that GitHub takes.

    <picture>
      <source media="(prefers-color-scheme: dark)" srcset="agn_dark.svg">
      <img alt="..." src="agn_light.svg">
    </picture>

A browser chooses by the scheme of the system. In the site the reader can choose
another, so that such a block becomes two images, of which the theme shows one.
"""

from __future__ import annotations

import html
import re
from typing import Any

from docutils import nodes
from sphinx import application
from sphinx.transforms import SphinxTransform

_DARK = re.compile(r'<source media="[^"]*dark\)"\s+srcset="([^"]+)"')
_LIGHT = re.compile(r'<img\s+alt="([^"]*)"\s+src="([^"]+)"')


class ThemedPictures(SphinxTransform):
  """Replaces the `<picture>` blocks of a page by images."""

  default_priority = 5  # before Sphinx collects the images

  def apply(self, **kwargs: Any) -> None:
    """Replaces the blocks of one page."""
    for node in list(self.document.findall(nodes.raw)):
      text = node.astext()
      if "<picture>" not in text:
        continue
      light, dark = _LIGHT.search(text), _DARK.search(text)
      if light is None or dark is None:
        raise ValueError(f"{self.env.docname}: <picture> of another form")
      alt = html.unescape(light[1])
      images = [
        nodes.image(uri=uri, alt=alt, classes=[f"only-{scheme}"])
        for scheme, uri in (("light", light[2]), ("dark", dark[1]))
      ]
      node.replace_self(nodes.paragraph("", "", *images))


def setup(app: application.Sphinx) -> dict[str, Any]:
  """Registers the extension."""
  app.add_transform(ThemedPictures)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
