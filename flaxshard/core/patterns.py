"""Regular expressions that are searched in the paths of parameters.

The path of a parameter is a string such as `encoder/layer0/kernel`. A pattern
matches a path if `re.search` finds it anywhere in the path.
"""

from __future__ import annotations

from collections.abc import Sequence
import re
from typing import Any

from flaxshard.core import checks


class PatternError(ValueError):
  """A pattern that cannot be used; the message names the argument."""


def check(argument: str, patterns: Any) -> tuple[str, ...]:
  """Returns patterns as a tuple of strings.

  Args:
    argument: Name of the argument, for errors.
    patterns: A sequence of regular expressions.

  Raises:
    TypeError: `patterns` is not a sequence of strings.
    PatternError: A pattern is not a regular expression.

  Example:
    >>> check("patterns", ["^encoder/"])
    ('^encoder/',)
  """
  if isinstance(patterns, str) or not isinstance(patterns, Sequence):
    raise checks.ArgumentTypeError(
      f"{argument} must be a sequence of regular expressions such as "
      f"('^encoder/',), got {patterns!r}."
    )
  for i, pattern in enumerate(patterns):
    where = f"{argument}[{i}]"
    if not isinstance(pattern, str):
      raise checks.ArgumentTypeError(
        f"{where} must be a regular expression, got {pattern!r}."
      )
    try:
      re.compile(pattern)
    except re.error as e:
      raise PatternError(f"{where}: {pattern!r} is not a regex: {e}.") from e
  return tuple(patterns)


def check_pairs(
  argument: str,
  pairs: Any,
  expected: str = "pairs that begin with a pattern",
) -> tuple[tuple[str, Any], ...]:
  """Returns pairs of a pattern and another value as a tuple of tuples.

  Args:
    argument: Name of the argument, for errors.
    pairs: A sequence of pairs; the values are not checked.
    expected: Words for the pairs, for errors.

  Raises:
    TypeError: `pairs` is not a sequence of pairs.
    PatternError: A pattern is not a regular expression.
  """
  is_sequence = isinstance(pairs, Sequence) and not isinstance(pairs, str)
  if not is_sequence or not all(
    isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs
  ):
    raise checks.ArgumentTypeError(
      f"{argument} must be a sequence of {expected}, got {pairs!r}."
    )
  check(argument, [pattern for pattern, _ in pairs])
  return tuple((pattern, value) for pattern, value in pairs)


def first_match(patterns: Sequence[str], path: str) -> int | None:
  """Returns the position of the first pattern that matches a path, or None.

  Example:
    >>> first_match(("bias", "head"), "head/bias")
    0
  """
  return next(
    (i for i, pattern in enumerate(patterns) if re.search(pattern, path)), None
  )


def find(
  where: str, pattern: str, tree: str, paths: Sequence[str]
) -> list[str]:
  """Returns the paths that a pattern matches.

  Args:
    where: The pattern and its place, such as `"freeze[0]='encoder'"`.
    pattern: The pattern.
    tree: Name of the tree, for errors.
    paths: The paths of the tree.

  Raises:
    PatternError: The pattern matches none of them.
  """
  found = [path for path in paths if re.search(pattern, path)]
  if not found:
    raise no_match(where, pattern, tree, paths)
  return found


def no_match(
  where: str, pattern: str, tree: str, paths: Sequence[str]
) -> PatternError:
  """Returns the error of a pattern, or of a path, that no parameter has.

  Args:
    where: The pattern and its place, such as `"freeze[0]='encoder'"`.
    pattern: The pattern.
    tree: Name of the tree.
    paths: The paths of the tree.
  """
  # A pattern is often a part of a path: `kernel` or `Dense_0`.
  names = {name: None for path in paths for name in path.split("/")}
  # Without the anchors, which no path has.
  text = pattern.strip("^$/")
  hint = checks.did_you_mean(text, [*paths, *(names.keys() - {text})])
  return PatternError(
    f"{where} matches no parameter: the paths in {tree} are "
    f"{checks.listed(paths, 20)}.{hint}"
  )


def check_used(
  argument: str, patterns: Sequence[str], paths: Sequence[str]
) -> None:
  """Raises a PatternError unless each pattern is the first match of a path.

  Args:
    argument: Name of the argument, for errors.
    patterns: The patterns.
    paths: The paths of the parameters.
  """
  first = [first_match(patterns, path) for path in paths]
  for i, pattern in enumerate(patterns):
    if i not in first:
      where = f"{argument}[{i}]={pattern!r}"
      found = find(where, pattern, "params", paths)
      raise PatternError(
        f"{where} is never used: earlier patterns, such as "
        f"{argument}[{first[paths.index(found[0])]}], match all its parameters."
      )
