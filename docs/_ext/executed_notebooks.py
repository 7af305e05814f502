"""Takes notebooks that were executed before, so that CI executes them once.

The slow tests execute the notebooks, and leave them in the folder named by the
environment variable FLAXSHARD_NOTEBOOKS. If it is set, the site is made from
those and executes nothing.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from sphinx import application
from sphinx import config as sphinx_config
from sphinx import errors

VARIABLE = "FLAXSHARD_NOTEBOOKS"


def code(notebook: str) -> list[str]:
  """Returns the sources of the code cells of a notebook.

  Args:
    notebook: The text of an .ipynb file.
  """
  return [
    "".join(cell["source"])
    for cell in json.loads(notebook)["cells"]
    if cell["cell_type"] == "code"
  ]


def _do_not_execute(
  app: application.Sphinx, config: sphinx_config.Config
) -> None:
  if os.environ.get(VARIABLE):
    config.nb_execution_mode = "off"


def _take_executed(
  app: application.Sphinx, docname: str, source: list[str]
) -> None:
  """Replaces the text of a notebook by that of the executed one."""
  folder = os.environ.get(VARIABLE)
  if not folder or app.env.doc2path(docname).suffix != ".ipynb":
    return
  path = pathlib.Path(folder) / f"{pathlib.PurePosixPath(docname).name}.ipynb"
  if not path.exists():
    raise errors.ExtensionError(f"{VARIABLE}: no {path}")
  executed = path.read_text()
  if code(executed) != code(source[0]):
    raise errors.ExtensionError(f"{VARIABLE}: {path} has other code")
  source[0] = executed


def setup(app: application.Sphinx) -> dict[str, Any]:
  """Registers the extension."""
  # Before MyST-NB reads its configuration.
  app.connect("config-inited", _do_not_execute, priority=1)
  app.connect("source-read", _take_executed)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
