"""Prints what a directory of checkpoints holds.

  python -m flaxshard.checkpoint /tmp/digits/checkpoints
  python -m flaxshard.checkpoint /tmp/digits --step 1200 --verify

Lists the steps and shows one: its versions, wrappers, position in the data and
arrays. Changes nothing, reads no arrays, and uses only the CPU. A step is
damaged if a file is missing or has another size, or if it was copied or renamed
from another step. `--verify` also reads and compares all files, except in a
bucket. Another program may save in the directory at the same time. The exit
status is 1 if a step is damaged, and 2 if there is nothing to show.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import contextlib
import json
import math
import os
import sys
import time
from typing import Any

from etils import epath
import jax

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import iterator_state
from flaxshard.checkpoint import locate
from flaxshard.checkpoint import metadata_item
from flaxshard.checkpoint import reader
from flaxshard.checkpoint import step_names
from flaxshard.core import checks
from flaxshard.core import files
from flaxshard.core import multihost

# The program that saves may be deleting a step while it is read: it is gone
# after so many seconds.
_DELETION_SECONDS = 0.5

# Characters of a position in the data that are shown.
_SHOWN = 200


def status(step_dir: Any, contents: bool = False) -> tuple[str, bool]:
  """Returns a description of a step's condition, and whether it is unusable.

  Args:
    step_dir: Path of the directory of the step.
    contents: Whether to read all files; otherwise only sizes are compared.
  """
  try:
    if digests.verify(step_dir, contents=contents):
      return ("complete, verified" if contents else "complete"), False
    # Without digests, only check that there is a train state.
    reader.plain(step_dir)
    return "complete, without digests", False
  except digests.Damaged as e:
    return f"damaged: {e}", True
  except reader.NotRestorableError as e:
    return f"not restorable: {e}", True
  except Exception as e:  # of Orbax
    return f"cannot be read: {e}", True


def overview(
  directory: Any, contents: bool = False
) -> tuple[list[str], dict[int, Any]]:
  """Returns a line for each step, and its path; None for a damaged one.

  Args:
    directory: Path of the directory of the checkpoints.
    contents: Whether to read all files; otherwise only sizes are compared.
  """
  directory = step_names.as_path(directory)
  lines, steps, counted = [str(directory)], {}, set()
  for step, path in step_names.steps(directory).items():
    condition, is_damaged = status(path, contents)
    size = checks.format_bytes(_bytes_in(path))
    if is_damaged:
      time.sleep(_DELETION_SECONDS)
    if not path.exists():
      continue
    counted.add(path.name)
    lines.append(f"  {step:>8}  {size:>9}  {condition}")
    steps[step] = None if is_damaged else path
  for path in sorted(directory.iterdir()) if steps else ():
    if path.name not in counted and path.is_dir():
      lines.append(f"  not counted: {path.name}{_describe_other(path.name)}")
  return lines, steps


def _describe_other(name: str) -> str:
  """Returns what a directory is that is no step, in parentheses."""
  if name.endswith(".damaged"):
    return " (a damaged step that was set aside; it can be deleted)"
  if ".orbax-checkpoint-tmp" in name or step_names.OURS.fullmatch(name):
    return " (a save that has not finished)"
  return ""


def describe(step_dir: str | os.PathLike[str]) -> str:
  """Returns the versions, wrappers, position and arrays of a step as text.

  Args:
    step_dir: Path of the directory of the step.

  Raises:
    ValueError: The step cannot be read.
  """
  where = os.fspath(step_dir)
  lines = [where]
  metadata = metadata_item.read_metadata(where)
  if metadata is None:
    lines.append("  not written by flaxshard")
  for key, value in (metadata or {}).items():
    if isinstance(value, dict):
      lines += [f"  {key}.{k}: {json.dumps(x)}" for k, x in value.items()]
    elif value is not None:
      lines.append(f"  {key}: {json.dumps(value)}")
  path = step_names.as_path(where)
  item_dir = path / iterator_state.ITEM
  for file in sorted(item_dir.iterdir()) if item_dir.is_dir() else ():
    text = " ".join(file.read_bytes().decode(errors="replace").split())
    lines.append(f"  {iterator_state.ITEM}/{file.name}: {text[:_SHOWN]}")
  plain = reader.plain(path)
  trees = {plain.item: plain}
  for item, item_dir in reader.items(path).items():
    if item not in trees:
      trees[item] = reader.orbax_tree(item_dir, item)
  for item, tree in trees.items():
    size = sum(_bytes_of(x) for x in tree.leaves.values())
    lines.append(
      f"{item}: {len(tree.leaves)} arrays, {checks.format_bytes(size)}"
    )
    width = max((len("/".join(p)) for p in tree.leaves), default=0)
    for leaf_path, leaf in sorted(tree.leaves.items()):
      name = "/".join(leaf_path) or "<root>"
      shape = ",".join(map(str, leaf.shape))
      lines.append(f"  {name:<{width}}  {leaf.dtype}[{shape}]")
  return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit status.

  Args:
    argv: The arguments of the command; None reads those of the program.
  """
  parser = argparse.ArgumentParser(
    prog="python -m flaxshard.checkpoint",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "directory",
    metavar="DIR",
    help="directory of checkpoints, a workdir, or one checkpoint",
  )
  parser.add_argument(
    "--step",
    type=int,
    help="the step to show (default: the newest that is not damaged)",
  )
  parser.add_argument(
    "--verify",
    action="store_true",
    help="read all files and compare their crc32",
  )
  args = parser.parse_args(argv)
  # A training run may be using the accelerator.
  jax.config.update("jax_platforms", "cpu")
  try:
    return _show(args.directory, args.step, args.verify)
  except (OSError, ValueError) as e:
    print(f"error: {e}", file=sys.stderr)
    return 1 if isinstance(e, digests.Damaged) else 2


def _show(directory: str, step: int | None, verify: bool) -> int:
  where = step_names.as_path(directory)
  if step is None and (step := locate.step_of(where)) is not None:
    where = where.parent
  where = locate.directory_of_steps(where)
  lines, steps = overview(where, verify)
  while not steps and step_names.steps(where):
    # The program that saves has deleted all of them, and saved others.
    lines, steps = overview(where, verify)
  if not steps:
    raise ValueError(
      f"no checkpoint in {where}: {locate.describe_missing(where)}"
    )
  if step is not None and step not in steps:
    raise ValueError(f"{where} has no step {step}, only {list(steps)}.")
  print("\n".join(lines))
  usable = [n for n, path in steps.items() if path is not None]
  for number in reversed(usable) if step is None else {step} & {*usable}:
    try:
      print(f"\n{describe(steps[number])}")
      break
    except Exception as e:
      time.sleep(_DELETION_SECONDS)
      if steps[number].exists():
        message = f"{steps[number]} cannot be read: "
        raise digests.Damaged(message + multihost.summarize_error(e)) from e
  return 1 if len(usable) < len(steps) else 0


def _bytes_in(path: str) -> int:
  where = epath.Path(path)
  if where.is_file():
    return where.stat().length
  size = 0
  # A file may just have been deleted.
  with contextlib.suppress(OSError):
    for file in files.files_in(where):
      size += file.stat().length
  return size


def _bytes_of(leaf: Any) -> int:
  return (
    math.prod(leaf.shape) * jax.dtypes.canonicalize_dtype(leaf.dtype).itemsize
  )
