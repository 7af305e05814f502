"""Turns a loss of NNX objects into a function of the parameters alone."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
from typing import Any, Self

from flax import nnx
import jax

from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.state import validation

PyTree = Any

# Tells the update contexts of nested transforms apart.
_TAG = "flaxshard.value_and_grad"


class PureLoss:
  """A loss of a module and other NNX objects, as a function of the parameters.

  It is a context manager. Inside of it the instance is called once or more
  with parameters, by a transformation such as `jax.value_and_grad`. Each call
  gives the loss new copies of the objects. `update_objects` then changes the
  objects of the caller as the loss changed the copies.

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
    leaves, self._args_treedef = jax.tree.flatten(
      (args, kwargs), is_leaf=_is_object
    )
    # Anything else is passed on as it is: the loss may branch on a flag.
    self._args_leaves = leaves
    self._objects = (model, *filter(_is_object, leaves))
    self._variables = nnx.state(model, wrt)
    self.params = nnx.as_pure(self._variables)
    self._stack = contextlib.ExitStack()

  def __enter__(self) -> Self:
    """Splits the objects into their structure and their arrays."""
    self._stack.enter_context(nnx.update_context(_TAG))
    with nnx.split_context(_TAG) as context:
      self._graphdef, self._state = context.split(self._objects)
    return self

  def __exit__(self, *exception: Any) -> None:
    """Drops the references to the objects."""
    self._stack.close()

  def __call__(self, params: PyTree) -> tuple[Any, tuple[Any, dict[int, Any]]]:
    """Calls the loss on copies of the objects.

    Args:
      params: A tree like `self.params`.

    Returns:
      `(loss, (aux, changed))`. `changed` has the arrays of the objects that the
      loss has changed; `update_objects` takes it.
    """
    new_params = jax.tree.leaves(params)
    state = dict(nnx.to_flat_state(self._state))
    # The model is the first of the objects.
    for path, variable in nnx.to_flat_state(
      self._with_arrays(self._variables, new_params)
    ):
      state[0, *path] = variable
    # What the loss leaves alone is the same object afterwards. It is no output,
    # so that a transformation neither copies nor carries it.
    outside = {id(x): x for x in jax.tree.leaves(self._state)}
    outside |= {
      id(new): old
      for new, old in zip(
        new_params, jax.tree.leaves(self._variables), strict=True
      )
    }
    with nnx.merge_context(_TAG, inner=True) as context:
      objects = context.merge(
        self._graphdef, nnx.from_flat_state(list(state.items()))
      )
    copies = iter(objects[1:])
    args, kwargs = jax.tree.unflatten(
      self._args_treedef,
      [next(copies) if _is_object(x) else x for x in self._args_leaves],
    )
    output = self._loss_fn(objects[0], *args, **kwargs)
    loss, aux = validation.split_loss(output, self._has_aux)
    aux_leaves, self._aux_treedef = jax.tree.flatten(aux, is_leaf=_is_object)
    self._aux_is_object = [_is_object(x) for x in aux_leaves]
    with nnx.split_context(_TAG) as context:
      self._graphdef_out, state_out = context.split(
        (*objects, *filter(_is_object, aux_leaves))
      )
    leaves, self._treedef_out = jax.tree.flatten(state_out)
    self._unchanged = {
      i: outside[id(x)] for i, x in enumerate(leaves) if id(x) in outside
    }
    changed = {i: x for i, x in enumerate(leaves) if i not in self._unchanged}
    arrays = [x for x in aux_leaves if not _is_object(x)]
    return loss, (arrays, changed)

  def update_objects(self, arrays: list[Any], changed: dict[int, Any]) -> Any:
    """Changes the caller's objects as the last call changed their copies.

    Args:
      arrays: The first part of the auxiliary output of the call.
      changed: The second part of it.

    Returns:
      The auxiliary output of the loss; None if it has none.
    """
    leaves = self._unchanged | changed
    state = jax.tree.unflatten(
      self._treedef_out, [leaves[i] for i in range(len(leaves))]
    )
    with nnx.merge_context(_TAG, inner=False) as context:
      objects = context.merge(self._graphdef_out, state)
    of_aux, others = iter(objects[len(self._objects) :]), iter(arrays)
    return jax.tree.unflatten(
      self._aux_treedef,
      [next(of_aux if x else others) for x in self._aux_is_object],
    )

  def gradients(self, grads: PyTree) -> PyTree:
    """Returns gradients as NNX does: a state of variables."""
    leaves = jax.tree.leaves(
      grads, is_leaf=lambda x: x is None or is_indexed_slices(x)
    )
    return self._with_arrays(self._variables, leaves)

  @staticmethod
  def _with_arrays(variables: PyTree, arrays: list[Any]) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(variables), arrays)


def _is_object(x: Any) -> bool:
  return isinstance(x, (nnx.Pytree, nnx.Variable))
