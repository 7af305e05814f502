"""Notebooks in the site.

The site shows copies of them in docs/, as Sphinx reads no folder beside it.

They are stored with their outputs: colab/make_notebooks.py executes them.

The badge of Colab is an image from the net: the site shows its text, and has a
button above the page. Links to documents on GitHub and to notebooks on Colab,
which work everywhere, lead to the pages of the site.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

from sphinx import application
from sphinx import config as sphinx_config


def _copy(app: application.Sphinx, config: sphinx_config.Config) -> None:
  """Copies the notebooks into docs/."""
  docs = pathlib.Path(app.srcdir)
  for name, source in config.repository_folders.items():
    notebooks = list((docs.parent / source).glob("*.ipynb"))
    folder = docs / name
    folder.mkdir(exist_ok=True)
    for old in {*folder.iterdir()} - {folder / x.name for x in notebooks}:
      old.unlink()
    for path in notebooks:
      copy, text = folder / path.name, path.read_text()
      if not copy.exists() or copy.read_text() != text:
        copy.write_text(text)


def _read(app: application.Sphinx, docname: str, source: list[str]) -> None:
  """Makes links of a notebook relative, and its badge a text."""
  if app.env.doc2path(docname).suffix != ".ipynb":
    return
  github = app.config.repository_url
  colab = github.replace("github.com", "colab.research.google.com/github")
  # A link of a badge stays: it opens the notebook itself.
  links = rf"(?<!\.svg\))\]\((?:{github}|{colab})/blob/main/"
  text = re.sub(links, "](../../", source[0])
  badge = r"!\[([^]]*)\]\([^)]*/colab-badge\.svg\)"
  source[0] = re.sub(badge, r"\1", text)


def setup(app: application.Sphinx) -> dict[str, Any]:
  """Registers the extension."""
  # Before MyST-NB reads its configuration.
  app.connect("config-inited", _copy, priority=1)
  app.connect("source-read", _read)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
