"""A cache with one entry for each function, and a count of equal functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable
import functools
import numbers
import types
from typing import Any, Generic, NamedTuple, TypeVar
import weakref

import jax
import numpy as np

T = TypeVar("T")


class FunctionCache(Generic[T]):
  """Values by function and options, dropped when the function is collected.

  `jax.jit` keeps compiled programs in the same way: a function that was run
  once, and the arrays that it captured, are not kept alive. The values must not
  refer to the function.

  Equal callables share an entry, which dies with the first of them. A bound
  method is a new object at each access, so its entry dies with the object that
  it is bound to. An object that allows no weak references, which `jax.jit` does
  not accept, is kept alive.

  Args:
    create: Makes the value for some options.

  Example:
    >>> cache = FunctionCache(lambda size: [0] * size)
    >>> def f(): ...
    >>> cache.get(f, 2) is cache.get(f, 2), len(cache)
    (True, 1)
    >>> del f
    >>> len(cache)
    0
  """

  def __init__(self, create: Callable[..., T]):
    self._create = create
    self._by_function: weakref.WeakKeyDictionary[Any, dict[Hashable, T]] = (
      weakref.WeakKeyDictionary()
    )
    self._by_method: dict[tuple[int, Any], dict[Hashable, T]] = {}
    self._kept_alive: dict[Any, dict[Hashable, T]] = {}

  def __len__(self) -> int:
    """Returns the number of functions with an entry."""
    caches = self._by_function, self._by_method, self._kept_alive
    return sum(map(len, caches))

  def get(self, fn: Callable[..., Any], *options: Hashable) -> T:
    """Returns the value for a function and options; creates it once."""
    if isinstance(fn, types.MethodType):
      entries = self._entries_of_method(fn)
    else:
      entries = self._entries_of_callable(fn)
    if options not in entries:
      entries[options] = self._create(*options)
    return entries[options]

  def _entries_of_callable(self, fn: Any) -> dict[Hashable, T]:
    try:
      return self._by_function.setdefault(fn, {})
    except TypeError:  # a class with __slots__
      return self._kept_alive.setdefault(fn, {})

  def _entries_of_method(self, fn: types.MethodType) -> dict[Hashable, T]:
    # By identity, as bound methods compare: the object may not be hashable.
    key = id(fn.__self__), fn.__func__
    if key not in self._by_method:
      self._by_method[key] = {}
      # The number of a dead object may be given to a new one.
      finalizer = weakref.finalize(fn.__self__, self._by_method.pop, key, None)
      finalizer.atexit = False
    return self._by_method[key]


class OneTimeFunctions:
  """Counts functions that die after one call, as a lambda in a loop does.

  Functions count as one if they have the same code and capture the same
  objects, or other numbers and arrays. A function that is called again starts
  the count anew for those that were called before it: they belong to an earlier
  training, which defined its functions for itself.

  Example:
    >>> functions = OneTimeFunctions()
    >>> [functions.add(lambda x: x + i) for i in range(3)]
    [1, 2, 3]
  """

  def __init__(self) -> None:
    # By code and captured objects.
    self._counts: weakref.WeakKeyDictionary[
      types.CodeType, dict[Hashable, _Count]
    ] = weakref.WeakKeyDictionary()
    self._first_calls = 0

  def add(self, fn: Callable[..., Any]) -> int:
    """Counts the first call of a function.

    Returns:
      The number of functions like it, this one included. It is 0 if the one
      before is still alive, and for a callable without code.
    """
    inner = inner_function(fn)
    if inner is None:
      return 0
    counts = self._counts.setdefault(inner.__code__, {})
    captured = _identify_captured(fn)
    before = counts.get(captured)
    if before is not None and before.last() is not None:
      return 0
    number = 1 if before is None else before.number + 1
    self._first_calls += 1
    counts[captured] = _Count(number, weakref.ref(fn), self._first_calls)
    return number

  def remove(self, fn: Callable[..., Any]) -> None:
    """Forgets `fn` and those called before it, because it is called again."""
    inner = inner_function(fn)
    if inner is None:
      return
    again = self._counts.get(inner.__code__, {}).get(_identify_captured(fn))
    if again is None:
      return
    for counts in self._counts.values():
      for captured, count in list(counts.items()):
        if count.first_call <= again.first_call:
          del counts[captured]


class _Count(NamedTuple):
  """A count of functions that are alike.

  Attributes:
    number: How many there were.
    last: The last one.
    first_call: The place of its first call among those of all functions.
  """

  number: int
  last: weakref.ref[Any]
  first_call: int


def inner_function(fn: Any) -> types.FunctionType | None:
  """Returns the Python function in a `functools.partial`, or `fn` itself."""
  while isinstance(fn, functools.partial):
    fn = fn.func
  return fn if isinstance(fn, types.FunctionType) else None


def _identify_captured(fn: Any) -> tuple[Hashable, ...]:
  """Returns a key for each object that a function captures."""
  captured: list[Any] = []
  while isinstance(fn, functools.partial):
    captured += [*fn.args, *fn.keywords.values()]
    fn = fn.func
  captured += fn.__defaults__ or ()
  captured += (fn.__kwdefaults__ or {}).values()
  for cell in fn.__closure__ or ():
    try:
      captured.append(cell.cell_contents)
    except ValueError:  # a variable that is not assigned yet
      captured.append(None)
  values = numbers.Number, np.ndarray, jax.Array
  # The objects themselves would be kept alive.
  return tuple("value" if isinstance(x, values) else id(x) for x in captured)
