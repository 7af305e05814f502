"""Prints what a directory of checkpoints holds.

  python -m flaxshard.checkpoint /tmp/digits/checkpoints
  python -m flaxshard.checkpoint /tmp/digits --step 1200 --verify

Lists the steps of a directory of checkpoints or a workdir, and shows one step:
its versions, wrappers, position in the data and arrays. By default it is the
newest that is not damaged; a path of one step shows that. Changes nothing,
reads no arrays, and uses only the CPU. A step is
damaged if a file is missing or has another size, or if it was copied or renamed
from another step. `--verify` also reads and compares all files, except in a
bucket. Another program may save in the directory at the same time. The exit
status is 1 if a step is damaged, and 2 if there is nothing to show. See
https://flaxshard.github.io/flaxshard/guides/checkpoints.html.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import itertools
import json
import sys
from typing import Any

import jax

from flaxshard.checkpoint import reader
from flaxshard.checkpoint import step_files
from flaxshard.checkpoint import steps
from flaxshard.core import multihost


def examine(step_dir: Any, contents: bool) -> tuple[str, str | None] | None:
  """Returns the condition of a step in words, and what it holds as text.

  Args:
    step_dir: Path of the directory of the step.
    contents: Whether to read all files; otherwise only sizes are compared.

  Returns:
    The second is None for a step that cannot be restored. All is None if
    another program has deleted the step meanwhile.
  """
  try:
    has_digests = step_files.verify(step_dir, contents=contents)
    text = describe(step_dir)
  except Exception as e:  # of Orbax
    damage = steps.find_damage(step_dir, e)
    if not step_dir.exists():
      return None
    if damage is not None:
      return f"damaged: {damage}", None
    return f"not restorable: {multihost.summarize_error(e)}", None
  if not has_digests:
    return "complete, without digests", text
  return "complete, verified" if contents else "complete", text


def describe(step_dir: Any) -> str:
  """Returns the versions, wrappers, position and arrays of a step as text.

  Args:
    step_dir: Path of the directory of the step.

  Raises:
    ValueError: The step cannot be read.
  """
  lines = [str(step_dir)]
  metadata = step_files.check(step_dir)
  if metadata is None:
    lines.append("  not written by flaxshard")
  for key, value in (metadata or {}).items():
    lines.append(f"  {key}: {json.dumps(value)}")
  position = step_dir / step_files.POSITION / step_files.JSON
  if position.exists():
    text = json.dumps(step_files.read_json(position))
    lines.append(f"  {step_files.POSITION}: {text}")
  leaves = reader.open_unverified(step_dir).values()
  for item, group in itertools.groupby(leaves, lambda leaf: leaf.tree):
    tree = {"/".join(x.key): x for x in group}
    lines.append(f"{item}: {len(tree)} arrays")
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
  parser.add_argument("directory", metavar="DIR", help="its steps are listed")
  parser.add_argument("--step", type=int, help="shown, in place of the newest")
  parser.add_argument(
    "--verify", action="store_true", help="compares all files"
  )
  args = parser.parse_args(argv)
  # A training run may be using the accelerator.
  jax.config.update("jax_platforms", "cpu")
  try:
    return _show(args.directory, args.step, args.verify)
  except (OSError, ValueError) as e:
    print(f"error: {e}", file=sys.stderr)
    return 2


def _show(directory: str, step: int | None, verify: bool) -> int:
  where = steps.as_path(directory)
  if step is None and (step := steps.number_of(where)) is not None:
    where = where.parent
  where = steps.directory_of_steps(where)
  found: dict[int, tuple[str, str | None]] = {}
  # The program that saves may delete all of them, and save others.
  while not found and (paths := steps.find(where)):
    examined = {n: examine(path, verify) for n, path in paths.items()}
    found = {n: result for n, result in examined.items() if result is not None}
  if not found:
    raise steps.no_steps(where)
  if step is not None and step not in found:
    raise ValueError(f"{where} has no step {step}, only {list(found)}.")
  print(where)
  for number, (condition, _) in found.items():
    print(f"  {number:>8}  {condition}")
  whole = {number: text for number, (_, text) in found.items() if text}
  shown = max(whole, default=None) if step is None else step
  if shown in whole:
    print(f"\n{whole[shown]}")
  return 1 if len(whole) < len(found) else 0


if __name__ == "__main__":
  raise SystemExit(main())
