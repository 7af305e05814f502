"""Questions to several workers at once."""

from __future__ import annotations

from collections.abc import Iterable
import threading
import time
from typing import Any

from flaxshard.workers.view_log import Member

# Others are given so many seconds after the first answer.
_AFTER_FIRST_SECONDS = 0.2


def ask_all(
  transport: Any,
  members: Iterable[Member],
  question: dict[str, Any],
  timeout: float,
  *,
  until_first: bool = False,
) -> dict[Member, dict[str, Any]]:
  """Asks several workers, and waits for their answers.

  Args:
    transport: Has the method `ask`.
    members: The workers.
    question: The question, without its receiver.
    timeout: Seconds to wait.
    until_first: Whether one answer is enough.

  Returns:
    The answers of those that have answered as the incarnation that was asked.
  """
  members = list(members)
  changed = threading.Condition()
  answers: dict[Member, dict[str, Any] | None] = {}

  def record(member: Member, answer: dict[str, Any] | None) -> None:
    with changed:
      answers[member] = answer
      changed.notify_all()

  for member in members:
    transport.ask(
      member.address,
      {**question, "to": member.incarnation},
      timeout,
      lambda answer, member=member: record(member, answer),
    )
  end = time.monotonic() + timeout + 1.0
  with changed:
    while len(answers) < len(members) and time.monotonic() < end:
      changed.wait(end - time.monotonic())
      if until_first and any(map(_is_own, answers, answers.values())):
        end = min(end, time.monotonic() + _AFTER_FIRST_SECONDS)
    return {
      m: answer
      for m, answer in answers.items()
      if answer is not None and _is_own(m, answer)
    }


def _is_own(member: Member, answer: dict[str, Any] | None) -> bool:
  return answer is not None and answer["incarnation"] == member.incarnation
