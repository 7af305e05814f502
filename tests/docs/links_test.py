"""Addresses of the repository and of the site lead to files and pages.

Links of pages are checked where the site is built, in .ci/extras.
"""

import pathlib
import re

_ROOT = pathlib.Path(__file__).parents[2]
_REPOSITORY = r"https://github\.com/flaxshard/flaxshard/(?:blob|tree|raw)/main/"
_SITE = r"https://flaxshard\.github\.io/flaxshard/"
_SUFFIXES = (".md", ".py", ".ipynb", ".toml", ".yaml", ".sh")
_FOLDERS = "benchmarks colab configs docs examples flaxshard launch".split()
_TEXTS = {
  path.relative_to(_ROOT).as_posix(): path.read_text()
  for pattern in ("*", *(f"{folder}/**/*" for folder in _FOLDERS))
  for path in _ROOT.glob(pattern)
  if path.suffix in _SUFFIXES
}


def _addresses(pattern: str) -> list[tuple[str, str]]:
  """Returns files and the addresses in them that a pattern finds."""
  return [(x, y) for x in _TEXTS for y in re.findall(pattern, _TEXTS[x])]


def test_addresses_of_the_repository_lead_to_its_files() -> None:
  found = _addresses(_REPOSITORY + r"([\w./-]+\w)")
  assert found
  assert [x for x in found if not (_ROOT / x[1]).exists()] == []


def test_addresses_of_the_site_lead_to_its_pages() -> None:
  found = _addresses(_SITE + r"([\w/]+)\.html")
  assert [x for x in found if not (_ROOT / f"docs/{x[1]}.md").exists()] == []
  # The help of an installed wheel names pages that its reader can open.
  assert ("flaxshard/__main__.py", "guides/training") in found
