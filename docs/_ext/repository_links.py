"""Links out of docs/ into the repository.

Pages link to files of the repository by relative paths, which work on GitHub:
`[lm_1b](../../configs/lm_1b.py)`. In the site such a link leads to the file on
GitHub, or to the page of the site that includes the file. A link to a file or
folder that does not exist is left to MyST, which warns of it.

Config values:
  repository_url: Address of the repository on GitHub.
  repository_ref: Branch or tag that the links lead to.
  repository_pages: Maps names of pages to the files which they include, as
    paths from the root of the repository.
  repository_folders: Maps folders of docs/ that are symbolic links to where
    they lead, as paths from the root of the repository.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx import application
from sphinx import config as sphinx_config
from sphinx import environment
from sphinx.transforms import SphinxTransform


def resolve(
  target: str, folder: pathlib.Path, root: pathlib.Path
) -> tuple[str, str] | None:
  """Returns the path of a link from the root of the repository, and its anchor.

  Args:
    target: The link: a relative path, maybe with `#anchor`.
    folder: The folder of the file that has the link.
    root: The root of the repository.

  Returns:
    None if the file does not exist or is outside of the repository.
  """
  path, _, anchor = target.partition("#")
  found = pathlib.Path(os.path.normpath(folder / path))
  if not path or not found.is_relative_to(root) or not found.exists():
    return None
  return found.relative_to(root).as_posix(), anchor


def github_url(config: sphinx_config.Config, path: str, anchor: str) -> str:
  """Returns the address on GitHub of a file or folder of the repository.

  Args:
    config: Has repository_url and repository_ref.
    path: Path from the root of the repository.
    anchor: Anchor in the file, or "".
  """
  root = pathlib.Path(config.repository_root)
  kind = "tree" if (root / path).is_dir() else "blob"
  url = f"{config.repository_url}/{kind}/{config.repository_ref}/{path}"
  return f"{url}#{anchor}" if anchor else url


def page_of(file: str, env: environment.BuildEnvironment) -> str | None:
  """Returns the page of the site that shows a file, or None.

  Args:
    file: Path from the root of the repository.
    env: The environment of the build.
  """
  for page, included in env.config.repository_pages.items():
    if file == included:
      return page
  for folder, target in env.config.repository_folders.items():
    if file.startswith(f"{target}/"):
      file = file.replace(target, f"docs/{folder}", 1)
  root = pathlib.Path(env.config.repository_root)
  page = env.path2doc(root / file)
  return page if page in env.found_docs else None


class RepositoryLinks(SphinxTransform):
  """Replaces MyST's nodes of links to files."""

  default_priority = 5  # before links are resolved, or files collected

  def apply(self, **kwargs: Any) -> None:
    """Replaces the links of one page."""
    page = self.env.docname
    root = pathlib.Path(self.config.repository_root)
    included = self.config.repository_pages.get(page)
    file = root / included if included else self.env.doc2path(page)
    folder = pathlib.Path(file).resolve().parent
    types = (addnodes.pending_xref, addnodes.download_reference)
    links = [
      node
      for node in self.document.findall(lambda node: isinstance(node, types))
      if node.get("reftype") == "myst"
    ]
    for node in links:
      target = node["reftarget"]
      if node.get("refdomain") == "doc":
        if target in self.env.found_docs:
          continue
        # MyST names a file outside of docs/ by its path without suffix.
        suffixes = [s for s in (".md", ".ipynb") if os.path.exists(target + s)]
        if not suffixes:
          continue
        target = os.path.relpath(target + suffixes[0], folder)
        target += f"#{node['reftargetid']}" if node["reftargetid"] else ""
      resolved = resolve(target, folder, root)
      if resolved is not None:
        node.replace_self(self._link(node, *resolved))

  def _link(self, node: nodes.Element, file: str, anchor: str) -> nodes.Element:
    page = page_of(file, self.env)
    if page is None:
      url = github_url(self.config, file, anchor)
      return nodes.reference("", "", *node.children, refuri=url)
    link = addnodes.pending_xref(
      "",
      *node.children,
      refdomain="doc",
      reftarget=page,
      reftargetid=anchor or None,
      refdoc=self.env.docname,
      reftype="myst",
      refexplicit=node["refexplicit"],
    )
    link.source, link.line = node.source, node.line
    return link


def _buttons_of_linked_folders(
  app: application.Sphinx,
  pagename: str,
  templatename: str,
  context: dict[str, Any],
  doctree: nodes.document | None,
) -> None:
  """Makes the buttons above a page lead to where the symbolic links lead."""
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
  root = pathlib.Path(app.confdir).parent
  app.add_config_value("repository_root", str(root), "env")
  app.add_config_value("repository_url", "", "env")
  app.add_config_value("repository_ref", "main", "env")
  app.add_config_value("repository_pages", {}, "env")
  app.add_config_value("repository_folders", {}, "html")
  app.add_transform(RepositoryLinks)
  # After the theme, which adds its buttons at 501.
  app.connect("html-page-context", _buttons_of_linked_folders, priority=900)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
