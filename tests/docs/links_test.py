"""Every relative link and anchor in the Markdown files leads somewhere."""

import itertools
import os
import pathlib
import re

from markdown_it import MarkdownIt
from markdown_it.token import Token
import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_REPOSITORY = "https://github.com/flaxshard/flaxshard/"
_SITE = "https://flaxshard.github.io/flaxshard/"
_LEFT_OUT = {"_build", "build", "dist"}


def _files(suffix: str) -> list[pathlib.Path]:
  """Returns the files with a suffix, without hidden and built folders."""
  found = []
  for folder, folders, names in os.walk(_ROOT):
    folders[:] = [
      name for name in folders if name[0] != "." and name not in _LEFT_OUT
    ]
    found += [pathlib.Path(folder, x) for x in names if x.endswith(suffix)]
  return sorted(found)


_PAGES = [path.relative_to(_ROOT).as_posix() for path in _files(".md")]


def _tokens(text: str) -> list[Token]:
  """Returns all tokens of a Markdown text, those of lines included."""
  tokens = MarkdownIt("commonmark").enable("table").parse(text)
  return [x for token in tokens for x in (token, *(token.children or []))]


def _slugs(text: str) -> set[str]:
  """Returns the anchors that GitHub makes of the headings of a text."""
  tokens = _tokens(text)
  slugs: set[str] = set()
  for before, token in itertools.pairwise(tokens):
    if before.type != "heading_open":
      continue
    content = "".join(
      child.content
      for child in token.children or []
      if child.type in ("text", "code_inline")
    )
    words = re.sub(r"[^\w\- ]", "", content.strip().lower())
    slug = first = words.replace(" ", "-")
    number = 0
    while slug in slugs:
      number += 1
      slug = f"{first}-{number}"
    slugs.add(slug)
  return slugs


def _links(text: str) -> list[str]:
  """Returns the targets of all links and images of a Markdown text."""
  links = []
  for token in _tokens(text):
    for name in ("href", "src"):
      if target := token.attrGet(name):
        links.append(str(target))
    if token.type in ("html_block", "html_inline"):
      links += re.findall(r'(?:href|src|srcset)="([^"]+)"', token.content)
  return links


def _fault(page: pathlib.Path, link: str) -> str | None:
  """Returns what is wrong with a link, or None."""
  path, _, anchor = link.partition("#")
  target = pathlib.Path(os.path.normpath(page.parent / path)) if path else page
  if not target.is_relative_to(_ROOT):
    return "leads out of the repository"
  # They are made when the site is built.
  if target.is_relative_to(_ROOT / "docs" / "tutorials"):
    return "is a copy: link to the notebook in colab/"
  if not target.exists():
    return "does not exist"
  if anchor and target.suffix == ".md":
    if anchor not in _slugs(target.read_text()):
      return "has no such heading"
  return None


@pytest.mark.parametrize("page", _PAGES)
def test_links_lead_somewhere(page: str) -> None:
  path = _ROOT / page
  faults = {
    link: fault
    for link in _links(path.read_text())
    if not re.match(r"[a-z]+:", link) and (fault := _fault(path, link))
  }
  assert not faults


@pytest.mark.parametrize("suffix", [".md", ".py", ".ipynb", ".toml"])
def test_addresses_of_the_repository_lead_to_its_files(suffix: str) -> None:
  missing = [
    (path.relative_to(_ROOT).as_posix(), name)
    for path in _files(suffix)
    for name in re.findall(
      re.escape(_REPOSITORY) + r"(?:blob|tree|raw)/main/([\w./-]+\w)",
      path.read_text(),
    )
    if not (_ROOT / name).exists()
  ]
  assert not missing


def test_addresses_of_the_site_lead_to_its_pages() -> None:
  links = [
    (path.relative_to(_ROOT).as_posix(), name)
    for path in _files(".py")
    for name in re.findall(
      re.escape(_SITE) + r"([\w/]+)\.html", path.read_text()
    )
  ]
  missing = [x for x in links if not (_ROOT / f"docs/{x[1]}.md").exists()]
  assert not missing
  # The help of an installed wheel names pages that its reader can open.
  assert ("flaxshard/__main__.py", "guides/training") in links
