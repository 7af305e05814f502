"""Prints what a directory of checkpoints holds.

  python -m flaxshard.checkpoint /tmp/digits/checkpoints
  python -m flaxshard.checkpoint /tmp/digits --step 1200 --verify

Lists the steps and shows one: its versions, wrappers, position in the data and
arrays. Changes nothing, reads no arrays, and uses only the CPU. A step is
damaged if a file is missing or has another size, or if it was copied or renamed
from another step. `--verify` also reads and compares all files, except in a
bucket. Another program may save in the directory at the same time. The exit
status is 1 if a step is damaged, and 2 if there is nothing to show. See
https://flaxshard.github.io/flaxshard/guides/checkpoints.html.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import contextlib
import itertools
import json
import math
import sys
import time
from typing import Any

import jax

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import reader
from flaxshard.checkpoint import steps as steps_lib
from flaxshard.core import checks
from flaxshard.core import files
from flaxshard.core import multihost

# The program that saves may be deleting a step while it is read: it is gone
# after so many seconds.
_DELETION_SECONDS = 0.5

# Characters of a position in the data that are shown.
_SHOWN = 200


def status(step_dir: Any, contents: bool) -> tuple[str, bool]:
  """Returns a description of a step's condition, and whether it is unusable.

  Args:
    step_dir: Path of the directory of the step.
    contents: Whether to read all files; otherwise only sizes are compared.
  """
  try:
    if digests.verify(step_dir, contents=contents):
      return ("complete, verified" if contents else "complete"), False
    # Without digests, only check that there is a train state.
    reader.open_unverified(step_dir)
    return "complete, without digests", False
  except digests.Damaged as e:
    return f"damaged: {e}", True
  except Exception as e:  # of Orbax
    return f"cannot be restored: {e}", True


def overview(directory: Any, contents: bool) -> tuple[str, dict[int, Any]]:
  """Returns a text about the steps, and their paths; None for a damaged one.

  Args:
    directory: Path of the directory of the checkpoints.
    contents: Whether to read all files; otherwise only sizes are compared.
  """
  lines, steps, shown = [str(directory)], {}, set()
  for step, path in steps_lib.find(directory).items():
    condition, is_damaged = status(path, contents)
    size = checks.format_bytes(_bytes_in(path))
    if is_damaged:
      time.sleep(_DELETION_SECONDS)
    if path.exists():
      lines.append(f"  {step:>8}  {size:>9}  {condition}")
      steps[step] = None if is_damaged else path
      shown.add(path.name)
  for path in sorted(directory.iterdir()) if steps else ():
    if path.is_dir() and path.name not in shown:
      # Such as `20.damaged`, or a save that has not finished.
      lines.append(f"  not counted: {path.name}")
  return "\n".join(lines), steps


def describe(step_dir: Any) -> str:
  """Returns the versions, wrappers, position and arrays of a step as text.

  Args:
    step_dir: Path of the directory of the step.

  Raises:
    ValueError: The step cannot be read.
  """
  lines = [str(step_dir)]
  metadata = digests.read_metadata(step_dir)
  if metadata is None:
    lines.append("  not written by flaxshard")
  for key, value in (metadata or {}).items():
    if isinstance(value, dict):
      lines += [f"  {key}.{k}: {json.dumps(x)}" for k, x in value.items()]
    elif value is not None:
      lines.append(f"  {key}: {json.dumps(value)}")
  position = step_dir / steps_lib.POSITION
  for file in sorted(position.iterdir()) if position.is_dir() else ():
    text = " ".join(file.read_bytes().decode(errors="replace").split())
    lines.append(f"  {position.name}/{file.name}: {text[:_SHOWN]}")
  leaves = reader.open_unverified(step_dir).values()
  for item, group in itertools.groupby(leaves, lambda leaf: leaf.tree):
    tree = {"/".join(x.key) or "<root>": x for x in group}
    size = checks.format_bytes(sum(map(_bytes_of, tree.values())))
    lines.append(f"{item}: {len(tree)} arrays, {size}")
    width = max(map(len, tree))
    for name, leaf in sorted(tree.items()):
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
  where = steps_lib.as_path(directory)
  if step is None and (step := steps_lib.number_of(where)) is not None:
    where = where.parent
  where = steps_lib.directory_of_steps(where)
  text, steps = overview(where, verify)
  while not steps and steps_lib.find(where):
    # The program that saves has deleted all of them, and saved others.
    text, steps = overview(where, verify)
  if not steps:
    raise ValueError(
      f"no checkpoint in {where}: {steps_lib.describe_missing(where)}"
    )
  if step is not None and step not in steps:
    raise ValueError(f"{where} has no step {step}, only {list(steps)}.")
  print(text)
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


def _bytes_in(path: Any) -> int:
  # A file may just have been deleted.
  with contextlib.suppress(OSError):
    found = [path] if path.is_file() else files.files_in(path)
    return sum(file.stat().length for file in found)
  return 0


def _bytes_of(leaf: Any) -> int:
  dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
  return math.prod(leaf.shape) * dtype.itemsize


if __name__ == "__main__":
  raise SystemExit(main())
