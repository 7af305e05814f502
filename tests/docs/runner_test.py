"""The runner of the pages finds wrong outputs, errors and unchecked blocks."""

import page_blocks
import page_runner
import pytest


def read(tmp_path, text):
  path = tmp_path / "page.md"
  path.write_text(text)
  return page_blocks.read(path)


def run(tmp_path, text, kinds=("python", "bash")):
  folder = tmp_path / "folder"
  folder.mkdir()
  return page_runner.run(read(tmp_path, text), folder, kinds)


@pytest.mark.parametrize(
  ("code", "text"),
  [
    ("print('a')", "b"),
    ("print('a')", "ValueError: a"),
    ("raise ValueError('a')", "ValueError: b"),
    ("import warnings\nwarnings.warn('a')", "UserWarning: b"),
  ],
)
def test_other_text_is_named_with_page_and_line(tmp_path, code, text):
  page = f"\n```python\n{code}\n```\n```text\n{text}\n```\n"
  line = page[: page.index("```text")].count("\n") + 2
  with pytest.raises(page_runner.PageError, match=rf"^page\.md:{line}: "):
    run(tmp_path, page)


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
def test_a_block_that_nothing_checks_is_named(tmp_path, page, message):
  with pytest.raises(page_runner.PageError, match=message):
    page_runner.check_kinds(read(tmp_path, page))
