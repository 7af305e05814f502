"""Sphinx configuration of the documentation.

    pip install '.[docs]'
    python -m sphinx -W --keep-going -j auto docs docs/_build/html
"""

from __future__ import annotations

import flaxshard

project = "flaxshard"
author = "The flaxshard authors"
version = release = flaxshard.__version__

extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.napoleon",
  "sphinx_copybutton",
  "sphinx_design",
]
exclude_patterns = ["_build", "tutorials/*.py", "**/__pycache__"]

html_theme = "sphinx_book_theme"
html_title = f"flaxshard {version}"

myst_heading_anchors = 3
nb_execution_mode = "off"
