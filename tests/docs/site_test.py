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
_CONF = f"""
import sys
sys.path.insert(0, {str(_ROOT / "docs" / "_ext")!r})
extensions = [
  "myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "api_pages", "mathml",
  "notebooks", "repository_links", "themed_pictures",
]
html_math_renderer = "mathml"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
nb_execution_mode = "off"
repository_url = "https://github.com/a/b"
repository_ref = "v1.2.3"
repository_pages = {{"changelog": "CHANGES.md"}}
repository_folders = {{"tutorials": "colab"}}
"""
_FILES = "https://github.com/a/b/blob/v1.2.3/"
_COLAB = "https://colab.research.google.com/github/a/b/blob/main/colab/"
_NOTEBOOK = f"""# Title
[![Open](https://colab.research.google.com/assets/colab-badge.svg)]({_COLAB}first.ipynb)
[1]({_COLAB}first.ipynb)
[2](https://github.com/a/b/blob/main/docs/changelog.md#old)
[3](https://github.com/a/b/blob/main/code/a.py)
"""
_PICTURE = """
<picture>
  <source media="(prefers-color-scheme: dark)" srcset="{0}a_dark.svg">
  <img alt="One &amp; two" src="{0}a_light.svg">
</picture>
"""
# Links of the page `index`, which is in docs/, and what they lead to.
_LINKS = {
  "../code/a.py": f"{_FILES}code/a.py",
  "../code": "https://github.com/a/b/tree/v1.2.3/code",
  "../CHANGES.md#old": "changelog.html#old",
  "../colab/first.ipynb": "tutorials/first.html",
  "changelog.md": "changelog.html",
  "conf.py": f"{_FILES}docs/conf.py",
}
_BROKEN = ("../code/b.py", "../no", "../NO.md", "b.md")


def _write(repository: pathlib.Path, links: list[str]) -> None:
  """Writes a repository with a site in docs/, whose page `index` has links."""
  cells = [
    {"cell_type": "markdown", "metadata": {}, "source": _NOTEBOOK},
    {
      "cell_type": "code",
      "metadata": {},
      "source": "print(1)",
      "outputs": [],
      "execution_count": None,
    },
  ]
  notebook = {
    "cells": cells,
    "metadata": {"language_info": {"name": "python"}},
    "nbformat": 4,
    "nbformat_minor": 4,
  }
  files = {
    "code/a.py": "",
    "code/a.png": "",
    "CHANGES.md": "# Changes\n[a](code/a.py) [index](docs/index.md)\n## Old\n"
    f"![b](code/a.png)\n{_PICTURE.format('docs/')}",
    "colab/first.ipynb": json.dumps(notebook),
    "docs/conf.py": _CONF,
    "docs/a_light.svg": "<svg/>",
    "docs/a_dark.svg": "<svg/>",
    "docs/changelog.md": "```{include} ../CHANGES.md\n```\n",
    "docs/index.md": "# Index\n```{toctree}\nchangelog\ntutorials/first\n```\n"
    f"{' '.join(f'[{x}]({x})' for x in links)}\n{_PICTURE.format('')}",
  }
  for name, text in files.items():
    (repository / name).parent.mkdir(exist_ok=True)
    (repository / name).write_text(text)


def _build(
  repository: pathlib.Path, links: list[str]
) -> tuple[dict[str, str], str]:
  """Returns the pages of a site and the warnings."""
  _write(repository, links)
  warnings = io.StringIO()
  app = SphinxTestApp(
    srcdir=repository / "docs", warning=warnings, freshenv=True
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


def test_links_and_pictures_of_a_site(tmp_path: pathlib.Path) -> None:
  pages, warnings = _build(tmp_path, list(_LINKS))
  assert not warnings
  assert _LINKS.items() <= _links(pages["index"]).items()

  # Those of an included file are relative to it.
  links = _links(pages["changelog"])
  assert (links["a"], links["index"]) == (f"{_FILES}code/a.py", "index.html")
  assert 'src="_images/a.png"' in pages["changelog"]

  # A picture becomes an image for each scheme.
  for page in (pages["index"], pages["changelog"]):
    images = re.findall(r'<img alt="(.*?)" class="(.*?)" src="(.*?)"', page)
    assert images == [
      ("One &amp; two", f"only-{scheme}", f"_images/a_{scheme}.svg")
      for scheme in ("light", "dark")
    ]

  # Those of a notebook lead to pages, but for its badge.
  page = pages["tutorials/first"]
  assert f'href="{_COLAB}first.ipynb">Open</a>' in page
  links = _links(page)
  assert links["1"] in ("#", "first.html")
  assert links["2"] == "../changelog.html#old"
  assert links["3"] == f"{_FILES}code/a.py"


def test_a_link_to_no_file_is_a_warning(tmp_path: pathlib.Path) -> None:
  _, warnings = _build(tmp_path, list(_BROKEN))
  assert warnings.count("[myst.xref_missing]") == len(_BROKEN)
  assert "index.md" in warnings
