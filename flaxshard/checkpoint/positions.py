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
from flaxshard.core import checks
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


class Position:
  """The position of an iterator, read when this is created, and when restored.

  Args:
    data: The iterator. Its position is read at once: an error in the middle of
      a save would make Orbax hang when the process exits.

  Raises:
    TypeError: `data` has no `get_state` or no `set_state`, its position is
      neither bytes nor a value for JSON, or its `position_is_global` is not a
      boolean.
  """

  def __init__(self, data: Positioned):
    for method in ("get_state", "set_state"):
      if not callable(getattr(data, method, None)):
        raise TypeError(
          f"data must be an iterator with a position, got {data!r}, which has "
          f"no {method}. The iterators of Grain's datasets have it."
        )
    self._data = data
    self._is_global = checks.boolean(
      "data.position_is_global", getattr(data, "position_is_global", False)
    )
    state = data.get_state()
    self._is_bytes = isinstance(state, bytes)
    try:
      self._text = state if self._is_bytes else _to_json(state)
    except (TypeError, ValueError) as e:
      raise TypeError(
        f"data.get_state() must return bytes or a value for JSON: {e}."
      ) from e

  def files(self) -> dict[str, bytes]:
    """Returns the files to save, by their name in a step.

    All processes must call it, and get the same.

    Raises:
      ValueError: The position is said to be global, and processes differ.
    """
    texts = multihost.exchange(self._text.decode("latin-1"))
    if self._is_global:
      for process, text in enumerate(texts):
        if text != texts[0]:
          shown = ["".join(t.split())[:200] for t in (texts[0], text)]
          raise ValueError(
            "data.position_is_global is True, but the positions differ: "
            f"process 0 is at {shown[0]}, process {process} is at {shown[1]}."
          )
      texts = texts[:1]
    return {
      f"{steps.POSITION}/{_file_name(i, len(texts))}": text.encode("latin-1")
      for i, text in enumerate(texts)
    }

  def read(self, step_dir: Any) -> None:
    """Reads the position in a step; `apply` sets the iterator to it.

    Args:
      step_dir: Path of the directory of the step.

    Raises:
      Damaged: A file is missing, or is not JSON, and the position of this
        iterator is.
      ValueError: The step has no position, or that of another number of
        processes, or a file cannot be read by this process.
    """
    text = self._read_text(steps.as_path(step_dir) / steps.POSITION)
    try:
      self._read = text if self._is_bytes else json.loads(text)
    except ValueError as e:
      raise digests.Damaged(
        f"{step_dir}/{steps.POSITION}/ has a position that is not JSON: {e}."
      ) from e

  def _read_text(self, item_dir: Any) -> bytes:
    if not item_dir.is_dir():
      raise ValueError(
        f"{item_dir.parent} has no {steps.POSITION}: the position of the data."
      )
    matches = [_FILE.fullmatch(path.name) for path in item_dir.iterdir()]
    # Without any file, that of a single process is missing.
    saved = max((int(match[2]) for match in matches if match), default=1)
    count, name = jax.process_count(), type(self._data).__name__
    if self._is_global:
      read = range(saved)
    elif saved == count:
      read = range(jax.process_index(), jax.process_index() + 1)
    else:
      raise ValueError(
        f"{item_dir} has the positions of {_processes(saved)}, and this "
        f"program has {_processes(count)}: each position of a {name} belongs "
        f"to one process. Restore it with {_processes(saved)}, or use an "
        "iterator with position_is_global = True."
      )
    texts = {digests.read_bytes(item_dir / _file_name(i, saved)) for i in read}
    if len(texts) > 1:
      raise ValueError(
        f"{item_dir} has different positions of {_processes(saved)}, and a "
        f"{name} with position_is_global = True has one for all."
      )
    return texts.pop()

  def apply(self) -> None:
    """Sets the iterator to the position that was read."""
    self._data.set_state(self._read)
    start_prefetch = getattr(self._data, "start_prefetch", None)
    if start_prefetch is not None:
      start_prefetch()


def _to_json(state: Any) -> bytes:
  return json.dumps(state, indent=4).encode()  # as Grain


def _file_name(process: int, count: int) -> str:
  return f"process_{process}-of-{count}.json"


def _processes(count: int) -> str:
  return f"{count} process" if count == 1 else f"{count} processes"
