"""Turns a loss of NNX objects into a function of the parameters alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx
import jax

from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.state import validation

PyTree = Any


class PureLoss:
  """A loss of a module and other NNX objects, as a function of the parameters.

  The instance is called once or more with parameters, by a transformation such
  as `jax.value_and_grad`. Each call gives the loss new copies of the objects.
  `update_objects` then changes the objects of the caller as the loss changed
  the copies.

  Args:
    loss_fn: The loss, `loss_fn(model, *args, **kwargs)`.
    model: The module.
    wrt: The filter that selects the parameters.
    args: Further arguments; they may contain NNX objects.
    kwargs: Keyword arguments, likewise.
    has_aux: Whether the loss returns `(loss, aux)`.

  Attributes:
    params: The parameters of the module, a tree of arrays.
  """

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    model: Any,
    wrt: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_aux: bool,
  ):
    self._loss_fn = loss_fn
    self._has_aux = has_aux
    # Anything else is passed on as it is: the loss may branch on a flag.
    self._leaves, self._treedef = jax.tree.flatten(
      (args, kwargs), is_leaf=_is_object
    )
    # Split together: objects may share variables, such as random streams.
    self._objects = (model, *filter(_is_object, self._leaves))
    self._graphdef, state = nnx.split(self._objects)
    self._state = dict(nnx.to_flat_state(state))
    self._variables = nnx.state(model, wrt)
    self.params = nnx.as_pure(self._variables)

  def __call__(self, params: PyTree) -> tuple[Any, tuple[Any, nnx.State]]:
    """Calls the loss on copies of the objects.

    Args:
      params: A tree like `self.params`.

    Returns:
      `(loss, (aux, changed))`. `changed` has the variables of the objects that
      the loss has changed or made; `update_objects` takes it.
    """
    given = _with_arrays(self._variables, jax.tree.leaves(params))
    # The model is the first of the objects.
    state = self._state | {
      (0, *path): variable for path, variable in nnx.to_flat_state(given)
    }
    objects = nnx.merge(
      self._graphdef, nnx.from_flat_state(list(state.items())), copy=True
    )
    copies = iter(objects[1:])
    args, kwargs = jax.tree.unflatten(
      self._treedef,
      [next(copies) if _is_object(x) else x for x in self._leaves],
    )
    output = self._loss_fn(objects[0], *args, **kwargs)
    loss, aux = validation.split_loss(output, self._has_aux)
    # What the loss leaves alone is no output, so that a transformation neither
    # copies nor carries it.
    changed = [
      (path, variable)
      for path, variable in nnx.to_flat_state(nnx.state(objects))
      if path not in state or not _is_same(variable, state[path])
    ]
    return loss, (aux, nnx.from_flat_state(changed))

  def update_objects(self, changed: nnx.State) -> None:
    """Changes the caller's objects as a call has changed their copies."""
    nnx.update(self._objects, changed)

  def gradients(self, grads: PyTree) -> PyTree:
    """Returns gradients as NNX does: a state of variables."""
    leaves = jax.tree.leaves(
      grads, is_leaf=lambda x: x is None or is_indexed_slices(x)
    )
    return _with_arrays(self._variables, leaves)


def _with_arrays(variables: PyTree, arrays: list[Any]) -> PyTree:
  return jax.tree.unflatten(jax.tree.structure(variables), arrays)


def _is_same(a: Any, b: Any) -> bool:
  old, new = jax.tree.leaves(a), jax.tree.leaves(b)
  return len(old) == len(new) and all(map(lambda x, y: x is y, old, new))


def _is_object(x: Any) -> bool:
  return isinstance(x, (nnx.Pytree, nnx.Variable))
