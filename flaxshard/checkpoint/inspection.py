"""What lies in a directory of checkpoints, as text.

  python -m flaxshard.checkpoint /tmp/digits/checkpoints
  python -m flaxshard.checkpoint /tmp/digits --step 1200 --verify

Lists the steps, and shows one: what wrote it, its wrappers, its arrays. Nothing
is changed, no array is read, and no device but the CPU is touched. A step with
missing files, or files of another size, is damaged; `--verify` reads them too.
The exit status is 1 if a step is damaged, 2 if there is nothing to show.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import functools
import json
import math
import os
import sys
from typing import Any

import jax

from flaxshard.checkpoint import damage
from flaxshard.checkpoint import digests
from flaxshard.checkpoint import metadata_item
from flaxshard.checkpoint import reader

_TOLD_APART = ("wrappers", "config")


def steps(directory: str | os.PathLike[str]) -> dict[int, str]:
  """Returns where the steps lie, in ascending order.

  Args:
    directory: Where the checkpoints lie.

  Raises:
    ValueError: There is no such directory, or no step in it.
  """
  where = os.fspath(directory)
  if not os.path.isdir(where):
    raise ValueError(f"there is no directory {where}.")
  found = reader.steps(where)
  if not found:
    raise ValueError(f"{where} has no checkpoints.")
  return {step: str(path) for step, path in found.items()}


def status(
  step_dir: str | os.PathLike[str], contents: bool = False
) -> tuple[str, bool]:
  """Returns what is known of a step, and whether it is damaged.

  Args:
    step_dir: The directory of the step.
    contents: Whether to read all files, and not only their sizes.
  """
  try:
    if digests.verify(step_dir, contents=contents):
      return ("complete, verified" if contents else "complete"), False
    # Without digests, what can be told is whether there is a train state.
    where = os.fspath(step_dir)
    damage.read(where, lambda: reader.plain(reader.as_path(where)))
    return "complete, without digests", False
  except digests.Damaged as e:
    return f"damaged: {e}", True


def overview(
  directory: str | os.PathLike[str], contents: bool = False
) -> tuple[str, list[int]]:
  """Returns a line for each step, and the steps that are damaged.

  Args:
    directory: Where the checkpoints lie.
    contents: Whether to read all files, and not only their sizes.

  Raises:
    ValueError: There is no such directory, or no step in it.
  """
  where = os.fspath(directory)
  lines, damaged = [where], []
  there = steps(where)
  for step, step_dir in there.items():
    told, bad = status(step_dir, contents)
    lines.append(f"  {step:>8}  {_size(_bytes_in(step_dir)):>9}  {told}")
    damaged += [step] * bad
  rest = sorted(
    name
    for name in os.listdir(where)
    if os.path.isdir(path := os.path.join(where, name))
    and path not in there.values()
  )
  if rest:
    lines.append(f"  not counted: {', '.join(rest)}")
  return "\n".join(lines), damaged


def describe(step_dir: str | os.PathLike[str]) -> str:
  """Returns what a step holds: what wrote it, its wrappers, its arrays.

  Args:
    step_dir: The directory of the step.

  Raises:
    ValueError: It cannot be read.
  """
  where = os.fspath(step_dir)
  lines = [where]
  metadata = metadata_item.read_metadata(where)
  if metadata is None:
    lines.append("  not written by flaxshard, or by one without digests")
  else:
    for key, value in metadata.items():
      if key not in _TOLD_APART and value is not None:
        lines.append(f"  {key}: {_plain(value)}")
    for wrapper in metadata.get("wrappers", ()):
      lines.append(f"  wrapper: {_wrapper(wrapper)}")
    for key, value in (metadata.get("config") or {}).items():
      lines.append(f"  config.{key}: {_plain(value)}")
  path = reader.as_path(where)
  plain = damage.read(where, lambda: reader.plain(path))
  trees = {plain.item: plain}
  for item, at in reader.items(path).items():
    if item not in trees:
      read_tree = functools.partial(reader.orbax_tree, at, item)
      trees[item] = damage.read(where, read_tree)
  for item, tree in trees.items():
    size = sum(_bytes_of(x) for x in tree.leaves.values())
    lines.append(f"{item}: {len(tree.leaves)} arrays, {_size(size)}")
    width = max((len("/".join(p)) for p in tree.leaves), default=0)
    for leaf_path, leaf in sorted(tree.leaves.items()):
      name = "/".join(leaf_path) or "<root>"
      shape = ",".join(map(str, leaf.shape))
      lines.append(f"  {name:<{width}}  {leaf.dtype}[{shape}]")
  return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
  """Prints it all; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m flaxshard.checkpoint",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "directory", metavar="DIR", help="checkpoints, or the workdir they are in"
  )
  parser.add_argument(
    "--step",
    type=int,
    help="the step to show; else the newest that is complete",
  )
  parser.add_argument(
    "--verify", action="store_true", help="read all files, and compare them"
  )
  args = parser.parse_args(argv)
  # A training run may have the accelerator.
  jax.config.update("jax_platforms", "cpu")
  try:
    return _show(args.directory, args.step, args.verify)
  except (OSError, ValueError) as e:
    print(f"error: {e}", file=sys.stderr)
    return 1 if isinstance(e, digests.Damaged) else 2


def _show(directory: str, step: int | None, verify: bool) -> int:
  below = os.path.join(directory, "checkpoints")
  if os.path.isdir(below):
    directory = below
  there = steps(directory)
  if step is not None and step not in there:
    raise ValueError(
      f"{directory} has no step {step}; there are {list(there)}."
    )
  text, damaged = overview(directory, verify)
  print(text)
  if step is None:
    step = max(set(there) - set(damaged), default=None)
  if step is not None and step not in damaged:
    print(f"\n{describe(there[step])}")
  return 1 if damaged else 0


def _wrapper(wrapper: Any) -> str:
  if isinstance(wrapper, str):  # one that no config can hold
    return wrapper
  name, arguments = wrapper
  return f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"


def _plain(value: Any) -> str:
  return value if isinstance(value, str) else json.dumps(value)


def _bytes_in(path: str) -> int:
  if os.path.isfile(path):
    return os.path.getsize(path)
  return sum(
    os.path.getsize(os.path.join(folder, name))
    for folder, _, names in os.walk(path)
    for name in names
  )


def _bytes_of(leaf: Any) -> int:
  return (
    math.prod(leaf.shape) * jax.dtypes.canonicalize_dtype(leaf.dtype).itemsize
  )


def _size(count: float) -> str:
  for unit in ("B", "kB", "MB", "GB"):
    if count < 1000 or unit == "GB":
      break
    count /= 1000
  return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
