"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).parents[1]

_FENCE = re.compile(r"^ *(`{3,}|~{3,})(.*)$")
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
  """Returns the page in a file.

  Raises:
    ValueError: The mark of the first line is unknown, or a block does not end.
  """
  lines = path.read_text().splitlines()
  mark = _MARK.fullmatch(lines[0].strip()) if lines else None
  if mark and mark[1] not in ("slow", "tpu"):
    raise ValueError(f"{path}:1: no mark of tests: {mark[1]!r}")
  return Page(path, mark[1] if mark else "", tuple(_blocks(path, lines)))


def _blocks(path: pathlib.Path, lines: list[str]) -> list[Block]:
  blocks = []
  number = 0
  while number < len(lines):
    start = _FENCE.match(lines[number])
    number += 1
    if not start:
      continue
    fence, info = start.groups()
    first = number
    end = re.compile(rf" *{re.escape(fence[0])}{{{len(fence)},}} *")
    while number < len(lines) and not end.fullmatch(lines[number]):
      number += 1
    if number == len(lines):
      raise ValueError(f"{path}:{first}: the block does not end")
    kind = (info.split() or [""])[0]
    # A directive holds text, possibly with blocks in it.
    if kind.startswith("{") and kind not in _CODE_DIRECTIVES:
      inner = ["", *lines[first:number]]
      blocks += [
        dataclasses.replace(block, line=block.line + first - 1)
        for block in _blocks(path, inner)
      ]
    else:
      text = textwrap.dedent("\n".join(lines[first:number]))
      blocks.append(Block(kind, f"{text}\n", first + 1))
    number += 1
  return blocks
