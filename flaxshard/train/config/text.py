"""Prints the definition of the config, for the help and for the docs."""

from __future__ import annotations

import textwrap
from typing import Any, get_args, get_origin, Literal

from pydantic.fields import FieldInfo

from flaxshard.train.config import definition


def help_text() -> str:
  """Returns all fields as text for a terminal."""
  intro = (
    "The fields of a config. A config file has what differs from the defaults; "
    "--config.FIELD=VALUE sets a field on the command line. A name stands for "
    'a dict with this "name". As a page: '
    "https://flaxshard.github.io/flaxshard/config.html"
  )
  return "\n\n".join(
    textwrap.fill(text, 79, break_on_hyphens=False, break_long_words=False)
    for text in [intro, *markdown().split("\n\n")]
  )


def markdown() -> str:
  """Returns all fields in Markdown, a heading each, for docs/config.md."""
  lines = []
  for section in definition.SECTIONS:
    lines.append(f"## {_about(section).rstrip('.')}")
    for path, field in definition.fields_of(section).items():
      level = "#" * (3 + path.count("."))
      meaning = field.description or _about(field.annotation)
      lines += [f"{level} `{path}`", meaning, _facts(field)]
  return "\n\n".join(lines)


def _about(group: object) -> str:
  """Returns the docstring of a group without the attributes, as one line."""
  return " ".join((group.__doc__ or "").split("Attributes:")[0].split())


def _facts(field: FieldInfo) -> str:
  """Returns what is allowed, and the default, in Markdown."""
  kind: Any = field.annotation
  if definition.is_group(kind):
    return "A dict of the fields below."
  if get_origin(kind) is Literal:
    facts = [" or ".join(map(repr, get_args(kind)))]
  else:
    facts = [(get_origin(kind) or kind).__name__]
  for bound, words in (("ge", "at least"), ("gt", "above")):
    limits = [getattr(x, bound) for x in field.metadata if hasattr(x, bound)]
    facts += [f"{words} {limit}" for limit in limits]
  required = field.is_required()
  facts.append("required" if required else f"default `{field.default!r}`")
  return f"Allowed: {', '.join(facts)}."
