"""The position of a data iterator, saved and restored with a checkpoint.

    input_iterator/process_0-of-1.json   one position for all processes
                   process_2-of-4.json   the position of process 2 of 4

A position is global if it means the same place of the data in every process,
such as the number of a global batch. Process 0 saves it, and any number of
processes restore it. Other positions belong to their process: each process
saves its own, and as many processes restore them.

The names and the content of the files are those of Grain's checkpoint handler,
which can read the position of its own process.
"""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

import jax

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import steps
from flaxshard.core import multihost

_FILE = re.compile(r"process_(\d+)-of-(\d+)\.json")


class Positioned(Protocol):
  """An iterator with a position: Grain's, or a `DistributedIterator`.

  A position is bytes or a value for JSON. If the iterator has a method
  `start_prefetch`, it is called after `set_state` to begin reading ahead.

  If the iterator has an attribute `position_is_global` that is True, its
  position is the same in all processes, and does not depend on their number:
  any number of processes can restore it.
  """

  def get_state(self) -> Any:
    """Returns the position."""
    ...

  def set_state(self, state: Any) -> None:
    """Continues from a position."""
    ...


def files(data: Positioned) -> dict[str, bytes]:
  """Returns the files to save, by their name in a step.

  All processes must call it, and get the same.

  Raises:
    TypeError: The position is neither bytes nor a value for JSON.
    ValueError: The position is said to be global, and processes differ.
  """
  # An error in the middle of a save would make Orbax hang at the exit.
  with multihost.raise_on_all_processes(TypeError, ValueError):
    state = data.get_state()
    is_bytes = isinstance(state, bytes)
    # Indented as by Grain.
    text = state if is_bytes else json.dumps(state, indent=4).encode()
  texts = multihost.exchange(text.decode("latin-1"))
  if _is_global(data):
    for process, other in enumerate(texts):
      if other != texts[0]:
        shown = ["".join(t.split())[:200] for t in (texts[0], other)]
        raise ValueError(
          "data.position_is_global is True, but the positions differ: "
          f"process 0 is at {shown[0]}, process {process} is at {shown[1]}."
        )
    texts = texts[:1]
  return {
    f"{steps.POSITION}/{_file_name(i, len(texts))}": text.encode("latin-1")
    for i, text in enumerate(texts)
  }


def read(data: Positioned, step_dir: Any) -> Any:
  """Returns the position in a step, for `data.set_state`.

  Args:
    data: The iterator; it is not changed.
    step_dir: Path of the directory of the step.

  Raises:
    Damaged: A file is missing, or is not JSON, and the position of this
      iterator is.
    ValueError: The step has no position, or that of another number of
      processes, or a file cannot be read by this process.
  """
  item_dir = steps.as_path(step_dir) / steps.POSITION
  if not item_dir.is_dir():
    raise ValueError(
      f"{step_dir} has no {steps.POSITION}: the position of the data."
    )
  matches = [_FILE.fullmatch(path.name) for path in item_dir.iterdir()]
  # Without any file, that of a single process is missing.
  saved = max((int(match[2]) for match in matches if match), default=1)
  parts = range(saved) if _is_global(data) else [jax.process_index()]
  if saved != jax.process_count() and not _is_global(data):
    raise ValueError(
      f"{item_dir} has the positions of {saved} processes, and this program "
      f"has {jax.process_count()}: only an iterator with position_is_global = "
      "True can restore them."
    )
  texts = {digests.read_bytes(item_dir / _file_name(i, saved)) for i in parts}
  if len(texts) > 1:
    raise ValueError(
      f"{item_dir} has different positions of {saved} processes, and an "
      "iterator with position_is_global = True has one for all."
    )
  text = texts.pop()
  try:
    return text if isinstance(data.get_state(), bytes) else json.loads(text)
  except ValueError as e:
    raise digests.Damaged(
      f"{item_dir}/ has a position that is not JSON: {e}."
    ) from e


def _is_global(data: Positioned) -> bool:
  return bool(getattr(data, "position_is_global", False))


def _file_name(process: int, count: int) -> str:
  return f"process_{process}-of-{count}.json"
