"""Formulas as MathML, which browsers show without MathJax from the net."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx import application


def _visit(translator: Any, node: nodes.Element) -> None:
  block = isinstance(node, nodes.math_block)
  formula = latex2mathml.tex2mathml(node.astext(), as_block=block)
  if block:  # a long one can be scrolled
    formula = f'<div style="overflow-x: auto">{formula}</div>'
  translator.body.append(formula)
  raise nodes.SkipNode


def setup(app: application.Sphinx) -> dict[str, Any]:
  """Registers the extension."""
  app.add_html_math_renderer("mathml", (_visit, None), (_visit, None))
  return {"parallel_read_safe": True, "parallel_write_safe": True}
