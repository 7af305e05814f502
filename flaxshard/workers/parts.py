"""Divides a commit by mean or sum into equal parts, one for each owner.

The arrays of a commit that are reduced and encoded alike are one vector, a
section. Every section is divided into equal ranges. A part is one range of
each section. So any owner can reduce its part without the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import numpy as np

from flaxshard.core import block_quantization
from flaxshard.state import host_commits
from flaxshard.workers import encoding

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Section:
  """Arrays of a commit that are reduced and encoded alike.

  Attributes:
    op: `"mean"`, `"sum"` or `"max"`.
    fmt: The format of its bytes; None: float32.
    shapes: The shapes of its arrays, by key.
    part_size: The number of its numbers in one part, with padding.
  """

  op: str
  fmt: str | None
  shapes: dict[str, tuple[int, ...]]
  part_size: int


@dataclasses.dataclass(frozen=True)
class Layout:
  """The division of the commits of some fragments into parts.

  Attributes:
    sections: The sections.
    num_parts: The number of parts.
  """

  sections: tuple[Section, ...]
  num_parts: int

  @classmethod
  def of(
    cls, state: PyTree, fragments: tuple[int, ...], num_parts: int
  ) -> Layout:
    """Returns the layout of commits by mean or sum.

    Args:
      state: A train state, or its shapes.
      fragments: The fragments of the commits.
      num_parts: The number of parts.
    """
    agn = host_commits.find(state.wrappers)
    assert agn is not None
    _, commit = jax.eval_shape(lambda s: host_commits.take(s, fragments), state)
    quantized = host_commits.quantized_keys(state, fragments)
    shapes: dict[tuple[str, str | None], dict[str, tuple[int, ...]]] = {}
    for key, op in host_commits.reductions(state, fragments).items():
      fmt = agn.commit_dtype if key in quantized else None
      shapes.setdefault((op, fmt), {})[key] = commit[key].shape
    sections = []
    for (op, fmt), of_section in sorted(shapes.items(), key=str):
      size = sum(int(np.prod(shape)) for shape in of_section.values())
      # Whole blocks, which have a scale each.
      block = block_quantization.BLOCK if fmt else 1
      part_size = -(-size // (num_parts * block)) * block
      sections.append(Section(op, fmt, of_section, part_size))
    return cls(tuple(sections), num_parts)

  @property
  def is_quantized(self) -> bool:
    """Whether encoding cuts something off."""
    return any(section.fmt for section in self.sections)

  def quantized(self, commit: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays of a commit that are sent in fewer bits."""
    keys = {key for s in self.sections if s.fmt for key in s.shapes}
    return {key: x for key, x in commit.items() if key in keys}

  @property
  def part_bytes(self) -> int:
    """The number of bytes of one part."""
    return sum(encoding.num_bytes(s.part_size, s.fmt) for s in self.sections)

  def to_vectors(self, commit: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns each section of a commit: `[num_parts, part_size]`, float32."""
    vectors = []
    for section in self.sections:
      vector = np.zeros(self.num_parts * section.part_size, np.float32)
      start = 0
      for key in section.shapes:
        x = np.asarray(commit[key], np.float32).ravel()
        vector[start : start + x.size] = x
        start += x.size
      vectors.append(vector.reshape(self.num_parts, section.part_size))
    return vectors

  def from_vectors(self, vectors: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Undoes `to_vectors`."""
    commit = {}
    for section, vector in zip(self.sections, vectors, strict=True):
      flat, start = vector.ravel(), 0
      for key, shape in section.shapes.items():
        size = int(np.prod(shape))
        commit[key] = flat[start : start + size].reshape(shape)
        start += size
    return commit

  def encode(self, part: list[np.ndarray]) -> tuple[bytes, list[np.ndarray]]:
    """Returns the bytes of a part, and the vectors that they decode to.

    Args:
      part: A vector `[part_size]` for each section.
    """
    encoded = [
      encoding.encode(vector, section.fmt)
      for section, vector in zip(self.sections, part, strict=True)
    ]
    return b"".join(data for data, _ in encoded), [x for _, x in encoded]

  def decode(self, data: encoding.Buffer) -> list[np.ndarray]:
    """Returns the vectors of a part: `[part_size]` for each section.

    Args:
      data: Its bytes.

    Raises:
      ValueError: There are more or fewer bytes.
    """
    if len(data) != self.part_bytes:
      raise ValueError(
        f"a part of a commit has {self.part_bytes} bytes, got {len(data)}."
      )
    view, start, part = memoryview(data), 0, []
    for section in self.sections:
      end = start + encoding.num_bytes(section.part_size, section.fmt)
      part.append(
        encoding.decode(view[start:end], section.part_size, section.fmt)
      )
      start = end
    return part

  def reduce(
    self, parts: list[encoding.Buffer]
  ) -> tuple[bytes, list[np.ndarray]]:
    """Reduces the same part of several commits.

    Args:
      parts: The bytes of the part in each commit, in the order of the workers.

    Returns:
      The bytes of the reduced part; and for each section what encoding has cut
      off, as the worker that keeps it must add it to its next commit: that one
      weighs `1 / len(parts)` in a mean.
    """
    # One commit at a time: all of them decoded could be many copies of a model.
    totals = [np.copy(x) for x in self.decode(parts[0])]
    for data in parts[1:]:
      for section, total, x in zip(
        self.sections, totals, self.decode(data), strict=True
      ):
        if section.op == "max":
          np.maximum(total, x, out=total)
        else:
          np.add(total, x, out=total)
    count = np.float32(len(parts))
    for section, total in zip(self.sections, totals, strict=True):
      if section.op == "mean":
        np.divide(total, count, out=total)
    data, decoded = self.encode(totals)
    remainders = [
      finite_difference(total, x) * (count if section.op == "mean" else 1)
      for section, total, x in zip(self.sections, totals, decoded, strict=True)
    ]
    return data, remainders


def finite_difference(x: np.ndarray, decoded: np.ndarray) -> np.ndarray:
  """Returns what encoding has cut off: zeros where a number is not finite.

  Otherwise all later commits would not be finite.
  """
  with np.errstate(invalid="ignore"):
    rest = x - decoded
  return np.where(np.isfinite(rest), rest, np.float32(0))
