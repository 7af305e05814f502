"""Configures autodoc for the pages in docs/api, and shortens signatures."""

from __future__ import annotations

import re
from typing import Any

from sphinx.util import inspect

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
_PYTREE = ("tree_flatten_with_keys", "tree_unflatten")


def _skip_member(
  app: Any, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
  """Leaves out what Python, Flax and JAX ask of all tuples and pytrees."""
  del app, what, skip, options
  doc = getattr(obj, "__doc__", None) or ""
  return True if doc.startswith(_INHERITED) or name in _PYTREE else None


# What Python makes of aliases of types and of default values, and their names.
_SCALAR = r"~jax\S+Array \| ~numpy.ndarray \|[^]]*?complex"
_SCHEDULE = rf"~collections.abc.Callable\[\[{_SCALAR}\], {_SCALAR}\]"
_NAMES = {
  r"~numpy\S+_Buffer \|.*?_NestedSequence\[complex \| bytes \| str\]": (
    "~numpy.typing.ArrayLike"
  ),
  rf"float \| ~jax\S+Array \| {_SCHEDULE}": "~optax.ScalarOrSchedule",
  _SCHEDULE: "~optax.Schedule",
  rf"{_SCALAR} \| .*?Mapping\[\S+ ArrayTree\]": "~optax.OptState",
  "~flaxshard.state.fields.HasMesh": "~flaxshard.Strategy",
  # The fields that Linen adds to each module.
  r", parent: [^=]*= <.*?>, name: [^=]*= None": "",
  r"<factory>|<object object>|[\w.]*MISSING\b": "...",
}


def _shorten(text: str) -> str:
  for long, short in _NAMES.items():
    text = re.sub(long, short, text)
  return text


def _shorten_signature(
  app: Any,
  what: str,
  name: str,
  obj: Any,
  options: Any,
  signature: str | None,
  returns: str | None,
) -> tuple[str, str | None] | None:
  """Makes signatures ones that Sphinx can format and a reader can use."""
  del app, name, options
  if signature is None:
    return None
  if what == "class" and getattr(obj, "_is_protocol", False):
    return "", None  # it is not called
  if signature.startswith("(*args: Any, **kwargs"):  # of an NNX metaclass
    own = inspect.signature(obj.__init__, bound_method=True)
    signature = inspect.stringify_signature(own, unqualified_typehints=True)
  return _shorten(signature), _shorten(returns) if returns else None


# Stands for a colon while napoleon reads a docstring.
_COLON = "\ue000"


def _separate(match: re.Match[str]) -> str:
  return f"{match[1]}\\ {match[2]}" if match[2] else match[1]


def _prepare(
  app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
  """Writes Google style as reStructuredText reads it, before napoleon."""
  del app, name, obj, options
  for i, line in enumerate(lines):
    # A letter after a backtick, as in "`Array`s", needs an escaped space.
    line = re.sub(r"(`[^`]+`)([a-z]?)", _separate, line)
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
