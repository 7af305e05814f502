"""Gradients and module arrays between `value_and_grad` and `update`."""

from __future__ import annotations

import dataclasses
from typing import Any
import weakref

import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.nnx import variables as variables_lib

PyTree = Any
Leaves = variables_lib.Leaves


@dataclasses.dataclass
class _Pending:
  """Gradients that are not applied yet.

  Attributes:
    model: The module, by a weak reference.
    before: The arrays of the module, but for the parameters, before the loss.
    after: The same after the loss.
  """

  model: weakref.ref[Any]
  before: Leaves
  after: Leaves


class Calls:
  """The parameters of an optimizer, and the calls made on its copies.

  It is a static attribute of the optimizer. The copies of the optimizer that
  `nnx.jit` makes share it, as do optimizers of the same parameters.

  Args:
    shapes: The shapes of the parameters by path, see `shapes_of`.
  """

  def __init__(self, shapes: dict[tuple[str, ...], tuple[int, ...]]):
    self._shapes = shapes
    # `nnx.jit` hashes and compares static attributes in every call.
    self._hash = hash(tuple(self._shapes.items()))
    self._differentiated = False
    self._warned = False
    self._pending: weakref.WeakKeyDictionary[Any, _Pending] = (
      weakref.WeakKeyDictionary()
    )

  def __hash__(self) -> int:
    """Hashes the parameters alone."""
    return self._hash

  def __eq__(self, other: Any) -> bool:
    """Compares the parameters alone: calls do not change a program."""
    return self is other or (
      isinstance(other, Calls) and self._shapes == other._shapes
    )

  def __reduce__(self) -> Any:
    # pickle cannot write weak references. A copy has made no calls.
    return Calls, (self._shapes,)

  def check_params(self, params: PyTree, wrt: Any) -> None:
    """Raises a ValueError if a module has other parameters."""
    given = shapes_of(params)
    if given == self._shapes:
      return
    advice = (
      f"which wrt={variables_lib.describe(wrt)} selected when the optimizer "
      "was created. Pass that module, or create an optimizer for this one."
    )
    for path in [*self._shapes, *given]:
      where = "/".join(path)
      if path not in given:
        raise ValueError(f"model has no parameter {where}, {advice}")
      if path not in self._shapes:
        raise ValueError(f"model has {where}, not one of those {advice}")
      shape, known = given[path], self._shapes[path]
      # `nnx.vmap` removes an axis, or adds one, on one of the two sides.
      size = min(len(shape), len(known))
      if shape[len(shape) - size :] != known[len(known) - size :]:
        raise ValueError(
          f"model has {where} of shape {shape}, not {known}, {advice}"
        )

  def note_gradients(
    self, optimizer: Any, model: Any, before: Leaves, after: Leaves
  ) -> None:
    """Notes that gradients were computed.

    Args:
      optimizer: The optimizer, or its copy in a trace.
      model: The module.
      before: Its arrays, but for the parameters, before the loss.
      after: The same after the loss.
    """
    self._differentiated = True
    earlier = self._pending.get(optimizer)
    # Gradients that are accumulated: the step began with the first of them.
    if earlier is not None and earlier.model() is model:
      if _same(earlier.after, before):
        before = earlier.before
    self._pending[optimizer] = _Pending(weakref.ref(model), before, after)

  def note_unscaled(self) -> None:
    """Notes that gradients were unscaled by hand."""
    self._differentiated = True

  def take_changes(
    self, optimizer: Any, model: Any, current: Leaves
  ) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns the arrays that the loss has changed, and their new values.

    Args:
      optimizer: The optimizer, or its copy in a trace.
      model: The module.
      current: Its arrays, but for the parameters.

    Returns:
      Old and new arrays by name; None if the gradients were not computed by
      this copy of the optimizer, so that the old arrays are not known.
    """
    pending = self._pending.pop(optimizer, None)
    if pending is None or pending.model() is not model:
      return None
    changed = {
      key: (jnp.asarray(pending.before[key]), jnp.asarray(x))
      for key, x in current.items()
      if key in pending.before and pending.before[key] is not x
    }
    # A value of another shape, such as one more sown value, has no old one.
    changed = {
      key: pair
      for key, pair in changed.items()
      if pair[0].shape == pair[1].shape and pair[0].dtype == pair[1].dtype
    }
    return (
      {variables_lib.name_of(key): old for key, (old, _) in changed.items()},
      {variables_lib.name_of(key): new for key, (_, new) in changed.items()},
    )

  def check_differentiated(self) -> None:
    """Raises a ValueError if nothing has computed gradients."""
    if not self._differentiated:
      raise ValueError(
        "update: grads are not from optimizer.value_and_grad: nnx.grad and "
        "jax.grad go around the wrappers, which have scaled no loss. Write "
        "loss, grads = optimizer.value_and_grad(loss_fn)(model, batch); or use "
        "optimizer.scale_loss and optimizer.unscale_gradients."
      )

  def warn_of_changes(self) -> None:
    """Warns once that changes of the module cannot be held back."""
    if not self._warned:
      self._warned = True
      checks.warn(
        "update: a skipped step would keep what the loss changed in the "
        "module, such as batch statistics, because value_and_grad was not "
        "called on this module and optimizer in the same function. Call "
        "value_and_grad and update in one function."
      )


def shapes_of(params: PyTree) -> dict[tuple[str, ...], tuple[int, ...]]:
  """Returns the shapes of parameters, by path."""
  return {
    path: tuple(np.shape(x)) for path, x in trees.leaves_by_path(params).items()
  }


def _same(a: Leaves, b: Leaves) -> bool:
  return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
