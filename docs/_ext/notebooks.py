"""Notebooks in the site.

The site shows copies of them in docs/, as Sphinx reads no folder beside it.

The tests with the TPU compiler (`pytest -m tpu tests/colab`) execute the
notebooks, and leave them in the folder named by the environment variable
FLAXSHARD_NOTEBOOKS. If it is set, those are copied, and nothing is executed.

The badge of Colab is an image from the net: the site shows its text, and has a
button above the page. Links to documents on GitHub and to notebooks on Colab,
which work everywhere, lead to the pages of the site.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from typing import Any

from sphinx import application
from sphinx import config as sphinx_config
from sphinx import errors

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


def _copy(app: application.Sphinx, config: sphinx_config.Config) -> None:
  """Copies the notebooks into docs/, executed before or as they are."""
  executed = os.environ.get(VARIABLE)
  if executed:
    config.nb_execution_mode = "off"
  docs = pathlib.Path(app.srcdir)
  for name, source in config.repository_folders.items():
    notebooks = list((docs.parent / source).glob("*.ipynb"))
    folder = docs / name
    folder.mkdir(exist_ok=True)
    for old in {*folder.iterdir()} - {folder / x.name for x in notebooks}:
      old.unlink()
    for path in notebooks:
      text = path.read_text()
      if executed:
        text = _read_executed(pathlib.Path(executed, path.name), text)
      copy = folder / path.name
      if not copy.exists() or copy.read_text() != text:
        copy.write_text(text)


def _read_executed(path: pathlib.Path, text: str) -> str:
  """Returns the text of a notebook that was executed before.

  Args:
    path: The notebook that was executed.
    text: The notebook of the repository.
  """
  if not path.exists():
    raise errors.ExtensionError(f"{VARIABLE}: there is no {path}")
  if code(json.loads(path.read_text())) != code(json.loads(text)):
    raise errors.ExtensionError(f"{VARIABLE}: {path} has other code")
  return path.read_text()


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
