"""Every code block of every page of the documentation is run.

CONTRIBUTING.md says how to write blocks that these tests take.
"""

import pathlib
import re

import page_blocks
import page_runner
import pytest

_PAGES = {page.name: page for page in page_blocks.pages()}


def _marks(page: page_blocks.Page) -> list[pytest.MarkDecorator]:
  # The guides train, one after another longer than what is quick.
  is_guide = page.name.startswith("docs/guides/")
  mark = page.mark or ("slow" if is_guide else "")
  return [getattr(pytest.mark, mark)] if mark else []


@pytest.mark.parametrize("name", _PAGES)
def test_every_block_is_checked(name: str) -> None:
  page_runner.check_kinds(_PAGES[name])


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=_marks(page))
    for name, page in _PAGES.items()
    if page.has("python") or (page.mark and page.has("bash"))
  ],
)
def test_blocks_run_in_order(name: str, tmp_path: pathlib.Path) -> None:
  page = _PAGES[name]
  kinds = ("python", "diff", "bash") if page.mark else ("python", "diff")
  page_runner.run(page, tmp_path, kinds)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [name for name, page in _PAGES.items() if page.has("bash") and not page.mark],
)
def test_commands_run_in_order(name: str, tmp_path: pathlib.Path) -> None:
  page_runner.run(_PAGES[name], tmp_path, ("bash",))


def test_what_covers_a_block_exists_and_is_needed() -> None:
  texts: dict[str, list[str]] = {"bash": [], "python": []}
  for page in _PAGES.values():
    for block in page.blocks:
      if block.kind == "bash":
        texts["bash"] += page_runner.commands(block.text)
      elif block.kind == "python":
        texts["python"].append(block.text.strip())
  for kind, known in page_runner.ELSEWHERE.items():
    for pattern, test in known.items():
      assert test.startswith("none: ") or (page_blocks.ROOT / test).exists()
      assert any(re.search(pattern, text) for text in texts[kind]), pattern


SHOWN = "```python\n{}\n```\n```text\n{}\n```\n"


@pytest.mark.parametrize(
  ("text", "message"),
  [
    # Other outputs than those that the page shows.
    (SHOWN.format("print('a')", "b"), ":5: .*else:\na"),
    (SHOWN.format("print('a')", "ValueError: a"), ":5: "),
    (SHOWN.format("import warnings; warnings.warn('a')", "b"), ":5: "),
    ("```python\nraise ValueError('a')\n```\n", ":2: ValueError"),
    (SHOWN.format("raise ValueError('a')", "b"), ":5: "),
    # Blocks that nothing checks.
    ("```\na\n```\n", ":2: no test checks blocks of the kind ''"),
    ("```{code-block} python\na\n```\n", ":2: .* kind '{code-block}'"),
    ("```text\na\n```\n", ":2: a text follows no code block"),
    ("```python\n```\n```text\n```\n```text\n```\n", ":6: .* no code block"),
    ("```bash\nkubectl a\n```\n", ":2: no rule for 'kubectl a'"),
  ],
)
def test_the_runner_names_page_and_line(
  text: str, message: str, tmp_path: pathlib.Path
) -> None:
  path = tmp_path / "page.md"
  path.write_text(text)
  page = page_blocks.read(path)
  with pytest.raises(page_runner.PageError, match=rf"^page\.md{message}"):
    page_runner.check_kinds(page)
    page_runner.run(page, tmp_path)
