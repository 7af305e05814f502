"""Addresses of the repository and of the site lead to files and pages.

Links of pages are checked where the site is built, in .ci/extras.
"""

import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_REPOSITORY = "https://github.com/flaxshard/flaxshard/"
_SITE = "https://flaxshard.github.io/flaxshard/"
_CODE = ("benchmarks", "colab", "configs", "examples", "flaxshard")


@pytest.mark.parametrize(
  "pattern",
  ["*.md", "*.toml", *(f"{x}/**/*.*" for x in (*_CODE, "docs", "launch"))],
)
def test_addresses_of_the_repository_lead_to_its_files(pattern: str) -> None:
  missing = [
    (path.relative_to(_ROOT).as_posix(), name)
    for path in _ROOT.glob(pattern)
    if path.suffix in (".md", ".py", ".ipynb", ".toml", ".yaml", ".sh")
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
    for folder in _CODE
    for path in (_ROOT / folder).rglob("*.py")
    for name in re.findall(
      re.escape(_SITE) + r"([\w/]+)\.html", path.read_text()
    )
  ]
  missing = [x for x in links if not (_ROOT / f"docs/{x[1]}.md").exists()]
  assert not missing
  # The help of an installed wheel names pages that its reader can open.
  assert ("flaxshard/__main__.py", "guides/training") in links
