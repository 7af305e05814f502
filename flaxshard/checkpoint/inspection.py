"""Prints what a directory of checkpoints holds.

  python -m flaxshard.checkpoint /tmp/digits/checkpoints
  python -m flaxshard.checkpoint /tmp/digits --step 1200 --verify

Lists the steps and shows one: its versions, wrappers, position in the data and
arrays. Changes nothing, reads no arrays, and uses only the CPU. A step is
damaged if a file is missing or has another size, if it was copied or renamed
from another step, or if it is a link that leads nowhere. `--verify` also reads
and compares all files; in a bucket it compares the checksums that the bucket
has. Another program may save in the directory at the same time. The exit status
is 1 if a step is damaged, and 2 if there is nothing to show.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import contextlib
import functools
import json
import math
import os
import sys
import time
from typing import Any

import jax

from flaxshard.checkpoint import damage
from flaxshard.checkpoint import digests
from flaxshard.checkpoint import iterator_state
from flaxshard.checkpoint import locate
from flaxshard.checkpoint import metadata_item
from flaxshard.checkpoint import reader
from flaxshard.checkpoint import step_names
from flaxshard.core import files

# A step that is half deleted is gone after so many seconds.
_DELETION_SECONDS = 0.5

# Keys of the metadata that have lines of their own format.
_SHOWN_SEPARATELY = ("wrappers", "config")


def steps(directory: str | os.PathLike[str]) -> dict[int, str]:
  """Returns the paths of the steps in a directory, in ascending order.

  Args:
    directory: Path of the directory of the checkpoints.

  Raises:
    ValueError: There is no such directory, or no step in it.
  """
  found = step_names.steps(directory)
  if not found:
    reason = locate.describe_missing(directory)
    raise ValueError(f"no checkpoint in {os.fspath(directory)}: {reason}")
  return {step: str(path) for step, path in found.items()}


def status(
  step_dir: str | os.PathLike[str], contents: bool = False
) -> tuple[str, bool]:
  """Returns a description of a step's condition, and whether it is unusable.

  Args:
    step_dir: Path of the directory of the step.
    contents: Whether to read all files; otherwise only sizes are compared.
  """
  try:
    if digests.verify(step_dir, contents=contents):
      return ("complete, verified" if contents else "complete"), False
    # Without digests, only check that there is a train state.
    where = os.fspath(step_dir)
    damage.read(where, lambda: reader.plain(step_names.as_path(where)))
    return "complete, without digests", False
  except digests.Damaged as e:
    return f"damaged: {e}", True
  except reader.NotRestorableError as e:
    return f"not restorable: {e}", True
  except Exception as e:
    # The program that saves may have deleted the step while it was read.
    time.sleep(_DELETION_SECONDS)
    if files.lexists(step_dir):
      raise
    return f"deleted: {e}", True


def overview(
  directory: str | os.PathLike[str], contents: bool = False
) -> tuple[str, list[int]]:
  """Returns a line for each step, and the damaged steps.

  Args:
    directory: Path of the directory of the checkpoints.
    contents: Whether to read all files; otherwise only sizes are compared.

  Raises:
    ValueError: There is no such directory, or no step in it.
  """
  where = os.fspath(directory)
  lines, damaged = [where], []
  step_dirs = steps(where)
  conditions = {n: status(path, contents) for n, path in step_dirs.items()}
  if any(is_damaged for _, is_damaged in conditions.values()):
    # The program that saves may be deleting a step just now.
    time.sleep(_DELETION_SECONDS)
  for step, (condition, is_damaged) in conditions.items():
    if not files.lexists(step_dirs[step]):
      continue
    size = _format_size(_bytes_in(step_dirs[step]))
    lines.append(f"  {step:>8}  {size:>9}  {condition}")
    if is_damaged:
      damaged.append(step)
  counted = {os.path.basename(path) for path in step_dirs.values()}
  for name in sorted(set(files.list_names(where)) - counted):
    path = os.path.join(where, name)
    if files.is_dir(path) or os.path.islink(path):
      lines.append(f"  not counted: {name}{_describe_other(path)}")
  return "\n".join(lines), damaged


def _describe_other(path: str) -> str:
  """Returns what a directory or link is that is no step, in parentheses."""
  name = os.path.basename(path)
  if ".damaged" in name:
    return " (a damaged step that was set aside; it can be deleted)"
  if ".orbax-checkpoint-tmp" in name or step_names.OURS.fullmatch(name):
    return " (a save that has not finished)"
  return "" if files.exists(path) else " (a link that leads nowhere)"


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
  else:
    for key, value in metadata.items():
      if key not in _SHOWN_SEPARATELY and value is not None:
        lines.append(f"  {key}: {_format_value(value)}")
    for wrapper in metadata.get("wrappers", ()):
      lines.append(f"  wrapper: {_format_wrapper(wrapper)}")
    for key, value in (metadata.get("config") or {}).items():
      lines.append(f"  config.{key}: {_format_value(value)}")
  lines += [f"  {line}" for line in iterator_state.describe(where)]
  path = step_names.as_path(where)
  plain = damage.read(where, lambda: reader.plain(path))
  trees = {plain.item: plain}
  for item, item_dir in reader.items(path).items():
    if item not in trees:
      read_tree = functools.partial(reader.orbax_tree, item_dir, item)
      trees[item] = damage.read(where, read_tree)
  for item, tree in trees.items():
    size = sum(_bytes_of(x) for x in tree.leaves.values())
    lines.append(f"{item}: {len(tree.leaves)} arrays, {_format_size(size)}")
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
  if step is None and (step := locate.step_of(directory)) is not None:
    directory = os.path.dirname(files.absolute(directory))
  directory = os.fspath(locate.directory_of_steps(directory))
  step_dirs = steps(directory)
  if step is not None and step not in step_dirs:
    raise ValueError(f"{directory} has no step {step}, only {list(step_dirs)}.")
  text, damaged = overview(directory, verify)
  print(text)
  candidates = sorted(step_dirs, reverse=True) if step is None else [step]
  for number in candidates:
    if number in damaged:
      continue
    try:
      description = describe(step_dirs[number])
    except Exception:
      # The program that saves may have deleted the step while it was read.
      time.sleep(_DELETION_SECONDS)
      if files.lexists(step_dirs[number]):
        raise
    else:
      print(f"\n{description}")
      break
  return 1 if damaged else 0


def _format_wrapper(wrapper: Any) -> str:
  if isinstance(wrapper, str):  # the repr of a wrapper without a config
    return wrapper
  name, arguments = wrapper
  return f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"


def _format_value(value: Any) -> str:
  return value if isinstance(value, str) else json.dumps(value)


def _bytes_in(path: str) -> int:
  if files.is_bucket(path):
    return sum(int(info["size"]) for info in files.find(path).values())
  paths = [path]
  for folder, _, names in os.walk(path):
    paths += [os.path.join(folder, name) for name in names]
  size = 0
  for file in paths:
    # A link may lead nowhere, and a file may just have been deleted.
    with contextlib.suppress(OSError):
      size += os.path.getsize(file) if os.path.isfile(file) else 0
  return size


def _bytes_of(leaf: Any) -> int:
  return (
    math.prod(leaf.shape) * jax.dtypes.canonicalize_dtype(leaf.dtype).itemsize
  )


def _format_size(count: float) -> str:
  for unit in ("B", "kB", "MB", "GB"):
    if count < 1000 or unit == "GB":
      break
    count /= 1000
  return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
