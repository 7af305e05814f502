"""The findings of `fs.check`."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses

# Paths that a sentence names before it counts the others.
_MAX_LISTED = 3

KINDS = (
  "replicated parameter",
  "replicated slot",
  "misplaced slot",
  "changed state",
  "donation",
  "repeated work",
  "gathered parameter",
  "activations",
  "rematerialization",
  "float32",
  "collective in loop",
)


@dataclasses.dataclass(frozen=True)
class Finding:
  """One likely mistake in a compiled step.

  Attributes:
    kind: One of `flaxshard.analysis.findings.KINDS`.
    message: What was found and what to do about it.
    paths: Paths of the arrays of the state that it concerns, such as
      `params/Dense_0/kernel`; empty if it concerns none.
    source: The user's line, such as `model.py:12`, or "".
    nbytes: Bytes on each device that the mistake costs: of memory, or, for a
      collective, of its results in one call of the step.
  """

  kind: str
  message: str
  paths: tuple[str, ...] = ()
  source: str = ""
  nbytes: int = 0

  def __str__(self) -> str:
    where = f"{self.source}: " if self.source else ""
    return f"{where}{self.kind}: {self.message}"


@dataclasses.dataclass(frozen=True)
class Findings:
  """All findings of a step, the most expensive first.

  `str()` has a line for each. A result without findings is false.

  Attributes:
    findings: The findings.
    notes: Sentences on what could not be checked.
  """

  findings: tuple[Finding, ...]
  notes: tuple[str, ...] = ()

  def __iter__(self) -> Iterator[Finding]:
    return iter(self.findings)

  def __len__(self) -> int:
    return len(self.findings)

  def __getitem__(self, index: int) -> Finding:
    return self.findings[index]

  def __str__(self) -> str:
    lines = [f"{i}. {x}" for i, x in enumerate(self.findings, 1)]
    return "\n".join([*(lines or ["no findings"]), *self.notes])


def list_paths(paths: tuple[str, ...] | list[str]) -> str:
  """Returns some paths as text: `a, b, c and 4 more`."""
  text = ", ".join(paths[:_MAX_LISTED])
  more = len(paths) - _MAX_LISTED
  return f"{text} and {more} more" if more > 0 else text
