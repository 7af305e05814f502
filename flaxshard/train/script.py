"""The console script `flaxshard`."""

import os
import runpy
import sys


def main() -> None:
  """Runs `python -m flaxshard` with the arguments of this program."""
  # As `python -m` does: a config names modules of the current folder.
  if not sys.flags.safe_path:
    sys.path.insert(0, os.getcwd())
  # As the main module: absl prints its docstring and its flags as the help, and
  # `multiprocessing` imports it again by its name.
  runpy.run_module("flaxshard", run_name="__main__", alter_sys=True)
