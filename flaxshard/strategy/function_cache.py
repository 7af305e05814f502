"""A cache with one entry for each function, which dies with the function."""

from __future__ import annotations

from collections.abc import Callable, Hashable
import types
from typing import Any, Generic, TypeVar
import weakref

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
