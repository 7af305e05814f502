"""Addresses of the repository and of the site lead to files and pages.

Relative links of pages are checked where the site is built, in .ci/extras.
"""

import os
import pathlib
import re

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
