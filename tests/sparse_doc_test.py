"""The snippets of docs/guides/sparse.md run."""

import pathlib
import re

import pytest

_PATH = pathlib.Path(__file__).parents[1] / "docs" / "guides" / "sparse.md"
_SNIPPETS = re.findall(r"```python( slow)?\n(.*?)```", _PATH.read_text(), re.S)


@pytest.mark.slow
def test_python_snippets_run_in_order() -> None:
  names = _run([text for marked, text in _SNIPPETS if not marked])
  assert names["halves"]["table"].values.shape == (3, 4)


@pytest.mark.slow
def test_the_example_runs() -> None:
  imports = "import flaxshard as fs\nimport jax.numpy as jnp\n"
  names = _run([imports, *(text for marked, text in _SNIPPETS if marked)])
  assert int(names["state"].step) == 20


def _run(snippets: list[str]) -> dict:
  names: dict = {}
  for snippet in snippets:
    exec(compile(snippet, _PATH.name, "exec"), names)
  return names
