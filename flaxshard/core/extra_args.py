"""Extra arguments of an optimizer's update, such as the `value` of the loss."""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import functools
import inspect
from typing import Any

# The names that optax documents. An optimizer that takes extra arguments
# ignores those that it does not use, so that one step suits many optimizers.
_STANDARD = frozenset(("value", "grad", "value_fn"))


def used(tx: Any) -> frozenset[str]:
  """Returns the names of the extra arguments that an optimizer uses.

  Keyword arguments of functions inside the optimizer may be among them.

  Example:
    >>> sorted(used(optax.polyak_sgd())), sorted(used(optax.adam(0.1)))
    (['value'], [])
  """
  names, _, _ = _inspect(tx)
  return names


def required(tx: Any) -> frozenset[str]:
  """Returns the names of the extra arguments that an optimizer must be given.

  Example:
    >>> sorted(required(optax.polyak_sgd())), sorted(required(optax.adam(0.1)))
    (['value'], [])
  """
  _, needed, _ = _inspect(tx)
  return needed


def accepted(tx: Any) -> frozenset[str] | None:
  """Returns the names of the extra arguments that an optimizer accepts.

  None if any name is accepted: that of a custom optimizer with `**kwargs`.
  """
  names, _, takes_any = _inspect(tx)
  if takes_any:
    return None
  parameters = inspect.signature(tx.update).parameters.values()
  if any(p.kind is p.VAR_KEYWORD for p in parameters):
    names |= _STANDARD
  return names


def _inspect(tx: Any) -> tuple[frozenset[str], frozenset[str], bool]:
  """Returns the names used, those needed, and whether any name is taken."""
  names: set[str] = set()
  needed: set[str] = set()
  takes_any = False
  seen: set[int] = set()
  # `optax.chain` takes any name and passes it on, so look at the functions that
  # it closes over.
  pending: list[Any] = [tx.update]
  while pending:
    x = pending.pop()
    if id(x) in seen:
      continue
    seen.add(id(x))
    if isinstance(x, (tuple, list)):
      pending += x
    elif isinstance(x, Mapping):
      pending += x.values()
    elif isinstance(x, functools.partial):
      pending.append(x.func)
    elif inspect.ismethod(x):
      # An object such as `optax.MultiSteps`, around another optimizer.
      pending += [x.__func__, *getattr(x.__self__, "__dict__", {}).values()]
    elif inspect.isfunction(x):
      parameters = inspect.signature(x).parameters
      # In optax an update has a `state`, its other functions have none.
      if not _is_optax(x) or "state" in parameters:
        names |= {
          name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY
        }
        # Other functions of an optimizer get theirs from its update.
        if "state" in parameters:
          needed |= {
            name
            for name, p in parameters.items()
            if p.kind is p.KEYWORD_ONLY and p.default is p.empty
          }
        takes_any |= not _is_optax(x) and any(
          p.kind is p.VAR_KEYWORD for p in parameters.values()
        )
      # Not inspect.getclosurevars: it fails where a variable has no value.
      for cell in x.__closure__ or ():
        with contextlib.suppress(ValueError):
          pending.append(cell.cell_contents)
  return frozenset(names), frozenset(needed), takes_any


def _is_optax(function: Any) -> bool:
  package = (function.__module__ or "").partition(".")[0]
  # This package's optimizers are those of optax.
  return package in ("optax", __name__.partition(".")[0])
