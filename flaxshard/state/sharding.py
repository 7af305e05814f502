"""Where the leaves of a train state lie on the mesh of a strategy.

Parameters and collections lie where their specs say, the slots of the optimizer
as their parameters, the states of wrappers as the wrappers say, and the rest on
every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import rules as rules_lib
from flaxshard.partitioning import specs as specs_lib
from flaxshard.wrappers import base
from flaxshard.wrappers import stack

PyTree = Any
P = jax.sharding.PartitionSpec


class HasMesh(Protocol):
  """A strategy, as far as placement goes."""

  @property
  def mesh(self) -> jax.sharding.Mesh:
    """The mesh that everything lies on."""
    ...


def mesh_of(strategy: HasMesh) -> jax.sharding.Mesh:
  """Returns the mesh of a strategy; a TypeError if it is none."""
  mesh = getattr(strategy, "mesh", None)
  if not isinstance(mesh, jax.sharding.Mesh):
    raise TypeError(f"strategy must be a Strategy or None, got {strategy!r}.")
  return mesh


def check_replicas(
  mesh: jax.sharding.Mesh | None, wrappers: tuple[base.Wrapper, ...]
) -> int:
  """Returns the number of replicas, once the wrappers fit it."""
  if mesh is None:  # where the state will be used, nobody knows
    return 1
  num_replicas = mesh.shape[mesh_lib.REPLICA]
  stack.check_replicas(wrappers, num_replicas)
  return num_replicas


def shardings_of(specs: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
  """Returns the NamedSharding on the mesh for each PartitionSpec of a tree."""
  return jax.tree.map(lambda s: jax.sharding.NamedSharding(mesh, s), specs)


def complete_fields(
  init: Callable[[Mapping[str, PyTree]], dict[str, PyTree]],
  given: Mapping[str, PyTree],
  mesh: jax.sharding.Mesh,
  wrappers: tuple[base.Wrapper, ...],
) -> dict[str, PyTree]:
  """Places the given fields of a state and creates its other fields.

  Args:
    init: Takes the given fields and returns the other fields, by name.
    given: The parameters and collections, by name. Arrays that are split over
      the mesh keep their sharding; all others are replicated.
    mesh: The mesh.
    wrappers: The wrappers of the state.

  Returns:
    All fields by name.
  """
  specs = {
    name: rules_lib.resolve(None, mesh, tree, argument=name)
    for name, tree in given.items()
  }
  given = jax.tree.map(mesh_lib.put, dict(given), shardings_of(specs, mesh))

  def create_fields(given: Mapping[str, PyTree]) -> dict[str, PyTree]:
    return trees.own_buffers(init(given))

  created = jax.eval_shape(create_fields, given)
  abstract = abstract_fields({**given, **created}, specs, wrappers, mesh)
  jitted = jax.jit(
    create_fields,
    out_shardings={
      name: jax.tree.map(lambda x: x.sharding, abstract[name])
      for name in created
    },
  )
  return {**given, **jitted(given)}


def abstract_fields(
  fields: Mapping[str, PyTree],
  specs: Mapping[str, PyTree],
  wrappers: tuple[base.Wrapper, ...],
  mesh: jax.sharding.Mesh | None,
) -> dict[str, PyTree]:
  """Returns shapes, dtypes and shardings of the fields of a state.

  Args:
    fields: All array fields by name: arrays, or shapes and dtypes of them.
    specs: PartitionSpecs of the parameters and of the other collections, by
      name. Optimizer slots follow their parameters, wrapper states follow
      `partition_specs`, and everything else is replicated.
    wrappers: The wrappers of the state.
    mesh: The mesh; None puts everything on the default device.
  """
  if mesh is None:
    default = jax.sharding.SingleDeviceSharding(_default_device())
    shardings = jax.tree.map(lambda _: default, dict(fields))
  else:
    params = fields["params"]
    all_specs: dict[str, PyTree] = {}
    for name, tree in fields.items():
      if name in specs:
        all_specs[name] = specs[name]
      elif name == "opt_state":
        all_specs[name] = opt_state_lib.specs(tree, params, specs["params"])
      elif name == "wrapper_states":
        all_specs[name] = wrapper_specs(
          wrappers, tree, params, specs["params"], mesh
        )
      else:
        all_specs[name] = jax.tree.map(lambda _: P(), tree)
    shardings = shardings_of(all_specs, mesh)
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    dict(fields),
    shardings,
  )


def _default_device() -> jax.Device:
  """Returns the device where JAX creates arrays."""
  config: Any = jax.config  # its options are not declared to type checkers
  device = config.jax_default_device
  if device is None or isinstance(device, str):  # None or a platform's name
    device = jax.local_devices(backend=device)[0]
  return device


def wrapper_specs(
  wrappers: tuple[base.Wrapper, ...],
  states: Mapping[str, PyTree],
  params: PyTree,
  param_specs: PyTree,
  mesh: jax.sharding.Mesh,
) -> dict[str, PyTree]:
  """Returns the specs that the wrappers ask for, by wrapper name.

  Copies of parameters, and slots, lie as the parameters do where a wrapper does
  not say more than that each replica has its own.

  Raises:
    TypeError, ValueError: `partition_specs` of a wrapper answers with another
      tree than that of its state, or with specs that do not fit.
  """
  result = {}
  for wrapper in wrappers:
    name = base.name_of(wrapper)
    treedef: Any = jax.tree.structure(states[name])
    leaves = jax.tree_util.tree_leaves_with_path(states[name])
    dims = [
      specs_lib.check(
        f"wrapper {name!r}: partition_specs[{trees.path_string(path)}]",
        spec,
        tuple(leaf.shape),
        mesh,
      )
      for (path, leaf), spec in zip(
        leaves, base.partition_specs(wrapper, states[name]), strict=True
      )
    ]
    followed = opt_state_lib.specs(states[name], params, param_specs)
    result[name] = treedef.unflatten(
      [
        specs_lib.shortest(_completed(d, spec), mesh)
        for d, spec in zip(dims, jax.tree.leaves(followed), strict=True)
      ]
    )
  return result


def _completed(dims: specs_lib.Dims, followed: P) -> specs_lib.Dims:
  """Splits what only replicas are said to split, or nothing, as `followed`."""
  if set(sum(dims, ())) - {mesh_lib.REPLICA}:
    return dims
  taken = set().union(*dims)
  entries = (*followed, *(None,) * len(dims))
  return tuple(
    d or tuple(a for a in specs_lib.axes_of(entry) if a not in taken)
    for d, entry in zip(dims, entries, strict=False)
  )
