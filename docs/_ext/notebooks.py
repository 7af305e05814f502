"""Notebooks in the site: executed once, badges as text.

The tests with the TPU compiler (`pytest -m tpu tests/colab`) execute the
notebooks, and leave them in the folder named by the environment variable
FLAXSHARD_NOTEBOOKS. If it is set, the site is made from those and executes
nothing.

The badge of Colab is an image from the net: the site shows its text, and has a
button above the page.
Links to documents on GitHub and to notebooks on Colab, which work everywhere,
lead to the pages of the site.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from typing import Any

from docutils import nodes
from sphinx import application
from sphinx import config as sphinx_config
from sphinx import errors
from sphinx.transforms import SphinxTransform

VARIABLE = "FLAXSHARD_NOTEBOOKS"


def code(notebook: dict[str, Any]) -> list[str]:
  """Returns the sources of the code cells of a notebook.

  Args:
    notebook: The contents of an .ipynb file.
  """
  return [
    "".join(cell["source"])
    for cell in notebook["cells"]
    if cell["cell_type"] == "code"
  ]


def _do_not_execute(
  app: application.Sphinx, config: sphinx_config.Config
) -> None:
  if os.environ.get(VARIABLE):
    config.nb_execution_mode = "off"


def _read(app: application.Sphinx, docname: str, source: list[str]) -> None:
  """Replaces the text of a notebook by what the site is to show."""
  if app.env.doc2path(docname).suffix != ".ipynb":
    return
  notebook = json.loads(source[0])
  if folder := os.environ.get(VARIABLE):
    path = pathlib.Path(folder, pathlib.PurePosixPath(docname).name + ".ipynb")
    if not path.exists():
      raise errors.ExtensionError(f"{VARIABLE}: there is no {path}")
    executed = json.loads(path.read_text())
    if code(executed) != code(notebook):
      raise errors.ExtensionError(f"{VARIABLE}: {path} has other code")
    notebook = executed
  for cell in notebook["cells"]:
    if cell["cell_type"] == "markdown":
      text = "".join(cell["source"])
      cell["source"] = _make_links_relative(app.config, text)
  source[0] = json.dumps(notebook)


def _make_links_relative(config: sphinx_config.Config, text: str) -> str:
  """Returns a text with relative links to the files of the repository.

  Args:
    config: Has repository_url.
    text: Markdown of a notebook in a folder of the repository.
  """
  github = re.escape(f"{config.repository_url}/blob/main/")
  text = re.sub(rf"\]\({github}", "](../", text)
  name = config.repository_url.removeprefix("https://github.com/")
  colab = re.escape(
    f"https://colab.research.google.com/github/{name}/blob/main/"
  )
  # Not that of a badge, which opens the notebook itself.
  return re.sub(rf"(?<!\.svg\))\]\({colab}", "](../", text)


class BadgesAsText(SphinxTransform):
  """Replaces the badges of Colab by their texts."""

  default_priority = 5  # before images are collected

  def apply(self, **kwargs: Any) -> None:
    """Replaces the badges of one page."""
    for image in list(self.document.findall(nodes.image)):
      if image["uri"].endswith("/colab-badge.svg"):
        image.replace_self(nodes.Text(image["alt"]))


def setup(app: application.Sphinx) -> dict[str, Any]:
  """Registers the extension."""
  # Before MyST-NB reads its configuration.
  app.connect("config-inited", _do_not_execute, priority=1)
  app.connect("source-read", _read)
  app.add_transform(BadgesAsText)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
