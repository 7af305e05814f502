"""The snippets of docs/guides/plans.md run."""

import pathlib
import re

import pytest

_PATH = pathlib.Path(__file__).parents[1] / "docs" / "guides" / "plans.md"
# Snippets marked "python tpu" need the TPU compiler.
_SNIPPETS = re.findall(r"```python( tpu)?\n(.*?)```", _PATH.read_text(), re.S)


def test_python_snippets_run_in_order() -> None:
  names = _run([text for marked, text in _SNIPPETS if not marked])
  assert names["strategy"].mesh.devices.flat[0].device_kind == "TPU v5 lite"
  assert "num_partitions = 8" in names["lowered_loop"].as_text()


@pytest.mark.tpu
def test_all_python_snippets_run_in_order() -> None:
  names = _run([text for _, text in _SNIPPETS])
  assert names["memory"].fits is True
  assert names["found"].batch_size == 2**12


def _run(snippets: list[str]) -> dict:
  names: dict = {}
  for snippet in snippets:
    exec(compile(snippet, _PATH.name, "exec"), names)
  return names
