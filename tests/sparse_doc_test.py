"""The snippets of docs/sparse.md run."""

import pathlib
import re

import pytest

_PATH = pathlib.Path(__file__).parents[1] / "docs" / "sparse.md"


@pytest.mark.slow
def test_python_snippets_run_in_order() -> None:
  names: dict = {}
  for text in re.findall(r"```python\n(.*?)```", _PATH.read_text(), re.S):
    exec(compile(text, _PATH.name, "exec"), names)
  assert names["halves"]["table"].values.shape == (3, 4)
