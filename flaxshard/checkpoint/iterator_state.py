"""Saves and restores the position of a data iterator with a checkpoint.

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

import dataclasses
import json
import os
import re
from typing import Any, Protocol

import grain
import jax
import orbax.checkpoint as ocp

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import step_names
from flaxshard.core import checks
from flaxshard.core import multihost

ITEM = "input_iterator"

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

  Attributes:
    text: The position, as it is saved.
    is_global: Whether the position does not depend on the process.

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
    self.is_global = checks.boolean(
      "data.position_is_global", getattr(data, "position_is_global", False)
    )
    state = data.get_state()
    self._is_bytes = isinstance(state, bytes)
    try:
      self.text = (
        state if self._is_bytes else json.dumps(state, indent=4).encode()
      )
    except (TypeError, ValueError) as e:
      raise TypeError(
        f"data.get_state() must return bytes or a value for JSON: {e}."
      ) from e

  def check_same(self) -> None:
    """Raises unless a global position is the same in all processes.

    All processes must call it.

    Raises:
      ValueError: The position is said to be global, and processes differ.
    """
    own = self.text.decode("latin-1") if self.is_global else ""
    texts = multihost.exchange(own)
    shown = ["".join(text.split())[:200] for text in texts]
    for process, text in enumerate(texts):
      if text != texts[0]:
        raise ValueError(
          "data.position_is_global is True, but the positions differ: process "
          f"0 is at {shown[0]}, process {process} is at {shown[process]}."
        )

  def read(self, step_dir: str | os.PathLike[str]) -> None:
    """Reads the position in a step; `apply` sets the iterator to it.

    Args:
      step_dir: Path of the directory of the step.

    Raises:
      Damaged: A file is missing, or is not JSON, and the position of this
        iterator is.
      ValueError: The step has no position, or that of another number of
        processes, or a file cannot be read by this process.
    """
    item_dir = step_names.as_path(step_dir) / ITEM
    text = self._read_text(item_dir)
    try:
      self._read = text if self._is_bytes else json.loads(text)
    except ValueError as e:
      raise digests.Damaged(
        f"the saved position of the data is not JSON: {e}, in {item_dir}."
      ) from e

  def _read_text(self, item_dir: step_names.Directory) -> bytes:
    saved, count = _count_positions(item_dir), jax.process_count()
    name = type(self._data).__name__
    if not self.is_global:
      if saved != count:
        raise ValueError(
          f"{item_dir} has the positions of {_processes(saved)}, and this "
          f"program has {_processes(count)}: each position of a {name} belongs "
          f"to one process. Restore it with {_processes(saved)}, or use an "
          "iterator with position_is_global = True."
        )
      return _read_file(item_dir, jax.process_index(), count)
    texts = read_positions(item_dir)
    if len(set(texts)) > 1:
      raise ValueError(
        f"{item_dir} has different positions of {_processes(saved)}, and a "
        f"{name} with position_is_global = True has one for all."
      )
    return texts[0]

  def apply(self) -> None:
    """Sets the iterator to the position that was read."""
    self._data.set_state(self._read)
    start_prefetch = getattr(self._data, "start_prefetch", None)
    if start_prefetch is not None:
      start_prefetch()


def read_positions(item_dir: str | os.PathLike[str]) -> list[bytes]:
  """Returns the positions of a step, by process; only one if it is global.

  Args:
    item_dir: Path of the item `input_iterator`.

  Raises:
    Damaged: A file is missing or damaged.
    ValueError: The step has no position, or this process cannot read a file.
  """
  count = _count_positions(item_dir)
  return [_read_file(item_dir, process, count) for process in range(count)]


def _count_positions(item_dir: str | os.PathLike[str]) -> int:
  """Returns the number of processes whose positions were saved."""
  directory = step_names.as_path(item_dir)
  if not directory.is_dir():
    raise ValueError(
      f"{directory.parent} has no {ITEM}: the position of the data."
    )
  matches = [_FILE.fullmatch(path.name) for path in directory.iterdir()]
  # Without any file, that of a single process is missing.
  return max((int(match[2]) for match in matches if match), default=1)


def _read_file(
  item_dir: str | os.PathLike[str], process: int, count: int
) -> bytes:
  return digests.read_bytes(
    step_names.as_path(item_dir) / _file_name(process, count)
  )


class Handler(ocp.AsyncCheckpointHandler):
  """Orbax's handler of the item `input_iterator`.

  Unlike Grain's, it writes one file for a global position, and it writes in the
  background: if one process fails there, Orbax's others are told.
  """

  def __init__(self) -> None:
    # Orbax writes this into the step as the type of the item. A process without
    # flaxshard then restores the item with Grain's handler.
    self.typestr = grain.checkpoint.CheckpointHandler.typestr

  async def async_save(
    self, directory: Any, args: Save
  ) -> list[ocp.future.Future]:
    """Returns a future that writes the position.

    Args:
      directory: Path of the item, still with its temporary name.
      args: The position.
    """
    return [_Write(directory, args.position)]

  def save(self, directory: Any, args: Save) -> None:
    """Writes the position, in a synchronous save.

    Args:
      directory: Path of the item, still with its temporary name.
      args: The position.
    """
    _Write(directory, args.position).result()

  def restore(self, directory: Any, args: Any = None) -> list[bytes]:
    """Returns the saved positions.

    Args:
      directory: Path of the item.
      args: Not used.
    """
    del args
    return read_positions(directory)


@dataclasses.dataclass(frozen=True)
class _Write:
  """A future of Orbax that writes a position.

  Process 0 writes a global position, and each process another one.
  """

  directory: Any
  position: Position

  def result(self, timeout: float | None = None) -> None:
    """Writes the file.

    Args:
      timeout: Not used.
    """
    del timeout
    process, count = jax.process_index(), jax.process_count()
    if self.position.is_global:
      if process != 0:
        return
      count = 1
    path = self.directory / _file_name(process, count)
    path.write_bytes(self.position.text)

  def cancel(self) -> None:
    """Does nothing: the file is small."""


@ocp.args.register_with_handler(Handler, for_save=True)
@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):
  """Arguments of `Handler.save`.

  Attributes:
    position: The position to save.
  """

  position: Position


@ocp.args.register_with_handler(Handler, for_restore=True)
@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):
  """Arguments of `Handler.restore`; there are none."""


def _file_name(process: int, count: int) -> str:
  return f"process_{process}-of-{count}.json"


def _processes(count: int) -> str:
  return f"{count} process" if count == 1 else f"{count} processes"
