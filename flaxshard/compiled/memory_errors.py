"""The TPU compiler's message that a program needs too much memory."""

from __future__ import annotations

import dataclasses
import re

from flaxshard.compiled.buffers import Buffer

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)B?"
# libtpu 0.0.42 stops before it assigns memory, with the bytes that arguments
# and temporaries need at least. Messages after the assignment have a table.
_NEEDED = (
  re.compile(
    rf"memory required for HLO temporaries \({_SIZE}\) exceeds available HBM"
    rf" \({_SIZE}\)"
  ),
  re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)
_ALLOCATION = re.compile(
  rf"^ *\d+\. Size: {_SIZE}\s*$(.*?)^ *=====", re.MULTILINE | re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class MemoryShortage:
  """Facts of the compiler's error about a program that is too large.

  Attributes:
    needed: Bytes that a device needs at least.
    available: Bytes that a device has for programs.
    allocations: The largest allocations, if the message names them.
  """

  needed: int
  available: int
  allocations: tuple[Buffer, ...] = ()

  @property
  def excess(self) -> int:
    """Bytes that are missing."""
    return self.needed - self.available


def parse_memory_error(error: BaseException | str) -> MemoryShortage | None:
  """Reads the facts from the compiler's error.

  Args:
    error: What `jax.stages.Lowered.compile` raised, or its message.

  Returns:
    None if the error is about something else, or names no bytes.

  Example:
    >>> text = "RESOURCE_EXHAUSTED: ... Used 20.00G of 15.75G hbm. ..."
    >>> parse_memory_error(text).excess / 2**30
    4.25
  """
  message = str(error)
  if "RESOURCE_EXHAUSTED" not in message:
    return None
  for pattern in _NEEDED:
    if match := pattern.search(message):
      used, used_unit, limit, limit_unit = match.groups()
      return MemoryShortage(
        _bytes(used, used_unit),
        _bytes(limit, limit_unit),
        tuple(_allocation(m) for m in _ALLOCATION.finditer(message)),
      )
  return None


def _bytes(number: str, unit: str) -> int:
  return int(float(number) * _UNITS[unit])


def _allocation(match: re.Match[str]) -> Buffer:
  number, unit, rows = match.groups()

  def find(pattern: str) -> str:
    found = re.search(pattern, rows)
    return found[1] if found else ""

  file = find(r'source_file="([^"]*)"').rpartition("/")[2]
  line = find(r"source_line=(\d+)")
  is_temporary = "temp" in find(r"Allocation type: (.*)")
  return Buffer(
    nbytes=_bytes(number, unit),
    shape=find(r"Shape: ([^{\s]+)"),
    origin=find(r'op_name="([^"]*)"'),
    source=f"{file}:{line}" if file else "",
    kind="temporary" if is_temporary else "argument",
  )
