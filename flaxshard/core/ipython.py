"""Finds out whether code runs in a notebook."""

from __future__ import annotations

import sys
from typing import Any


def in_ipython() -> bool:
  """Returns whether code runs in IPython, in a notebook or in a terminal."""
  return _shell() is not None


def in_notebook() -> bool:
  """Returns whether code runs in a Jupyter kernel, not in a terminal."""
  shell = _shell()
  # tqdm.auto recognizes a kernel by this entry of the config as well.
  return shell is not None and "IPKernelApp" in shell.config


def _shell() -> Any:
  # A program that IPython runs has imported it.
  if "IPython" not in sys.modules:
    return None
  from IPython import get_ipython

  return get_ipython()
