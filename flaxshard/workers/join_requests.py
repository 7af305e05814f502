"""Questions between workers that cannot reach each other, as small files.

A worker that reaches no member of the latest view cannot know whether they are
dead, or cut off from it. So it leaves a request beside the views, and waits
whether a member answers.
"""

from __future__ import annotations

import contextlib
import json
import os

from flaxshard.core import files
from flaxshard.workers.view_log import Member

_REQUEST, _ANSWER = "request-", "answer-"


class JoinRequests:
  """Requests of workers that want to join, in the directory of the views.

  Args:
    directory: Path of the directory.
  """

  def __init__(self, directory: str):
    self._directory = directory
    self._answered: set[str] = set()

  def add(self, member: Member) -> None:
    """Asks the members whether any of them lives.

    Raises:
      OSError: The directory cannot be written.
    """
    files.make_dirs(self._directory)
    text = json.dumps([member.worker_id, member.address])
    with files.atomic_write(self._path(_REQUEST, member.incarnation)) as f:
      f.write(text)

  def is_answered(self, member: Member) -> bool:
    """Returns whether a member has answered, since `remove`."""
    return files.exists(self._path(_ANSWER, member.incarnation))

  def remove(self, member: Member) -> None:
    """Removes a request and its answer."""
    for prefix in (_REQUEST, _ANSWER):
      with contextlib.suppress(OSError):
        files.remove(self._path(prefix, member.incarnation))

  def answer_all(self) -> list[tuple[int, str]]:
    """Answers all requests.

    Returns:
      The indices and addresses of those that were answered for the first time.

    Raises:
      OSError: The directory cannot be read or written.
    """
    names = files.list_names(self._directory)
    answered = {x.removeprefix(_ANSWER) for x in names if x.startswith(_ANSWER)}
    new = []
    for name in names:
      incarnation = name.removeprefix(_REQUEST)
      if not name.startswith(_REQUEST) or incarnation in answered:
        continue
      if name.endswith(".tmp"):
        continue
      path = self._path(_ANSWER, incarnation)
      files.write_bytes(path, b"alive")
      if incarnation in self._answered:
        continue
      self._answered.add(incarnation)
      with contextlib.suppress(OSError, ValueError):
        content = files.read_bytes(self._path(_REQUEST, incarnation))
        worker_id, address = json.loads(content)
        new.append((worker_id, address))
    return new

  def _path(self, prefix: str, incarnation: str) -> str:
    return os.path.join(self._directory, f"{prefix}{incarnation}")
