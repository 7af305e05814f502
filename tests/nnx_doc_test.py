"""The snippets of docs/guides/nnx.md run."""

import pathlib
import re

_PATH = pathlib.Path(__file__).parents[1] / "docs" / "guides" / "nnx.md"


def test_python_snippets_run_in_order() -> None:
  names: dict = {}
  for text in re.findall(r"```python\n(.*?)```", _PATH.read_text(), re.S):
    exec(compile(text, _PATH.name, "exec"), names)
  assert float(names["optimizer"].metrics()["loss_scale"]) == 2.0**15
  assert int(names["flax_optimizer"].step[...]) == 3
  assert int(names["optimizer"].step[...]) == 1
