"""Maps the parameters in a file to those of a model, by their paths."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import math
import re
from typing import Any

import numpy as np

from flaxshard.core import checks
from flaxshard.core import patterns as patterns_lib

# What a file of a whole training state has beside the model's variables.
TRAINING_STATE = (
  "step",
  "opt_state",
  "wrapper_states",
  "dynamic_scale",
  "rngs",
)
# The array in an nnx.Variable or a nn.Partitioned that was saved as an object.
_BOX = "/value"
# A run with LoRA has the parameters that it does not train in `frozen`.
_PARAMS = re.compile("^(params|frozen)/")
# Number of paths that a message lists.
_LISTED = 10


@dataclasses.dataclass(frozen=True)
class Patterns:
  """Which parameters of a file are used, and for which of a model.

  The arguments of `init_from` explain them.
  """

  rename: Sequence[tuple[str, str]] = ()
  keep: Sequence[str] = ()
  ignore: Sequence[str] = ()
  transpose: Sequence[tuple[str, Sequence[int]]] = ()
  reshape: Sequence[str] = ()
  cast: bool = False

  def __post_init__(self) -> None:
    for name in ("keep", "ignore", "reshape"):
      patterns_lib.check(name, getattr(self, name))
    for name in ("rename", "transpose"):
      patterns_lib.check_pairs(name, getattr(self, name))
    checks.one_of("cast", self.cast, (True, False))


@dataclasses.dataclass(frozen=True)
class Source:
  """The leaf of a file that a leaf of the model gets.

  Attributes:
    path: Its path in the file.
    axes: The order of its dimensions in the model; None leaves them.
    reshape: Whether it then gets the shape of the leaf of the model.
  """

  path: str
  axes: tuple[int, ...] | None = None
  reshape: bool = False


def match(
  saved: Mapping[str, Any],
  wanted: Mapping[str, Any],
  patterns: Patterns,
  *,
  collections: Collection[str] = (),
  optional: Collection[str] = (),
) -> dict[str, Source]:
  """Finds the leaf of a file for each leaf of a model.

  Args:
    saved: The file's leaves, by path. If they are those of a train state or of
      all variables of a model, paths begin with the name of the collection.
    wanted: The model's leaves. Paths of parameters begin with no name of a
      collection.
    patterns: Which leaves to use.
    collections: Names of the model's collections other than `params`.
    optional: Paths in `wanted` that may keep their initial values.

  Returns:
    The sources by the paths of the model. Other leaves keep their values.

  Raises:
    ValueError: A leaf has no counterpart, in the file or in the model, and no
      pattern that says so; shapes or dtypes differ; or a pattern matches
      nothing. The message lists the paths.
  """
  by_name = _names_of(saved)
  has_collections = any(path.startswith("params/") for path in saved)
  ignored = _select("ignore", patterns.ignore, by_name, "the file")
  by_name = {n: path for n, path in by_name.items() if n not in ignored}
  by_name = _rename(by_name, patterns.rename)
  kept = _select("keep", patterns.keep, wanted, "the model")
  sources: dict[str, str] = {}
  missing, unmatched = {}, {n: saved[path] for n, path in by_name.items()}
  for path in wanted:
    name = path.removesuffix(_BOX)
    collection, _, rest = name.partition("/")
    if collection in collections and not has_collections:
      # A file of an NNX module has all its variables in one tree.
      name = name if name in by_name else rest
    unmatched.pop(name, None)
    if path not in kept and name in by_name:
      sources[path] = by_name[name]
    elif path not in kept and path not in optional:
      missing[path] = wanted[path]
  if missing or unmatched:
    raise ValueError(
      f"the file lacks {_list(missing)} of the model, and the model lacks "
      f"{_list(unmatched)} of the file. `rename` and `ignore` are patterns for "
      "the paths of the file, `keep` for those of the model."
    )
  if not sources:
    raise ValueError("keep matches all parameters of the model: none is read.")
  _select("reshape", patterns.reshape, sources, "the model")
  by_axes = [pattern for pattern, _ in patterns.transpose]
  _select("transpose", by_axes, sources, "the model")
  return {
    path: _source(path, source, saved[source], wanted[path], patterns)
    for path, source in sources.items()
  }


def _names_of(saved: Mapping[str, Any]) -> dict[str, str]:
  """Returns the paths of a model's leaves in a file, by the names to match."""
  if not any(path.startswith("params/") for path in saved):
    return {path.removesuffix(_BOX): path for path in saved}
  return {
    _PARAMS.sub("", path).removesuffix(_BOX): path
    for path, leaf in saved.items()
    # Programs save numbers of their own beside the state, such as an epoch.
    if path.partition("/")[0] not in TRAINING_STATE
    and not (leaf.is_number and "/" not in path)
  }


