"""Fields of train states: their names, classes, first values and shardings.

On the mesh of a strategy parameters and collections have given specs. Optimizer
slots have the specs of their parameters. Wrapper states have the specs that
their wrapper asks for. Everything else is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any, Protocol

from flax import struct
import jax
import jax.numpy as jnp

from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import rules as rules_lib
from flaxshard.replicas import values
from flaxshard.wrappers import base
from flaxshard.wrappers import stack

PyTree = Any

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


# -- Classes.


def build(cls: Any, values: Mapping[str, Any]) -> Any:
  """Returns an instance of a Flax dataclass, with further array fields.

  Pickle calls it: it could not find an extended class by its name.

  Args:
    cls: The dataclass.
    values: The values of the fields. Names that are no fields of `cls` become
      array fields of a subclass. It is the same class for the same names,
      because `jax.jit` compiles again for a pytree of another class.
  """
  missing = sorted(set(values) - set(fields_by_name(cls)))
  return (_extend(cls, tuple(missing)) if missing else cls)(**values)


@functools.cache
def _extend(cls: Any, names: tuple[str, ...]) -> Any:
  namespace = {
    # kw_only: they follow fields with defaults in the user's subclass.
    **{name: struct.field(kw_only=True) for name in names},
    "__annotations__": dict.fromkeys(names, "Any"),
    "_base_class": cls,  # for pickle, and for `TrainState.without_wrappers`
    # Users see the class that they declared.
    "__module__": cls.__module__,
    "__doc__": cls.__doc__,
  }
  # Subclassing a Flax dataclass makes the new class a dataclass too.
  return type(cls)(cls.__name__, (cls,), namespace)


def plain_state(state: Any) -> Any:
  """Returns a TrainState without its wrappers, as `without_wrappers` does."""
  kept = {
    name: values.mean_over_replicas(getattr(state, name))
    if is_array_field(field)
    else getattr(state, name)
    for name, field in fields_by_name(type(state)).items()
    if name not in ("wrappers", "wrapper_states")
  }
  return build(state._base_class or type(state), kept)


# -- First values, and their places.


class HasMesh(Protocol):
  """The part of a `Strategy` that this package uses: its mesh."""

  @property
  def mesh(self) -> jax.sharding.Mesh:
    """The mesh of all devices, with the axis `"replica"` first."""
    ...


def mesh_of(
  strategy: HasMesh | None, rules: rules_lib.Rules = None
) -> jax.sharding.Mesh | None:
  """Returns the mesh of a strategy; None without one.

  Args:
    strategy: The argument of a creation.
    rules: The rules that need its mesh; an empty sequence needs none.

  Raises:
    TypeError: `strategy` is not a strategy.
    ValueError: There are rules and no strategy.
  """
  if strategy is None:
    if rules not in (None, (), []):
      raise ValueError(
        f"rules={rules!r} need a strategy, whose mesh they split parameters "
        "over; got strategy=None."
      )
    return None
  mesh = getattr(strategy, "mesh", None)
  if isinstance(mesh, jax.sharding.Mesh):
    return mesh
  raise TypeError(f"strategy must be a Strategy or None, got {strategy!r}.")


def mesh_in(tree: PyTree) -> Any:
  """Returns the mesh of a tree of arrays; None if it has none."""
  for x in jax.tree.leaves(tree):
    if isinstance(getattr(x, "sharding", None), jax.sharding.NamedSharding):
      return x.sharding.mesh
  return None


def num_replicas(mesh: jax.sharding.Mesh | None) -> int:
  """Returns the number of replicas of a mesh; 1 without a mesh."""
  return 1 if mesh is None else mesh.shape[mesh_lib.REPLICA]


def shardings_of(specs: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
  """Returns the NamedSharding on the mesh for each PartitionSpec of a tree."""
  return jax.tree.map(lambda s: jax.sharding.NamedSharding(mesh, s), specs)


def create(
  tx: Any,
  wrappers: tuple[base.Base, ...],
  mesh: jax.sharding.Mesh | None,
  given: Mapping[str, PyTree],
) -> dict[str, PyTree]:
  """Returns all array fields of a state at step 0, by name.

  Args:
    tx: The optax optimizer.
    wrappers: The wrappers.
    mesh: The mesh, whose replicas the per-replica leaves have rows for.
    given: `params` and the collections, by field name.

  Returns:
    Strongly typed arrays, no two of which share memory: the train step donates
    the state.
  """
  params, step = given["params"], jnp.zeros((), jnp.int32)
  opt_state = opt_state_lib.init(tx, params)
  fields = dict(given, step=step, opt_state=opt_state)
  if wrappers:
    others = {name: x for name, x in given.items() if name != "params"}
    fields["wrapper_states"] = stack.init(
      wrappers, params, tx, others, num_replicas(mesh)
    )
  return trees.unshare_buffers(fields)


def complete(
  tx: Any,
  wrappers: tuple[base.Base, ...],
  given: Mapping[str, PyTree],
  mesh: jax.sharding.Mesh | None,
) -> dict[str, PyTree]:
  """Places the given fields of a state and creates its other fields.

  Args:
    tx: The optax optimizer.
    wrappers: The wrappers of the state.
    given: The parameters and collections, by name. Arrays that are split over
      the mesh keep their sharding; all others are replicated.
    mesh: The mesh; None puts everything on the default device.

  Returns:
    All fields by name. They have a `jax.ShapeDtypeStruct` for every array if
    `given` has, or if the devices of the mesh are for compiling alone.
  """
  given = trees.unshare_buffers(given)
  create_fields = functools.partial(create, tx, wrappers, mesh)
  is_abstract = mesh_lib.is_compile_only(mesh) or any(
    isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(given)
  )
  if mesh is None and not is_abstract:
    return create_fields(given)
  # The shardings of slots and wrapper states depend on their shapes.
  fields = jax.eval_shape(create_fields, given)
  if mesh is None:
    with jax.ensure_compile_time_eval():
      default = jax.device_put(0).sharding
    shardings = jax.tree.map(lambda _: default, fields)
  else:
    specs = {
      name: rules_lib.resolve(None, mesh, tree, argument=name)
      for name, tree in given.items()
    }
    of_params = fields["params"], specs["params"]
    specs["step"] = jax.P()
    specs["opt_state"] = opt_state_lib.specs(fields["opt_state"], *of_params)
    if wrappers:
      specs["wrapper_states"] = wrapper_specs(
        wrappers, fields["wrapper_states"], *of_params, mesh
      )
    shardings = shardings_of(specs, mesh)
  if is_abstract:
    return jax.tree.map(mesh_lib.abstract_array, fields, shardings)
  placed = {
    name: jax.tree.map(mesh_lib.put, tree, shardings.pop(name))
    for name, tree in given.items()
  }
  # Sharded outputs: no device ever holds a whole slot of a split parameter.
  jitted = jax.jit(
    lambda given: {
      name: x for name, x in create_fields(given).items() if name not in given
    },
    out_shardings=shardings,
  )
  return {**placed, **jitted(placed)}


def reinitialize(state: Any, replaced: Mapping[str, PyTree]) -> Any:
  """Returns a state at step 0 with other parameters and collections.

  Optimizer slots and wrapper states are created anew: some hold copies of the
  parameters (a moving average, the local parameters of AGN).

  Args:
    state: A state of arrays, whose shardings the result has.
    replaced: The new values of `params` and of collections, by field.
  """
  given = {**variables(state), **replaced}
  new = complete(state.tx, state.wrappers, given, mesh_in(state))
  return state.replace(**new)


def wrapper_specs(
  wrappers: tuple[base.Base, ...],
  states: Mapping[str, PyTree],
  params: PyTree,
  param_specs: PyTree,
  mesh: jax.sharding.Mesh,
) -> dict[str, PyTree]:
  """Returns the specs of the states of wrappers, by wrapper name.

  A leaf that the wrapper does not split within a replica is split like the
  parameter that it is a copy or a slot of.

  Raises:
    TypeError: `specs` returns a leaf that is not a PartitionSpec.
    ValueError: `specs` returns another tree than the state's, or a
      spec that does not fit a leaf.
  """

  def spec_of_leaf(name: str, path: Any, x: Any, spec: Any, like: Any) -> Any:
    # Checked here: JAX's error would not name the wrapper.
    where = f"wrapper {name!r}: specs[{trees.path_string(path)}]"
    mesh_lib.check_spec(where, spec, tuple(x.shape), mesh)
    own = mesh_lib.axes_in(spec)
    if own <= {mesh_lib.REPLICA}:
      # An axis can split only one dimension, so axes in use are left out.
      unused = [axis for axis in mesh.axis_names if axis not in own]
      spec = mesh_lib.merge(spec, mesh_lib.only(like, unused))
    return mesh_lib.shortest(spec, mesh)

  result = {}
  for wrapper in wrappers:
    state = states[wrapper.name]
    result[wrapper.name] = jax.tree_util.tree_map_with_path(
      functools.partial(spec_of_leaf, wrapper.name),
      state,
      wrapper.specs(state),
      # Local copies of the parameters and of their slots (AGN) follow them.
      opt_state_lib.specs(state, params, param_specs),
    )
  return result
