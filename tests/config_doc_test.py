"""docs/config.md: its list of fields, and its snippets."""

import pathlib
import re

from flaxshard.train import config as config_lib
from flaxshard.train.config import text

_DOC = (pathlib.Path(__file__).parents[1] / "docs" / "config.md").read_text()


def test_fields_are_those_of_the_definition():
  """To update the list: `python tests/config_doc_test.py`."""
  assert _DOC.split("a test compares. -->")[1].strip() == text.markdown()


def test_snippets_run():
  names = {}
  snippets = re.findall(r"```python\n(.*?)```", _DOC, re.S)
  for snippet in snippets:
    exec(compile(snippet, "config.md", "exec"), names)
  config = config_lib.check(names["get_config"]())
  assert config.data.to_dict() == {"name": "digits"}
  # A user's config is short.
  assert len(snippets[0].splitlines()) <= 13


if __name__ == "__main__":
  path = pathlib.Path(__file__).parents[1] / "docs" / "config.md"
  mark = "a test compares. -->"
  path.write_text(f"{_DOC.split(mark)[0]}{mark}\n\n{text.markdown()}\n")
