"""`Finding` and `Findings`: the mistakes that `fs.check` reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses

from flaxshard.core import checks
from flaxshard.plans.step import Leaf
from flaxshard.plans.traffic import Collective

# Paths that a sentence names before it counts the others.
_MAX_LISTED = 3


@dataclasses.dataclass(frozen=True)
class Finding:
  """One likely mistake in a compiled step.

  Attributes:
    kind: "batch", "replicated state", "float32 gradients", "activations",
      "host callback", "donation", "changed state" or "large constant".
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


def of_arrays(
  kind: str, leaves: Sequence[Leaf], message: str
) -> Iterator[Finding]:
  """Yields one finding for all leaves, the largest first; none for none."""
  if not leaves:
    return
  ordered = sorted(leaves, key=lambda leaf: leaf.nbytes, reverse=True)
  paths = tuple(leaf.path for leaf in ordered)
  listed = checks.listed(paths, _MAX_LISTED)
  nbytes = sum(leaf.nbytes for leaf in ordered)
  yield Finding(kind, _with_size(listed, nbytes, message), paths, "", nbytes)


def of_lines(
  kind: str, moved: Sequence[Collective], message: str
) -> Iterator[Finding]:
  """Yields one finding for each of the user's lines."""
  lines: dict[str, list[Collective]] = {}
  for one in moved:
    lines.setdefault(one.source, []).append(one)
  for source, group in lines.items():
    kinds = " and ".join(sorted({one.kind for one in group}))
    axes = ", ".join(
      sorted({repr(axis) for one in group for axis in one.along})
    )
    nbytes = int(sum(x.executions * x.result_bytes for x in group))
    text = _with_size(f"{kinds} over {axes}", nbytes, message)
    if not source:
      text += f" (In {group[0].op_name or 'the program'}.)"
    yield Finding(kind, text, source=source, nbytes=nbytes)


def _with_size(what: str, nbytes: int, message: str) -> str:
  return f"{what} ({checks.format_bytes(nbytes)} on each device): {message}"
