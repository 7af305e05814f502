"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import dataclasses
import pathlib
import re

from markdown_it import MarkdownIt

ROOT = pathlib.Path(__file__).parents[1]

_MARK = re.compile(r"<!-- tests: (\w+) -->")
# Directives of Sphinx that show no code.
_NO_CODE = ("{eval-rst}", "{toctree}")


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

  def has(self, kind: str) -> bool:
    """Returns whether there is a block of a kind."""
    return any(block.kind == kind for block in self.blocks)


def pages() -> list[Page]:
  """Returns all pages: a new file is one of them by itself."""
  names = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")
  docs = sorted((ROOT / "docs").rglob("*.md"))
  paths = [*(ROOT / name for name in names), *docs]
  return [read(path) for path in paths if "_build" not in path.parts]


def read(path: pathlib.Path) -> Page:
  """Returns the page in a file."""
  text = path.read_text()
  mark = _MARK.match(text)
  blocks = [
    # The fence is in line map[0], counted from 0.
    Block((token.info.split() or [""])[0], token.content, token.map[0] + 2)
    for token in MarkdownIt().parse(text)
    if token.type == "fence"
  ]
  shown = tuple(block for block in blocks if block.kind not in _NO_CODE)
  return Page(path, mark[1] if mark else "", shown)