def _select(
  field: str, patterns: Sequence[str], paths: Collection[str], where: str
) -> set[str]:
  """Returns the paths in which a pattern is found."""
  selected: set[str] = set()
  for i, pattern in enumerate(patterns):
    place = f"{field}[{i}]={pattern!r}"
    selected.update(patterns_lib.find(place, pattern, where, list(paths)))
  return selected


def _rename(
  paths: Mapping[str, str], renames: Sequence[tuple[str, str]]
) -> dict[str, str]:
  """Returns the values of `paths` by their renamed keys."""
  renamed = {name: name for name in paths}
  for i, (pattern, text) in enumerate(renames):
    place = f"rename[{i}]={(pattern, text)!r}"
    patterns_lib.find(place, pattern, "the file", list(renamed.values()))
    renamed = {k: re.sub(pattern, text, new) for k, new in renamed.items()}
  first: dict[str, str] = {}
  for name, new in renamed.items():
    if first.setdefault(new, name) != name:
      raise ValueError(
        f"rename makes {first[new]!r} and {name!r} of the file the same path "
        f"{new!r}."
      )
  return {new: paths[name] for new, name in first.items()}


def _source(
  path: str, source: str, have: Any, want: Any, patterns: Patterns
) -> Source:
  """Returns how a leaf becomes that of the model.

  Raises:
    ValueError: The shape or the dtype does not fit.
  """
  shape, axes = tuple(have.shape), None
  # The first pattern counts.
  first = patterns_lib.first_match([p for p, _ in patterns.transpose], path)
  if first is not None:
    axes = tuple(patterns.transpose[first][1])
    if len(axes) != len(shape) or {*axes} != {*range(len(shape))}:
      raise ValueError(
        f"transpose[{first}]={patterns.transpose[first]!r} must have the axes "
        f"of {path}, which has the shape {shape} in the file."
      )
    shape = tuple(shape[axis] for axis in axes)
  reshape = (
    patterns_lib.first_match(patterns.reshape, path) is not None
    # With as many dimensions, they would be in another order.
    and len(shape) != len(want.shape)
    and math.prod(shape) == math.prod(want.shape)
  )
  if shape != tuple(want.shape) and not reshape:
    raise ValueError(
      f"{path} has the shape {shape} in the file, and {tuple(want.shape)} in "
      "the model. `keep` keeps its initial value; `transpose` and `reshape` "
      "change the array."
    )
  if not (patterns.cast or np.can_cast(have.dtype, want.dtype)):
    raise ValueError(
      f"{path} is {have.dtype} in the file, and {want.dtype} in the model, "
      "which cannot hold all its values; cast=True rounds them."
    )
  return Source(source, axes, reshape)


def listed(texts: Sequence[str]) -> str:
  """Returns the first texts, separated by commas."""
  more = [f"and {len(texts) - _LISTED} more"] if len(texts) > _LISTED else []
  return ", ".join([*texts[:_LISTED], *more])


def _list(leaves: Mapping[str, Any]) -> str:
  """Returns a number of arrays, and the first of them with their shapes."""
  texts = [f"{path} {tuple(leaf.shape)}" for path, leaf in leaves.items()]
  return f"{len(texts)} arrays ({listed(texts)})" if texts else "no arrays"
