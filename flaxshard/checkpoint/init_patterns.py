"""Patterns that select and rename the parameters of a file."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import re

from flaxshard.core import checks
from flaxshard.core import patterns as patterns_lib


@dataclasses.dataclass(frozen=True)
class Patterns:
  """Which parameters of a file are used, and for which of a model.

  Patterns are regular expressions, searched in paths such as
  `encoder/Dense_0/kernel`. The paths of collections other than `params` begin
  with the name of the collection: `batch_stats/BatchNorm_0/mean`.

  Attributes:
    rename: `(pattern, replacement)` pairs. Each is applied with `re.sub` to the
      paths of the file, in this order.
    keep: Patterns of the model's paths that keep their initial values.
    ignore: Patterns of the file's paths, before `rename`, that are not used.
    transpose: `(pattern, axes)` pairs: the order in which a model has the
      dimensions of arrays of the file, by the model's path. The first match
      counts.
    reshape: Patterns of the model's paths whose arrays get the shape that they
      have in the model, after `transpose`.
    cast: Whether to cast to dtypes that cannot hold all values of the file's.
  """

  rename: Sequence[tuple[str, str]] = ()
  keep: Sequence[str] = ()
  ignore: Sequence[str] = ()
  transpose: Sequence[tuple[str, Sequence[int]]] = ()
  reshape: Sequence[str] = ()
  cast: bool = False

  def __post_init__(self) -> None:
    patterns_lib.check("keep", self.keep)
    patterns_lib.check("ignore", self.ignore)
    patterns_lib.check("reshape", self.reshape)
    pairs = patterns_lib.check_pairs("rename", self.rename)
    for i, (pattern, text) in enumerate(pairs):
      try:
        re.sub(pattern, text, "")
      except (re.error, IndexError, TypeError) as e:
        raise ValueError(f"rename[{i}]={(pattern, text)!r}: {e}.") from e
    pairs = patterns_lib.check_pairs("transpose", self.transpose)
    for i, (_, axes) in enumerate(pairs):
      if not isinstance(axes, (tuple, list)) or not all(
        axes.count(axis) == 1 for axis in range(len(axes))
      ):
        raise ValueError(
          f"transpose[{i}] must have the axes in another order, such as "
          f"(1, 0), got {axes!r}."
        )
    checks.boolean("cast", self.cast)
