"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import pathlib
import re

from markdown_it import MarkdownIt

ROOT = pathlib.Path(__file__).parents[1]

_MARK = re.compile(r"<!-- tests: (\w+) -->")
# Directives of Sphinx that show code, which this module would not see.
_CODE_DIRECTIVES = {
  *("{code}", "{code-block}", "{code-cell}", "{sourcecode}"),
  *("{doctest}", "{testcode}", "{prompt}"),
}


@dataclasses.dataclass(frozen=True)
class Block:
  """A fenced code block.

  Attributes:
    kind: The first word behind the fence, such as "python".
    text: The lines between the fences, without the indentation of the fence.
    line: The number of the first of these lines in the page, from 1.
  """

  kind: str
  text: str
  line: int


@dataclasses.dataclass(frozen=True)
class Page:
  """A Markdown file.

  Attributes:
    path: The file.
    mark: "slow" or "tpu", if the first line says so (`<!-- tests: slow -->`).
    blocks: The code blocks, in their order.
  """

  path: pathlib.Path
  mark: str
  blocks: tuple[Block, ...]

  @property
  def name(self) -> str:
    """The path from the root of the repository, for ids and messages."""
    if self.path.is_relative_to(ROOT):
      return self.path.relative_to(ROOT).as_posix()
    return self.path.name

  def has(self, *kinds: str) -> bool:
    """Returns whether there is a block of one of the kinds."""
    return any(block.kind in kinds for block in self.blocks)


def pages() -> list[Page]:
  """Returns all pages: a new file is one of them by itself."""
  folder = ROOT / "docs"
  paths = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    ROOT / "benchmarks" / "README.md",
    *(
      path
      for path in sorted(folder.rglob("*.md"))
      if "_build" not in path.relative_to(folder).parts
    ),
  ]
  return [read(path) for path in paths if path.exists()]


def read(path: pathlib.Path) -> Page:
  """Returns the page in a file."""
  text = path.read_text()
  mark = _MARK.match(text)
  return Page(path, mark[1] if mark else "", tuple(_blocks(text, 1)))


def _blocks(text: str, line: int) -> Iterator[Block]:
  """Yields the blocks of a text that begins in a line of the page."""
  for token in MarkdownIt().parse(text):
    if token.type != "fence":
      continue
    first = line + (token.map or [0])[0] + 1
    kind = (token.info.split() or [""])[0]
    # A directive holds text, possibly with blocks in it.
    if kind.startswith("{") and kind not in _CODE_DIRECTIVES:
      yield from _blocks(token.content, first)
    else:
      yield Block(kind, token.content, first)
