"""Prints the definition of the config, for the help and for the docs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import re
import textwrap

from flaxshard.train.config import definition
from flaxshard.train.config.definition import Field

_WIDTH = 79


def help_text() -> str:
  """Returns all fields as text for a terminal."""
  lines = [
    "The fields of a config. A config file has what differs from the defaults;",
    "--config.FIELD=VALUE sets a field on the command line.",
  ]
  for title, fields in definition.SECTIONS.items():
    lines += ["", f"{title}:"]
    for path, field in _walk(fields):
      facts = [field.kind.allowed]
      if field.default is definition.REQUIRED:
        facts.append("required")
      elif not field.fields:  # each has its own default
        facts.append(f"default {field.default!r}")
      lines += ["", f"  {path}: {'; '.join(facts)}"]
      lines += textwrap.wrap(
        field.meaning.replace("`", ""),
        _WIDTH,
        initial_indent=" " * 6,
        subsequent_indent=" " * 6,
        break_on_hyphens=False,
      )
  return "\n".join(lines)


def markdown() -> str:
  """Returns all fields in Markdown, a heading each, for docs/config.md."""
  lines = []
  for title, fields in definition.SECTIONS.items():
    lines += [f"## {title}", ""]
    for path, field in _walk(fields):
      # What is written in a config is code.
      code = r'[({].*[)}]|"[^"]*"'
      allowed = re.sub(code, r"`\g<0>`", field.kind.allowed)
      facts = f"Allowed: {allowed}."
      if field.default is definition.REQUIRED:
        facts += " Required."
      elif not field.fields:  # each has its own default
        facts += f" Default: `{field.default!r}`."
      level = "#" * (3 + path.count("."))
      lines += [f"{level} `{path}`", "", field.meaning, "", facts, ""]
  return "\n".join(lines).strip()


def _walk(
  fields: Sequence[Field], prefix: str = ""
) -> Iterator[tuple[str, Field]]:
  """Yields the paths of fields, and the fields."""
  for field in fields:
    path = f"{prefix}{field.name}"
    yield path, field
    yield from _walk(field.fields, f"{path}.")
