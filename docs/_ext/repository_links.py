"""Links between files of the repository.

Pages link by relative paths, which work on GitHub:
`[lm_1b](../../configs/lm_1b.py)`. In the site such a link leads to the page
that shows the file, else to the file on GitHub. The paths of images, which
Sphinx copies, are made relative to the page. A link to a file or folder that
does not exist is left to MyST, which warns of it.

Config values:
  repository_url: Address of the repository on GitHub.
  repository_ref: Branch or tag that the links lead to.
  repository_pages: Maps names of pages to the files which they show in place of
    their first line, as paths from the root of the repository.
  repository_folders: Maps folders of docs/ with copies of notebooks to the
    folders of the notebooks, as paths from the root of the repository.
"""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

from docutils import nodes
from sphinx import application

# A path without its anchor, in a link or image of Markdown or of HTML.
_PATHS = re.compile(r'(\]\(|\bsrc(?:set)?=")([^)\s"#:]+)(?=[)"#])')


def _read(app: application.Sphinx, docname: str, source: list[str]) -> None:
  """Rewrites the links of a page, or of the file that it shows."""
  root = pathlib.Path(app.srcdir).parent
  page = file = pathlib.Path(app.env.doc2path(docname))
  if docname in app.config.repository_pages:
    file = root / app.config.repository_pages[docname]
    # The page links to the file in its first line.
    rest = source[0].partition("\n")[2]
    source[0] = f"{file.read_text()}\n{rest}"
    app.env.note_dependency(str(file))

  def rewrite(match: re.Match[str]) -> str:
    target = pathlib.Path(os.path.normpath(file.parent / match[2]))
    if not target.is_relative_to(root) or not target.exists():
      return match[0]
    shown = root / _shown(app, target.relative_to(root).as_posix())
    is_page = app.env.path2doc(shown) in app.env.found_docs
    if is_page or target.suffix in (".png", ".svg"):
      return match[1] + os.path.relpath(shown, page.parent)
    kind = "tree" if target.is_dir() else "blob"
    address = f"{app.config.repository_url}/{kind}/{app.config.repository_ref}"
    return f"{match[1]}{address}/{target.relative_to(root).as_posix()}"

  source[0] = _PATHS.sub(rewrite, source[0])


def _shown(app: application.Sphinx, path: str) -> str:
  """Returns the path in docs/ under which the site shows a file, or the path.

  Args:
    app: Has the config values.
    path: Path from the root of the repository.
  """
  for page, file in app.config.repository_pages.items():
    if path == file:
      return f"docs/{page}.md"
  for folder, target in app.config.repository_folders.items():
    if path.startswith(f"{target}/") and path.endswith(".ipynb"):
      return path.replace(target, f"docs/{folder}", 1)
  return path


def _correct_buttons(
  app: application.Sphinx,
  pagename: str,
  templatename: str,
  context: dict[str, Any],
  doctree: nodes.document | None,
) -> None:
  """Makes the buttons above a copy lead to the notebook itself."""
  folders = app.config.repository_folders

  def correct(button: Any) -> None:
    if isinstance(button, list):
      for one in button:
        correct(one)
    elif "buttons" in button:
      correct(button["buttons"])
    elif "url" in button:
      for folder, target in folders.items():
        button["url"] = button["url"].replace(f"/docs/{folder}/", f"/{target}/")

  correct(context.get("header_buttons", []))


def setup(app: application.Sphinx) -> dict[str, Any]:
  """Registers the extension."""
  app.add_config_value("repository_url", "", "env")
  app.add_config_value("repository_ref", "main", "env")
  app.add_config_value("repository_pages", {}, "env")
  app.add_config_value("repository_folders", {}, "env")
  app.connect("source-read", _read)
  # After the theme, which adds its buttons at 501.
  app.connect("html-page-context", _correct_buttons, priority=900)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
