"""The views of a run: who is a member, in one sequence that all agree on.

A view is written once, under its number. On a file system it is a directory
that is renamed: this fails if there is one with a file in it. So no lock is
needed, which a process could hold while it is stopped, and a disk that is full
leaves nothing behind. In a bucket it is an object that is written if it is
missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import contextlib
import dataclasses
import errno
import json
import os
import shutil
from typing import Any
import uuid

from flaxshard.core import conditional_objects
from flaxshard.core import files

# Views that are kept; only the last one matters.
_KEEP = 100

_PREFIX = "epoch-"
_FILE = "view.json"


@dataclasses.dataclass(frozen=True)
class Member:
  """A worker that takes part.

  Attributes:
    worker_id: Index of the worker, from 0.
    address: `"host:port"` where the others reach it.
    incarnation: A name that no other start of this or another worker has. Only
      those who can read the directory of the views know it.
    process: A name of its process on its machine, "" if there is none.
  """

  worker_id: int
  address: str
  incarnation: str
  process: str = ""


@dataclasses.dataclass(frozen=True)
class View:
  """The members of a run from one change to the next.

  Attributes:
    epoch: The number of the view, from 1.
    members: The members by ascending index.
    started: Whether the run has begun.
    reason: What has changed, for the log.
  """

  epoch: int
  members: tuple[Member, ...]
  started: bool = False
  reason: str = ""

  @property
  def worker_ids(self) -> tuple[int, ...]:
    """The indices of the members, ascending."""
    return tuple(member.worker_id for member in self.members)

  def member(self, worker_id: int) -> Member | None:
    """Returns the member with an index, None if there is none."""
    for member in self.members:
      if member.worker_id == worker_id:
        return member
    return None

  def member_of(self, incarnation: str) -> Member | None:
    """Returns the member with an incarnation, None if there is none."""
    for member in self.members:
      if member.incarnation == incarnation:
        return member
    return None

  def next(
    self,
    members: Iterable[Member],
    reason: str,
    started: bool | None = None,
  ) -> View:
    """Returns the view that may follow.

    Args:
      members: Its members, in any order.
      reason: What has changed.
      started: Whether the run has begun; None: as in this view.
    """
    return View(
      self.epoch + 1,
      tuple(sorted(members, key=lambda member: member.worker_id)),
      self.started if started is None else started,
      reason,
    )

  def to_fields(self) -> dict[str, Any]:
    """Returns values for JSON and msgpack."""
    return dataclasses.asdict(self)

  @classmethod
  def from_fields(cls, fields: Mapping[str, Any]) -> View:
    """Undoes `to_fields`."""
    members = tuple(Member(**member) for member in fields["members"])
    return cls(**{**fields, "members": members})


class ViewLog:
  """The views of a run, in a directory that all workers can reach.

  Each view is stored as `epoch-N` if there is none with this number. So of two
  programs that propose a view with the same number one succeeds, and both know
  which.

  Args:
    directory: Path of the directory, on a file system or in a bucket.
  """

  def __init__(self, directory: str):
    self.directory = files.absolute(directory)

  def latest(self) -> View | None:
    """Returns the view with the highest number, None if there is none.

    Raises:
      OSError: The directory cannot be read.
    """
    epochs: list[int] = []
    for _ in range(10):
      epochs = self._epochs()
      if not epochs:
        return None
      view = self._read(epochs[-1])
      if view is not None:
        return view
      # It was removed since, because there are so many newer ones.
    raise OSError(f"{self._path(epochs[-1])} is empty")

  def propose(self, view: View) -> View:
    """Stores a view, unless there is one with its number or a higher one.

    Args:
      view: The view.

    Returns:
      The latest view: `view` if it was stored.

    Raises:
      OSError: The directory cannot be written.
    """
    if files.is_bucket(self.directory):
      self._write_object(view)
    else:
      self._write_directory(view)
    # A number may be free because its view was removed long ago: what counts
    # is the highest one.
    latest = self.latest()
    if latest is None:
      raise OSError(f"{self.directory}: the views were removed")
    if latest == view:
      self._remove_old(view.epoch)
    return latest

  def _write_directory(self, view: View) -> None:
    temporary = os.path.join(self.directory, f"tmp-{uuid.uuid4().hex}")
    os.makedirs(temporary)
    try:
      path = os.path.join(temporary, _FILE)
      with files.add_filename_to_oserror(path), open(path, "wb") as f:
        f.write(_encode(view))
        f.flush()
        # Otherwise a loss of power may leave an empty file under the new name.
        os.fsync(f.fileno())
      try:
        os.rename(temporary, self._path(view.epoch))
      except OSError as e:
        # After a lost answer of a server, it is there under the new name.
        is_taken = e.errno in (errno.ENOTEMPTY, errno.EEXIST)
        if not is_taken and self._read(view.epoch) != view:
          raise
    finally:
      shutil.rmtree(temporary, ignore_errors=True)

  def _write_object(self, view: View) -> None:
    store = conditional_objects.open_object(self._path(view.epoch))
    found = conditional_objects.read(store)
    if found.state == "missing":
      content = _encode(view)
      conditional_objects.write(
        store, content, found.stamp.generation, lambda value: value == content
      )

  def _epochs(self) -> list[int]:
    try:
      names = files.list_names(self.directory)
    except FileNotFoundError:
      return []
    numbers = [
      name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)
    ]
    return sorted(int(number) for number in numbers if number.isdecimal())

  def _read(self, epoch: int) -> View | None:
    path = self._path(epoch)
    try:
      if files.is_bucket(path):
        content = files.read_bytes(path)
      else:
        content = files.read_bytes(os.path.join(path, _FILE))
    except FileNotFoundError:
      return None
    try:
      return View.from_fields(json.loads(content))
    except (ValueError, TypeError, KeyError) as e:
      raise OSError(
        f"{path} is damaged: {e}. Remove the directory {self.directory!r} if "
        "no worker is running."
      ) from e

  def _remove_old(self, epoch: int) -> None:
    for old in self._epochs():
      if old <= epoch - _KEEP:
        with contextlib.suppress(OSError):
          if files.is_bucket(self.directory):
            files.remove(self._path(old))
          else:
            shutil.rmtree(self._path(old))

  def _path(self, epoch: int) -> str:
    return f"{self.directory}/{_PREFIX}{epoch:08d}"


def _encode(view: View) -> bytes:
  return json.dumps(view.to_fields()).encode()
