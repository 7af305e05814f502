"""Prints the definition of the config, for the help and for the docs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
      lines += ["", f"  {path}: {field.kind.allowed}; {_describe(field)}"]
      lines += textwrap.wrap(
        field.meaning.replace("`", ""),
        _WIDTH,
        initial_indent=" " * 6,
        subsequent_indent=" " * 6,
      )
  return "\n".join(lines)


def markdown() -> str:
  """Returns all fields as tables in Markdown, for docs/config.md."""
  lines = []
  for title, fields in definition.SECTIONS.items():
    lines += [
      f"### {title}",
      "",
      "| field | allowed | default | meaning |",
      "| --- | --- | --- | --- |",
    ]
    for path, field in _walk(fields):
      cells = (
        f"`{path}`",
        field.kind.allowed,
        "required" if _is_required(field) else f"`{field.default!r}`",
        field.meaning,
      )
      lines.append(
        f"| {' | '.join(c.replace('|', chr(92) + '|') for c in cells)} |"
      )
    lines.append("")
  return "\n".join(lines).strip()


def _walk(
  fields: Sequence[Field], prefix: str = ""
) -> Iterator[tuple[str, Field]]:
  """Yields the paths of fields, and the fields."""
  for field in fields:
    path = f"{prefix}{field.name}"
    yield path, field
    yield from _walk(field.fields, f"{path}.")


def _is_required(field: Field) -> bool:
  return field.default is definition.REQUIRED


def _describe(field: Field) -> str:
  return "required" if _is_required(field) else f"default {field.default!r}"
