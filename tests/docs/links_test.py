"""Addresses of the site in the code lead to its pages.

Links of pages, and addresses of the repository in them, are checked where the
site is built, in .ci/extras.
"""

import pathlib
import re

_ROOT = pathlib.Path(__file__).parents[2]
_SITE = "https://flaxshard.github.io/flaxshard/"


def test_addresses_of_the_site_lead_to_its_pages() -> None:
  links = [
    (path.relative_to(_ROOT).as_posix(), name)
    for folder in ("colab", "configs", "examples", "flaxshard")
    for path in (_ROOT / folder).rglob("*.py")
    for name in re.findall(
      re.escape(_SITE) + r"([\w/]+)\.html", path.read_text()
    )
  ]
  missing = [x for x in links if not (_ROOT / f"docs/{x[1]}.md").exists()]
  assert not missing
  # The help of an installed wheel names pages that its reader can open.
  assert ("flaxshard/__main__.py", "guides/training") in links
