"""The snippets of docs/guides/tasks.md run, in the order of each section."""

import pathlib
import re

import pytest

_PATH = pathlib.Path(__file__).parents[1] / "docs" / "guides" / "tasks.md"
_SECTIONS = dict(
  re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", _PATH.read_text(), re.S | re.M)
)


@pytest.mark.slow
@pytest.mark.parametrize("title", _SECTIONS)
def test_python_snippets_run(title):
  names: dict = {}
  for snippet in re.findall(r"```python\n(.*?)```", _SECTIONS[title], re.S):
    exec(compile(snippet, f"{_PATH.name}: {title}", "exec"), names)
