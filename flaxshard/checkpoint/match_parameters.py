"""Maps the parameters in a file to those of a model, by their paths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math
import re
from typing import Any

import jax.numpy as jnp

from flaxshard.checkpoint import reader
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


@dataclasses.dataclass(frozen=True)
class Match:
  """The result of `match`.

  Attributes:
    sources: By the paths of the model.
    kept: Paths of the model that keep their initial values.
    unused: Paths of the file that are not used.
  """

  sources: Mapping[str, Source]
  kept: tuple[str, ...]
  unused: tuple[str, ...]


def match(
  saved: Mapping[str, Any],
  wanted: Mapping[str, Any],
  patterns: Patterns,
  *,
  collections: Iterable[str] = (),
  optional: Iterable[str] = (),
) -> Match:
  """Finds the leaf of a file for each leaf of a model.

  Args:
    saved: Shapes and dtypes of the file's leaves, by path. If they are those of
      a train state or of all variables of a model, paths begin with the name of
      the collection.
    wanted: Shapes and dtypes of the model's leaves. Paths of parameters begin
      with no name of a collection.
    patterns: Which leaves to use.
    collections: Names of the model's collections other than `params`.
    optional: Paths in `wanted` that may keep their initial values.

  Raises:
    ValueError: A leaf has no counterpart, in the file or in the model, and no
      pattern that says so; shapes or dtypes differ; or a pattern matches
      nothing. The message lists the paths, with those that are near.
  """
  has_collections = any(path.startswith("params/") for path in saved)
  # The file's paths, as they are shown and matched.
  names = {
    path: _PARAMS.sub("", path) if has_collections else path
    for path, leaf in saved.items()
    if not (has_collections and _is_training_state(path, leaf))
  }
  ignored = _select("ignore", patterns.ignore, names.values(), "the file")
  by_name = _rename(
    {n: path for path, n in names.items() if n not in ignored}, patterns.rename
  )
  kept = _select("keep", patterns.keep, wanted, "the model")

  sources: dict[str, Source] = {}
  missing: list[str] = []
  counterparts: set[str] = set()
  for path in wanted:
    collection, _, rest = path.partition("/")
    candidates = [path]
    if collection in collections and not has_collections:
      # A file of an NNX module has all its variables in one tree.
      candidates.append(rest)
    candidates += [candidate + _BOX for candidate in candidates]
    candidates += [c.removesuffix(_BOX) for c in candidates[:2]]
    name = next((c for c in candidates if c in by_name), None)
    if name is not None:
      counterparts.add(by_name[name])
    if path in kept or (name is None and path in optional):
      continue
    if name is None:
      missing.append(path)
    else:
      sources[path] = Source(by_name[name])
  unmatched = {
    name: path for name, path in by_name.items() if path not in counterparts
  }
  if missing or unmatched:
    raise ValueError(_describe_unmatched(missing, unmatched, saved, wanted))
  if not sources:
    raise ValueError("keep matches all parameters of the model: none is read.")
  sources = _transpose(sources, saved, patterns.transpose)
  for path in _select("reshape", patterns.reshape, sources, "the model"):
    sources[path] = dataclasses.replace(sources[path], reshape=True)
  _check(sources, saved, wanted, patterns.cast)
  read = {source.path for source in sources.values()}
  return Match(
    sources,
    tuple(path for path in wanted if path not in sources),
    tuple(path for path in saved if path not in read),
  )


def _is_training_state(path: str, leaf: Any) -> bool:
  """Returns whether a leaf is that of a train state, beside the variables."""
  # Programs save numbers of their own beside the state, such as an epoch.
  is_number = isinstance(leaf, reader.SavedScalar) and "/" not in path
  return is_number or path.partition("/")[0] in TRAINING_STATE


def _select(
  field: str, patterns: Sequence[str], paths: Iterable[str], where: str
) -> set[str]:
  """Returns the paths in which a pattern is found."""
  paths = list(paths)
  selected: set[str] = set()
  for i, pattern in enumerate(patterns):
    selected.update(
      patterns_lib.find(f"{field}[{i}]={pattern!r}", pattern, where, paths)
    )
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
  result: dict[str, str] = {}
  first: dict[str, str] = {}
  for name, new in renamed.items():
    if new in result:
      raise ValueError(
        f"rename makes {first[new]!r} and {name!r} of the file the same path "
        f"{new!r}."
      )
    first[new] = name
    result[new] = paths[name]
  return result


def _transpose(
  sources: Mapping[str, Source],
  saved: Mapping[str, Any],
  transposes: Sequence[tuple[str, Sequence[int]]],
) -> dict[str, Source]:
  result = dict(sources)
  for i, (pattern, axes) in reversed(list(enumerate(transposes))):
    place = f"transpose[{i}]={(pattern, axes)!r}"
    for path in patterns_lib.find(place, pattern, "the model", list(sources)):
      shape = tuple(saved[sources[path].path].shape)
      if len(shape) != len(axes):
        raise ValueError(
          f"transpose[{i}]={(pattern, axes)!r} matches {path}, which has the "
          f"shape {shape} in the file."
        )
      result[path] = Source(sources[path].path, tuple(axes))
  return result


def _check(
  sources: Mapping[str, Source],
  saved: Mapping[str, Any],
  wanted: Mapping[str, Any],
  cast: bool,
) -> None:
  """Raises a ValueError if shapes or dtypes do not fit."""
  for path, source in sources.items():
    have, want = saved[source.path], wanted[path]
    shape = tuple(have.shape)
    if source.axes is not None:
      shape = tuple(shape[axis] for axis in source.axes)
    # With as many dimensions, they would be in another order.
    can_reshape = len(shape) != len(want.shape) and (
      math.prod(shape) == math.prod(want.shape)
    )
    if shape != tuple(want.shape) and not (source.reshape and can_reshape):
      raise ValueError(
        f"{path} has the shape {shape} in the file, and {tuple(want.shape)} in "
        f"the model. keep=({_pattern(path)!r},) keeps its initial value; "
        "transpose=((pattern, axes),) and reshape=(pattern,) change the array."
      )
    if not (cast or _holds(want.dtype, have.dtype)):
      raise ValueError(
        f"{path} is {have.dtype} in the file, and {want.dtype} in the model, "
        "which cannot hold all its values; cast=True rounds them."
      )


def _holds(dtype: Any, other: Any) -> bool:
  """Returns whether a dtype can hold all values of another one."""
  if all(jnp.issubdtype(d, jnp.floating) for d in (dtype, other)):
    # `promote_types` rejects floats of 8 bits.
    wide, narrow = jnp.finfo(dtype), jnp.finfo(other)
    return bool(
      wide.nmant >= narrow.nmant
      and wide.maxexp >= narrow.maxexp
      and wide.minexp <= narrow.minexp
    )
  return bool(jnp.promote_types(other, dtype) == dtype)


def _describe_unmatched(
  missing: Sequence[str],
  unmatched: Mapping[str, str],
  saved: Mapping[str, Any],
  wanted: Mapping[str, Any],
) -> str:
  """Returns a message about the leaves without a counterpart."""
  parts = []
  if missing:
    parts.append(
      f"the file lacks {len(missing)} of {len(wanted)} arrays of the model: "
      f"{_list({path: wanted[path] for path in missing})}. rename=((pattern, "
      f"replacement),) renames those of the file; "
      f"keep=({_pattern(missing[0])!r},) keeps initial values."
    )
  if unmatched:
    parts.append(
      f"The model lacks {len(unmatched)} of {len(saved)} arrays of the file: "
      f"{_list({name: saved[path] for name, path in unmatched.items()})}. "
      f"ignore=({_pattern(next(iter(unmatched)))!r},) leaves them out."
    )
  return " ".join(parts)


def _list(leaves: Mapping[str, Any]) -> str:
  """Returns the first paths with their shapes."""
  texts = [f"{path} {tuple(leaf.shape)}" for path, leaf in leaves.items()]
  more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
  return f"{', '.join(texts[:_LISTED])}{more}"


def _pattern(path: str) -> str:
  """Returns a pattern for the module of a path, for a message."""
  module = path.rpartition("/")[0]
  return f"^{module}/" if module else f"^{path}$"
