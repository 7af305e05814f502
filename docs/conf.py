"""Sphinx configuration of the documentation.

    pip install -e '.[docs]'

    python -m sphinx -W --keep-going docs docs/_build/html

Open docs/_build/html/index.html afterwards. Links to files outside of docs/
lead to the branch main on GitHub; `-D repository_ref=v0.1.0` takes a tag.
"""

from __future__ import annotations

import pathlib
import sys

import flaxshard

_ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT / "docs" / "_ext"))

project = "flaxshard"
author = "The flaxshard authors"
version = release = flaxshard.__version__
copyright = author

extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.napoleon",
  "sphinx_copybutton",
  "sphinx_design",
  "mathml",
  "notebooks",
  "repository_links",
  "themed_pictures",
  "api_pages",
  "config_fields",
]
exclude_patterns = ["_build", "_ext"]

# Links to files of the repository, see _ext/repository_links.py.
repository_url = "https://github.com/flaxshard/flaxshard"
# Pages that include a file from outside of docs/.
repository_pages = {
  "benchmarks": "benchmarks/README.md",
  "changelog": "CHANGELOG.md",
  "contributing": "CONTRIBUTING.md",
  "index": "README.md",
}
# Folders of docs/ with copies of notebooks, see _ext/notebooks.py.
repository_folders = {"tutorials": "colab"}

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4

# The notebooks are stored with their outputs.
nb_execution_mode = "off"
nb_merge_streams = True

html_math_renderer = "mathml"
html_theme = "sphinx_book_theme"
html_title = f"flaxshard {version}"
html_static_path = ["_static"]
html_css_files = ["flaxshard.css"]
highlight_language = "none"  # of blocks that do not name one
html_copy_source = False
html_context = {"default_mode": "auto"}  # light or dark, as the system
html_theme_options = {
  "repository_url": repository_url,
  "repository_branch": "main",
  "path_to_docs": "docs",
  "use_repository_button": True,
  "use_edit_page_button": True,
  "use_issues_button": True,
  "use_download_button": False,
  "launch_buttons": {"colab_url": "https://colab.research.google.com"},
  "navbar_persistent": [],  # the sidebar has the search
  "show_navbar_depth": 1,
  "max_navbar_depth": 1,
  "home_page_in_toc": True,
  "show_toc_level": 2,
}
