"""Maps the parameters in a file to those of a model, by their paths."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
import re
from typing import Any, TypeVar

from flaxshard.checkpoint import reader
from flaxshard.checkpoint.reader import Path
from flaxshard.core import checks
from flaxshard.core import patterns as patterns_lib

_T = TypeVar("_T")

# What a file of a whole training state has beside the model's variables.
_TRAINING_STATE = (
  "step",
  "opt_state",
  reader.WRAPPER_STATES,
  "dynamic_scale",
  "rngs",
)
# A run with LoRA has the parameters that it does not train in `frozen`.
_PARAMS = (("params",), ("frozen",))


def match(
  saved: Mapping[Path, reader.SavedLeaf],
  wanted: Mapping[str, Any],
  *,
  rename: Sequence[tuple[str, str]],
  keep: Sequence[str],
  ignore: Sequence[str],
  collections: Collection[str] = (),
  optional: Collection[str] = (),
) -> dict[str, Path]:
  """Finds the leaf of a file for each leaf of a model.

  Args:
    saved: The file's leaves, by path.
    wanted: The model's leaves, by name; see `by_name`.
    rename: As for `init_from`, like the next two.
    keep: Patterns of names of the model.
    ignore: Patterns of names of the file.
    collections: Names of the model's collections other than `params`.
    optional: Names in `wanted` that may keep their initial values.

  Returns:
    The paths in the file by the names of the model. Other leaves keep their
    values.

  Raises:
    ValueError: A leaf has no counterpart, in the file or in the model, and no
      pattern that says so; or a pattern matches nothing. The message lists the
      paths.
  """
  has_collections = _has_collections(saved)
  found = by_name(
    {
      path: path
      for path, leaf in saved.items()
      if not has_collections or _is_variable(path, leaf)
    }
  )
  for name in select("ignore", ignore, found, "the file"):
    del found[name]
  found = _rename(found, rename)
  kept = select("keep", keep, wanted, "the model")
  sources: dict[str, Path] = {}
  missing, unmatched = {}, {name: saved[path] for name, path in found.items()}
  for name, leaf in wanted.items():
    collection, _, rest = name.partition("/")
    there = name
    if collection in collections and not has_collections and name not in found:
      there = rest  # a file of an NNX module has all its variables in one tree
    unmatched.pop(there, None)
    if name not in kept and there in found:
      sources[name] = found[there]
    elif name not in kept and name not in optional:
      missing[name] = leaf
  if missing or unmatched:
    raise ValueError(
      f"the file lacks {_list(missing)} of the model, and the model lacks "
      f"{_list(unmatched)} of the file. `rename` and `ignore` are patterns for "
      "the paths of the file, `keep` for those of the model."
    )
  if not sources:
    raise ValueError("keep matches all parameters of the model: none is read.")
  return sources


def by_name(leaves: Mapping[Path, _T]) -> dict[str, _T]:
  """Returns leaves by the names that a model and a file are compared by.

  Args:
    leaves: The leaves by path: of a tree of parameters, or of collections, one
      of which is `params`.

  Returns:
    The leaves in the same order. Names of parameters begin with no collection.

  Example:
    >>> by_name({("params", "w", "value"): 1, ("batch_stats", "mean"): 2})
    {'w': 1, 'batch_stats/mean': 2}
  """
  has_collections = _has_collections(leaves)
  named = {}
  for path, leaf in leaves.items():
    is_param = has_collections and path[:1] in _PARAMS
    named["/".join(reader.unboxed(path[int(is_param) :]))] = leaf
  return named


def _has_collections(paths: Iterable[Path]) -> bool:
  return any(path[:1] == ("params",) and len(path) > 1 for path in paths)


def _is_variable(path: Path, leaf: reader.SavedLeaf) -> bool:
  """Returns whether a leaf of a training state is a variable of the model."""
  # Programs save numbers of their own beside the state, such as an epoch.
  is_number = len(path) == 1 and leaf.is_number
  return path[0] not in _TRAINING_STATE and not is_number


def select(
  field: str, patterns: Sequence[str], paths: Collection[str], where: str
) -> set[str]:
  """Returns the paths in which a pattern is found; each must be in some."""
  return {
    path
    for i, pattern in enumerate(patterns)
    for path in patterns_lib.find(
      f"{field}[{i}]={pattern!r}", pattern, where, list(paths)
    )
  }


def _rename(
  paths: Mapping[str, Path], renames: Sequence[tuple[str, str]]
) -> dict[str, Path]:
  """Returns the paths of a file by their renamed names."""
  for i, (pattern, text) in enumerate(renames):
    where = f"rename[{i}]={(pattern, text)!r}"
    patterns_lib.find(where, pattern, "the file", list(paths))
    renamed: dict[str, Path] = {}
    for name, path in paths.items():
      new = re.sub(pattern, text, name)
      if new in renamed:
        raise ValueError(
          f"{where} makes {'/'.join(renamed[new])!r} and {'/'.join(path)!r} of "
          f"the file the same path {new!r}."
        )
      renamed[new] = path
    paths = renamed
  return dict(paths)


def _list(leaves: Mapping[str, Any]) -> str:
  """Returns a number of arrays, and the first of them with their shapes."""
  texts = [f"{path} {tuple(leaf.shape)}" for path, leaf in leaves.items()]
  return (
    f"{len(texts)} arrays ({checks.listed(texts)})" if texts else "no arrays"
  )
