"""Extra arguments of an optimizer's update, such as the `value` of the loss."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
import contextlib
import functools
import inspect
from typing import Any

from flaxshard.core import checks

# Extra arguments that optax documents: the loss, its gradients, its function.
# An optimizer that takes extra arguments ignores those that it does not use, so
# that one step suits many optimizers.
_OBJECTIVE = frozenset(("value", "grad", "value_fn"))


def objective_of(tx: Any) -> frozenset[str]:
  """Returns which of `value`, `grad` and `value_fn` an optimizer uses.

  Example:
    >>> import optax
    >>> sorted(objective_of(optax.polyak_sgd()))
    ['value']
    >>> sorted(objective_of(optax.adam(0.1)))
    []
  """
  return _OBJECTIVE & _extra_arguments(tx)[0]


def check(
  tx: Any,
  names: Iterable[str],
  replaceable: Iterable[str] = (),
  reserved: Collection[str] = (),
) -> None:
  """Raises a TypeError if a name is no argument of an optimizer's update.

  `optax.chain` takes any name, and leaves out those that nothing uses.

  Args:
    tx: The optax optimizer.
    names: The names that are given.
    replaceable: Fields of the state that may be given too, for the message.
    reserved: Fields that may not.
  """
  accepted = _extra_arguments(tx)[1] if names else None
  for name in names:
    if name in reserved or (accepted is not None and name not in accepted):
      allowed = sorted({*replaceable, *(accepted or ())})
      field = " no field that can be replaced, and" if replaceable else ""
      raise TypeError(
        f"{name!r} is{field} no argument of the optimizer; allowed: "
        f"{', '.join(allowed) or 'none'}.{checks.did_you_mean(name, allowed)}"
      )


def _extra_arguments(tx: Any) -> tuple[set[str], set[str] | None]:
  """Returns the extra arguments that an optimizer uses, and all it accepts.

  The second is None if it accepts any: a custom optimizer with `**kwargs`.
  """
  used: set[str] = set()
  # Packages with functions that take any name.
  packages: set[str] = set()
  # `optax.chain` takes any name and passes it on, so look at the functions that
  # it closes over.
  seen: set[int] = set()
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
      for p in inspect.signature(x).parameters.values():
        if p.kind is p.KEYWORD_ONLY:
          used.add(p.name)
        elif p.kind is p.VAR_KEYWORD:
          packages.add((x.__module__ or "").partition(".")[0])
      # Not inspect.getclosurevars: it fails where a variable has no value.
      for cell in x.__closure__ or ():
        with contextlib.suppress(ValueError):
          pending.append(cell.cell_contents)
  # This package's optimizers are those of optax.
  if not packages <= {"optax", "flaxshard"}:
    return used, None
  return used, used | _OBJECTIVE if packages else used
