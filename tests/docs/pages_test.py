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
  if page.mark:
    return [getattr(pytest.mark, page.mark)]
  # The guides train, one after another longer than what is quick.
  return [pytest.mark.slow] if page.name.startswith("docs/guides/") else []


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
  texts = [
    (block.kind, text)
    for page in _PAGES.values()
    for block in page.blocks
    for text in (
      page_runner.commands(block.text) if block.kind == "bash" else [block.text]
    )
  ]
  for kind, pattern, test in page_runner.ELSEWHERE:
    if not test.startswith("none: "):
      assert (page_blocks.ROOT / test).exists(), test
    assert any(
      kind == known and re.search(pattern, text.strip())
      for known, text in texts
    ), f"no block needs {pattern!r}"


def test_has_one_command_for_the_main_job_and_one_for_the_tests() -> None:
  lines = (page_blocks.ROOT / "README.md").read_text().splitlines()
  for part in ("--config=configs/digits.py", "-m pytest"):
    found = [x for x in lines if x.startswith("python3 -m venv") and part in x]
    assert len(found) == 1, part


# The runner finds wrong outputs, errors and unchecked blocks.


def _page(tmp_path: pathlib.Path, text: str) -> page_blocks.Page:
  path = tmp_path / "page.md"
  path.write_text(text)
  return page_blocks.read(path)


@pytest.mark.parametrize(
  ("code", "text"),
  [
    ("print('a')", "b"),
    ("print('a')", "ValueError: a"),
    ("raise ValueError('a')", "ValueError: b"),
    ("import warnings\nwarnings.warn('a')", "UserWarning: b"),
  ],
)
def test_other_text_is_named_with_page_and_line(
  code: str, text: str, tmp_path: pathlib.Path
) -> None:
  page = f"\n```python\n{code}\n```\n```text\n{text}\n```\n"
  line = page[: page.index("```text")].count("\n") + 2
  with pytest.raises(page_runner.PageError, match=rf"^page\.md:{line}: "):
    page_runner.run(_page(tmp_path, page), tmp_path)


@pytest.mark.parametrize(
  ("page", "message"),
  [
    ("```\na\n```\n", r"page\.md:2: no test checks blocks of the kind ''"),
    ("```{code-block} python\na\n```\n", "kind '{code-block}'"),
    ("````{note}\n\n```json\n{}\n```\n````\n", r"page\.md:4: .* kind 'json'"),
    ("```text\na\n```\n", "follows no code block"),
    ("```python\n```\n```text\n```\n```text\n```\n", r":6: .* follows no code"),
    ("```bash\nkubectl a\n```\n", "no rule for 'kubectl a'"),
  ],
)
def test_a_block_that_nothing_checks_is_named(
  page: str, message: str, tmp_path: pathlib.Path
) -> None:
  with pytest.raises(page_runner.PageError, match=message):
    page_runner.check_kinds(_page(tmp_path, page))
