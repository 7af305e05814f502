"""Training configs: their fields, defaults, checks and files.

A config is an `ml_collections.ConfigDict` that has what differs from the
defaults. `python -m flaxshard --help=config` and docs/config.md list the
fields.
"""

from flaxshard.train.config.checking import check
from flaxshard.train.config.checking import defaults
from flaxshard.train.config.checking import resolve_mode
from flaxshard.train.config.files import names
from flaxshard.train.config.files import read

__all__ = [
  "check",
  "defaults",
  "names",
  "read",
  "resolve_mode",
]
