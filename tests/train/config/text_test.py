"""The list of fields as text and as Markdown."""

from flaxshard.train.config import text


def test_markdown_has_a_heading_with_the_facts_of_each_field():
  blocks = text.markdown().split("\n\n")
  at = blocks.index("### `batch_size`")
  assert blocks[at + 1].startswith("Examples in a batch")
  assert blocks[at + 2] == "Allowed: integer, at least 1. Required."
  at = blocks.index("#### `mesh.replica`")
  assert blocks[at + 2].endswith("Default: `-1`.")
  # What is written in a config is code: ** begins no bold text.
  allowed = 'Allowed: name, or `{"name": ..., **arguments}`.'
  assert blocks[blocks.index("### `data`") + 2].startswith(allowed)


def test_markdown_and_help_have_the_same_fields():
  headings = [
    line.strip("# `")
    for line in text.markdown().splitlines()
    if line.startswith("###")
  ]
  assert len(headings) == len(set(headings)) > 50
  assert [h for h in headings if f"  {h}: " not in text.help_text()] == []
