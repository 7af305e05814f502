"""Messages in the headings of docs/troubleshooting are those of the code."""

import ast
import functools
import re

import page_blocks
import pytest

_FOLDER = page_blocks.ROOT / "docs" / "troubleshooting"
_PAGES = {path.stem: path for path in sorted(_FOLDER.glob("*.md"))}


@functools.cache
def _strings_of_the_code() -> str:
  """Returns the constant parts of all texts of the package and notebooks."""
  paths = [
    path
    for folder in ("flaxshard", "colab")
    for path in (page_blocks.ROOT / folder).rglob("*.py")
  ]
  return "\n".join(
    node.value
    for path in paths
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
  )


def _squeeze(text: str) -> str:
  return " ".join(text.split())


@pytest.mark.parametrize("name", _PAGES)
def test_messages_in_headings_exist(name: str) -> None:
  outputs = _squeeze(
    " ".join(x.text for x in page_blocks.read(_PAGES[name]).blocks)
  )
  headings = re.findall(r"^### .*$", _PAGES[name].read_text(), re.M)
  assert headings
  quoted = [x for line in headings for x in re.findall("`([^`]+)`", line)]
  parts = [part.strip() for x in quoted for part in x.split("...")]
  missing = [
    part
    for part in parts
    if part not in outputs and part not in _strings_of_the_code()
  ]
  assert not missing
