"""The extensions of docs/ in a small site."""

import io
import json
import pathlib
import re
import sys

import pytest

pytest.importorskip("myst_nb", reason="needs the extra docs")

from sphinx.testing.util import SphinxTestApp

_ROOT = pathlib.Path(__file__).parents[2]
_CONF = """
import sys
sys.path.insert(0, {ext!r})
extensions = [
  "myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "api_pages", "mathml",
  "notebooks", "repository_links", "themed_pictures",
]
html_math_renderer = "mathml"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
nb_execution_mode = "off"
repository_url = "https://github.com/a/b"
repository_pages = {{"changelog": "CHANGES.md"}}
repository_folders = {{"tutorials": "colab"}}
"""
_BADGE = "https://colab.research.google.com/assets/colab-badge.svg"


def _cell(kind: str, source: str, outputs: tuple = ()) -> dict:
  cell = {"cell_type": kind, "metadata": {}, "source": source}
  if kind == "code":
    cell |= {"outputs": list(outputs), "execution_count": None}
  return cell


def _notebook(*cells: dict) -> str:
  metadata = {"language_info": {"name": "python"}}
  notebook = {"cells": cells, "metadata": metadata}
  return json.dumps(notebook | {"nbformat": 4, "nbformat_minor": 4})


_MARKDOWN = _cell("markdown", f"# Title\n[![Open]({_BADGE})](https://x.y/z)")


@pytest.fixture
def repository(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> pathlib.Path:
  """Returns a repository with a site in docs/."""
  files = {
    "code/a.py": "",
    "CHANGES.md": "# Changes\n[a](code/a.py) [index](docs/index.md)\n## Old\n",
    "colab/first.ipynb": _notebook(_MARKDOWN, _cell("code", "print(1)")),
    "docs/conf.py": _CONF.format(ext=str(_ROOT / "docs" / "_ext")),
    "docs/changelog.md": "```{include} ../CHANGES.md\n```\n",
    "docs/index.md": "# Index\n```{toctree}\nchangelog\ntutorials/first\n```\n",
  }
  for name, text in files.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
  return tmp_path


def _build(
  repository: pathlib.Path, text: str = "", **config: str
) -> tuple[dict[str, str], str]:
  """Returns the pages of the site and the warnings.

  Args:
    repository: Has the site in docs/.
    text: Is added to the page `index`.
    **config: Values of the configuration.
  """
  docs = repository / "docs"
  with (docs / "index.md").open("a") as file:
    file.write(text)
  warnings = io.StringIO()
  app = SphinxTestApp(
    srcdir=docs, confoverrides=config, warning=warnings, freshenv=True
  )
  try:
    app.build()
    out = pathlib.Path(app.outdir)
    pages = {
      name: (out / f"{name}.html").read_text()
      for name in ("index", "changelog", "tutorials/first")
    }
  finally:
    app.cleanup()
    for path in (_ROOT / "docs" / "_ext").glob("*.py"):
      sys.modules.pop(path.stem, None)
  return pages, warnings.getvalue()


def _links(page: str) -> dict[str, str]:
  """Returns the targets of a page's links by their texts."""
  found = re.findall(r'<a class="[^"]+" href="([^"]+)">(.+?)</a>', page)
  return {re.sub("<.*?>", "", text): target for target, text in found}


def test_links_out_of_docs_lead_to_github_or_to_pages(repository) -> None:
  pages, warnings = _build(
    repository,
    "[1](../code/a.py) [2](../code) [3](../CHANGES.md#old) "
    "[4](../colab/first.ipynb) [5](changelog.md) [6](conf.py)",
  )
  assert not warnings
  links = _links(pages["index"])
  assert links["1"] == "https://github.com/a/b/blob/main/code/a.py"
  assert links["2"] == "https://github.com/a/b/tree/main/code"
  assert links["3"] == "changelog.html#old"
  assert links["4"] == "tutorials/first.html"
  assert links["5"] == "changelog.html"
  assert links["6"] == "https://github.com/a/b/blob/main/docs/conf.py"


def test_links_of_an_included_file_are_relative_to_it(repository) -> None:
  (repository / "code" / "a.png").write_bytes(b"")
  with (repository / "CHANGES.md").open("a") as file:
    file.write("![b](code/a.png)\n")
  pages, warnings = _build(repository, repository_ref="v1.2.3")
  assert not warnings
  links = _links(pages["changelog"])
  assert links["a"] == "https://github.com/a/b/blob/v1.2.3/code/a.py"
  assert links["index"] == "index.html"
  assert 'src="_images/a.png"' in pages["changelog"]


def test_pictures_become_an_image_for_each_scheme(repository) -> None:
  for scheme in ("light", "dark"):
    (repository / "docs" / f"a_{scheme}.svg").write_text("<svg/>")
  picture = (
    "\n<picture>\n"
    '  <source media="(prefers-color-scheme: dark)" srcset="{0}a_dark.svg">\n'
    '  <img alt="One &amp; two" src="{0}a_light.svg">\n'
    "</picture>\n"
  )
  with (repository / "CHANGES.md").open("a") as file:
    file.write(picture.format("docs/"))
  pages, warnings = _build(repository, picture.format(""))
  assert not warnings
  for page in (pages["index"], pages["changelog"]):
    images = re.findall(r'<img alt="(.*?)" class="(.*?)" src="(.*?)"', page)
    assert images == [
      ("One &amp; two", f"only-{scheme}", f"_images/a_{scheme}.svg")
      for scheme in ("light", "dark")
    ]


@pytest.mark.parametrize("link", ["../code/b.py", "../no", "../NO.md", "b.md"])
def test_a_link_to_no_file_is_a_warning(repository, link) -> None:
  _, warnings = _build(repository, f"[1]({link})")
  assert "[myst.xref_missing]" in warnings
  assert "index.md" in warnings


def test_links_of_a_notebook_lead_to_pages_of_the_site(repository) -> None:
  colab = "https://colab.research.google.com/github/a/b/blob/main/colab/"
  github = "https://github.com/a/b/blob/main/"
  text = (
    f"# Title\n[![Open]({_BADGE})]({colab}first.ipynb)\n"
    f"[1]({colab}first.ipynb) [2]({github}docs/changelog.md#old)\n"
    f"[3]({github}code/a.py)"
  )
  (repository / "colab" / "first.ipynb").write_text(
    _notebook(_cell("markdown", text), _cell("code", "print(1)"))
  )
  pages, warnings = _build(repository)
  assert not warnings
  page = pages["tutorials/first"]
  assert f'href="{colab}first.ipynb">Open</a>' in page
  links = _links(page)
  assert links["1"] in ("#", "first.html")
  assert links["2"] == "../changelog.html#old"
  assert links["3"] == f"{github}code/a.py"
