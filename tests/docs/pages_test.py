"""Every code block of every page of the documentation is run.

CONTRIBUTING.md says how to write blocks that these tests take.
"""

import pathlib
import re

import page_blocks
import page_commands
import page_runner
import pytest

_PAGES = {page.name: page for page in page_blocks.pages()}
_KINDS = ("python", "diff", "bash")


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
  page_runner.run(page, tmp_path, _KINDS if page.mark else ("python", "diff"))


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
      page_commands.commands(block.text)
      if block.kind == "bash"
      else [block.text]
    )
  ]
  for kind, pattern, test in page_commands.ELSEWHERE:
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
