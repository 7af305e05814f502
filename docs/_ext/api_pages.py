"""How the pages in docs/api show docstrings."""

from __future__ import annotations

import re
from typing import Any

_OPTIONS = {
  # Single backticks in docstrings: code, and a link if it is a public name.
  "default_role": "py:obj",
  "autodoc_member_order": "bysource",
  "autodoc_preserve_defaults": True,
  "autodoc_typehints_format": "short",
  "python_use_unqualified_type_names": True,
  "python_maximum_signature_line_length": 68,
  # "Attributes:" is a list, as "Args:" is; each field of a dataclass is
  # documented there alone.
  "napoleon_custom_sections": [("Attributes", "params_style")],
}


# Docstrings of the fields of NamedTuples, and of `replace`.
_INHERITED = ("Alias for field number", "Returns a new object replacing")


def _skip_member(
  app: Any, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
  """Leaves out what Python and Flax give all tuples and dataclasses."""
  del app, what, name, skip, options
  doc = getattr(obj, "__doc__", None) or ""
  return True if doc.startswith(_INHERITED) else None


def _shorten_signature(
  app: Any,
  what: str,
  name: str,
  obj: Any,
  options: Any,
  signature: str | None,
  returns: str | None,
) -> tuple[str, str | None] | None:
  """Makes signatures of classes ones that Sphinx can format."""
  del app, name, options
  if what != "class" or signature is None:
    return None
  if getattr(obj, "_is_protocol", False):
    return "", None  # it is not called
  # The fields that Linen adds to each module.
  signature = re.sub(
    r", parent: [^=]*= <.*?>, name: [^=]*= None", "", signature
  )
  return signature.replace("<factory>", "..."), returns


# Stands for a colon while napoleon reads a docstring.
_COLON = "\ue000"


def _prepare(
  app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
  """Writes Google style as reStructuredText reads it, before napoleon."""
  del app, name, obj, options
  for i, line in enumerate(lines):
    # A letter after a backtick, as in "`Array`s", needs an escaped space.
    line = re.sub(r"(`[^`\n]+`)(?=[a-z])", r"\1\\ ", line)
    lines[i] = re.sub(r"docs/([\w/]+)\.md", r":doc:`/\1`", line)
  # Napoleon takes what precedes a colon in these lines as a type.
  starts = [i + 1 for i, x in enumerate(lines[:-1]) if x.strip() == "Returns:"]
  if what in ("attribute", "property") and lines:
    starts.append(0)
  for i in starts:
    lines[i] = lines[i].replace(":", _COLON)


def _restore_colons(
  app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
  """Undoes a change of `_prepare`, after napoleon."""
  del app, what, name, obj, options
  lines[:] = [line.replace(_COLON, ":") for line in lines]


def setup(app: Any) -> dict[str, bool]:
  """Registers the extension."""
  for name, value in _OPTIONS.items():
    app.config[name] = value
  app.add_css_file("reference.css")
  app.connect("autodoc-skip-member", _skip_member)
  app.connect("autodoc-process-signature", _shorten_signature)
  app.connect("autodoc-process-docstring", _prepare, priority=400)
  app.connect("autodoc-process-docstring", _restore_colons, priority=600)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
