"""Prints the definition of the config, for the help and for the docs."""

from __future__ import annotations

import re
import textwrap

from flaxshard.train.config import definition
from flaxshard.train.config.definition import Field

_WIDTH = 79


def help_text() -> str:
  """Returns all fields as text for a terminal."""
  lines = [
    "The fields of a config. A config file has what differs from the defaults;",
    "--config.FIELD=VALUE sets a field on the command line. As a page:",
    "https://flaxshard.github.io/flaxshard/config.html",
  ]
  for title, fields in definition.SECTIONS:
    lines += ["", f"{title}:"]
    for path, field in fields.items():
      lines += ["", f"  {path}: {_facts(field)}"]
      lines += textwrap.wrap(
        field.meaning,
        _WIDTH,
        initial_indent=" " * 6,
        subsequent_indent=" " * 6,
        break_on_hyphens=False,
      )
  return "\n".join(lines).replace("`", "")


def markdown() -> str:
  """Returns all fields in Markdown, a heading each, for docs/config.md."""
  lines = []
  for title, fields in definition.SECTIONS:
    lines += [f"## {title}", ""]
    for path, field in fields.items():
      level = "#" * (3 + path.count("."))
      facts = f"Allowed: {_facts(field)}."
      lines += [f"{level} `{path}`", "", field.meaning, "", facts, ""]
  return "\n".join(lines).strip()


def _facts(field: Field) -> str:
  """Returns what is allowed, and the default, in Markdown."""
  # What is written in a config is code.
  facts = re.sub(r'[({].*[)}]|"[^"]*"', r"`\g<0>`", field.kind.allowed)
  if field.default is definition.REQUIRED:
    return f"{facts}; required"
  # Of a dict with fields, each has a default of its own.
  return (
    facts if field.type is dict else f"{facts}; default `{field.default!r}`"
  )
