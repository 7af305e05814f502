"""Finds processes of a program that disagree, before they train."""

from __future__ import annotations

from collections.abc import Mapping
import json
import os
import socket
from typing import Any

from flaxshard.core import multihost

_MISSING = "(missing)"

# Characters of a value in a message.
_VALUE_LENGTH = 300


def check_agreement(facts: Mapping[str, Any], hint: str = "") -> None:
  """Raises in all processes if the facts of any two processes differ.

  All processes must call it. With one process it does nothing.

  Args:
    facts: A few facts by name, which must be equal in all processes. The values
      are made of dicts, lists, strings, numbers, bools and None.
    hint: A sentence for the message that says what to do.

  Raises:
    ValueError: Two processes disagree. The message has the first difference,
      with both values and processes.

  Example:
    >>> check_agreement({"seed": 0})
  """
  if multihost.process_count() == 1:
    return
  name = f"process {multihost.process_index()}"
  name = f"{name} (host {socket.gethostname()}, pid {os.getpid()})"
  texts = multihost.exchange(json.dumps([name, facts], sort_keys=True))
  # As JSON, which has lists for tuples.
  (name_0, facts_0), *others = map(json.loads, texts)
  for name_1, facts_1 in others:
    if facts_1 != facts_0:
      field, value_0, value_1 = _first_difference("", facts_0, facts_1)
      raise ValueError(
        f"the processes disagree on {field}: {_short(value_0)} in {name_0}, "
        f"{_short(value_1)} in {name_1}. {hint}".rstrip()
      )


def _first_difference(field: str, a: Any, b: Any) -> tuple[str, Any, Any]:
  """Returns the dotted path of the first difference, and its two values."""
  if isinstance(a, dict) and isinstance(b, dict):
    for key in {**a, **b}:
      x, y = a.get(key, _MISSING), b.get(key, _MISSING)
      if x != y:
        return _first_difference(f"{field}.{key}" if field else key, x, y)
  return field, a, b


def _short(value: Any) -> str:
  text = value if value == _MISSING else repr(value)
  return text if len(text) <= _VALUE_LENGTH else f"{text[:_VALUE_LENGTH]}..."
