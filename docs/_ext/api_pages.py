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


def _skip_member(
  app: Any, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
  """Leaves out the fields of NamedTuples, which "Attributes" describes."""
  del app, what, name, skip, options
  doc = getattr(obj, "__doc__", None) or ""
  return True if doc.startswith("Alias for field number") else None


def _mend_docstring(
  app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
  """Writes Google style as reStructuredText reads it, before napoleon."""
  del app, name, obj, options
  # A letter after a backtick, as in "`Array`s", needs an escaped space.
  lines[:] = [re.sub(r"(`[^`\n]+`)(?=[a-z])", r"\1\\ ", x) for x in lines]
  if what in ("attribute", "property"):
    # Napoleon reads what precedes a colon in the first line as a type.
    lines.insert(0, "")


def setup(app: Any) -> dict[str, bool]:
  """Registers the extension."""
  for name, value in _OPTIONS.items():
    app.config[name] = value
  app.add_css_file("reference.css")
  app.connect("autodoc-skip-member", _skip_member)
  app.connect("autodoc-process-docstring", _mend_docstring, priority=400)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
