"""The snippets of docs/config.md run."""

import pathlib
import re

from flaxshard.train import config as config_lib

_DOC = (pathlib.Path(__file__).parents[1] / "docs" / "config.md").read_text()


def test_snippets_run():
  names = {}
  snippets = re.findall(r"```python\n(.*?)```", _DOC, re.S)
  for snippet in snippets:
    exec(compile(snippet, "config.md", "exec"), names)
  config = config_lib.check(names["get_config"]())
  assert config.data.to_dict() == {"name": "digits"}
  # A user's config is short.
  assert len(snippets[0].splitlines()) <= 13
