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
  base.check_replicas(wrappers, num_replicas)
  return num_replicas


def put(tree: PyTree, specs: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
  """Puts the arrays of a tree on the mesh; those that lie right stay."""
  return jax.tree.map(mesh_lib.put, tree, _shardings(specs, mesh))


def complete(
  init: Callable[[Mapping[str, PyTree]], dict[str, PyTree]],
  given: Mapping[str, PyTree],
  mesh: jax.sharding.Mesh,
  wrappers: tuple[base.Wrapper, ...],
) -> dict[str, PyTree]:
  """Returns the arrays of a state: those given, and what `init` makes of them.

  Args:
    init: Makes further fields by name, from those given.
    given: The parameters and collections by name. Those that are split over
      the mesh stay so, the others go to every device.
    mesh: The mesh.
    wrappers: The wrappers of the state.
  """
  specs = {
    name: rules_lib.resolve(None, mesh, tree, argument=name)
    for name, tree in given.items()
  }
  given = {name: put(tree, specs[name], mesh) for name, tree in given.items()}
  make = lambda given: trees.own_buffers(init(given))
  born = jit(make, (given,), mesh, given["params"], specs, wrappers)
  return {**given, **born(given)}


def jit(
  make: Callable[..., dict[str, PyTree]],
  args: tuple[Any, ...],
  mesh: jax.sharding.Mesh,
  params: PyTree,
  specs: Mapping[str, PyTree],
  wrappers: tuple[base.Wrapper, ...],
) -> Callable[..., dict[str, PyTree]]:
  """Compiles what makes the fields of a state, so that they are born sharded.

  Args:
    make: Returns fields of a train state by name, from `args`.
    args: Its arguments, or shapes and dtypes of them.
    mesh: The mesh.
    params: The parameters, or shapes and dtypes of them.
    specs: The PartitionSpecs of the parameters and of the other collections.
    wrappers: The wrappers of the state.

  Returns:
    The jitted `make`.
  """
  abstract = jax.eval_shape(make, *args)
  fields: dict[str, PyTree] = {}
  for name, tree in abstract.items():
    if name in specs:
      fields[name] = specs[name]
    elif name == "opt_state":
      fields[name] = opt_state_lib.specs(tree, params, specs["params"])
    elif name == "wrapper_states":
      fields[name] = wrapper_specs(
        wrappers, tree, params, specs["params"], mesh
      )
    else:
      fields[name] = jax.tree.map(lambda _: P(), tree)
  return jax.jit(make, out_shardings=_shardings(fields, mesh))


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


def _shardings(specs: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
  return jax.tree.map(lambda s: jax.sharding.NamedSharding(mesh, s), specs)
