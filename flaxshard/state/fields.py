"""Fields of train states, and subclasses with further fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import functools
import types
from typing import Any

from flax import struct
import jax.numpy as jnp

from flaxshard.core import opt_state as opt_state_lib
from flaxshard.wrappers import base
from flaxshard.wrappers import stack

# Array fields that are no variables of the model.
_TRAINING_FIELDS = ("step", "opt_state", "wrapper_states")


def fields_by_name(cls: Any) -> dict[str, dataclasses.Field[Any]]:
  """Returns the fields of a dataclass by name."""
  return {field.name: field for field in dataclasses.fields(cls)}


def is_array_field(field: dataclasses.Field[Any]) -> bool:
  """Returns whether a field of a Flax dataclass holds a pytree of arrays."""
  return field.metadata.get("pytree_node", True)


def array_fields(state: Any) -> dict[str, Any]:
  """Returns the pytrees of arrays of a state, by field name."""
  return {
    field.name: getattr(state, field.name)
    for field in dataclasses.fields(state)
    if is_array_field(field)
  }


def variables(state: Any) -> dict[str, Any]:
  """Returns `params` and the collections of a state, by field name."""
  return {
    name: tree
    for name, tree in array_fields(state).items()
    if name not in _TRAINING_FIELDS
  }


def collections(state: Any) -> dict[str, Any]:
  """Returns the variables of a state other than `params`, by field name."""
  return {k: v for k, v in variables(state).items() if k != "params"}


def computed(
  tx: Any,
  wrappers: tuple[base.Base, ...],
  given: Mapping[str, Any],
  num_replicas: int = 1,
) -> dict[str, Any]:
  """Returns the other fields of a state at step 0.

  Args:
    tx: The optax optimizer.
    wrappers: The wrappers.
    given: `params` and the collections, by field name.
    num_replicas: Length of the replica axis of the per-replica leaves.
  """
  params, step = given["params"], jnp.zeros((), jnp.int32)
  opt_state = opt_state_lib.init(tx, params)
  if not wrappers:
    return dict(step=step, opt_state=opt_state)
  others = {name: x for name, x in given.items() if name != "params"}
  return dict(
    step=step,
    opt_state=opt_state,
    wrapper_states=stack.init(wrappers, params, tx, others, num_replicas),
  )


def extend(cls: Any, names: Iterable[str]) -> Any:
  """Returns a subclass of a Flax dataclass with further array fields.

  Args:
    cls: The dataclass.
    names: Names of fields; those that `cls` has already are left out.

  Returns:
    The subclass; the same class for the same fields, because `jax.jit` compiles
    a function again for a pytree of another class. `cls` if nothing is missing.
  """
  missing = sorted(set(names) - set(fields_by_name(cls)))
  return _extend(cls, tuple(missing)) if missing else cls


@functools.cache
def _extend(cls: Any, names: tuple[str, ...]) -> Any:
  # kw_only: they follow fields with defaults in the user's subclass.
  fields = {name: struct.field(kw_only=True) for name in names}
  annotations = {name: "Any" for name in names}
  # The name, module and docstring of `cls`: users see the class they declared.
  # Subclassing a Flax dataclass makes the new class a dataclass too.
  return types.new_class(
    cls.__name__,
    (cls,),
    exec_body=lambda namespace: namespace.update(
      fields,
      __annotations__=annotations,
      _base_class=cls,  # for pickle, and for `TrainState.without_wrappers`
      __module__=cls.__module__,
      __doc__=cls.__doc__,
    ),
  )


def rebuild(cls: Any, given: Mapping[str, Any]) -> Any:
  """Returns an instance of `extend(cls, given)` with these field values.

  Pickle calls it: it could not find the class that `extend` returns by name.
  """
  return extend(cls, given)(**given)


def plain_state(state: Any) -> Any:
  """Returns a TrainState without its wrappers, as `without_wrappers` does."""
  kept = {
    name: getattr(state, name)
    for name in fields_by_name(type(state))
    if name not in ("wrappers", "wrapper_states")
  }
  return rebuild(state._base_class or type(state), kept)
