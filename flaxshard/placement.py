"""Where the leaves of a train state lie on the mesh of a strategy.

Parameters and collections lie where their specs say, the slots of the optimizer
as their parameters, the states of wrappers as the wrappers say, and the rest on
every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from flaxshard import trees
from flaxshard import update
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


def put(tree: PyTree, specs: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
  """Puts the arrays of a tree on the mesh; those that lie right stay."""
  return jax.tree.map(mesh_lib.put, tree, _shardings(specs, mesh))


def complete(
  init: Callable[[PyTree], dict[str, PyTree]],
  given: Mapping[str, PyTree],
  mesh: jax.sharding.Mesh,
  wrappers: tuple[base.Wrapper, ...],
) -> dict[str, PyTree]:
  """Returns the arrays of a state: those given, and what `init` makes of them.

  Args:
    init: Makes further fields by name, from the parameters.
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
  params = given["params"]
  make = lambda params: trees.own_buffers(init(params))
  born = jit(make, (params,), mesh, params, specs, wrappers)
  return {**given, **born(params)}


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
      fields[name] = slot_specs(tree, params, specs["params"])
    elif name == "wrapper_states":
      fields[name] = wrapper_specs(wrappers, tree, mesh)
    else:
      fields[name] = jax.tree.map(lambda _: P(), tree)
  return jax.jit(make, out_shardings=_shardings(fields, mesh))


def slot_specs(opt_state: PyTree, params: PyTree, specs: PyTree) -> PyTree:
  """Returns the specs of an optimizer's state, whose slots follow parameters.

  A slot is a leaf whose path ends with that of a parameter, as in every
  optimizer of optax, and whose shape does so too: L-BFGS keeps several of each
  in one array. Anything else is replicated: counts, and the row and column
  statistics of Adafactor.

  Args:
    opt_state: The state, or shapes and dtypes of it.
    params: The parameters, or shapes and dtypes of them.
    specs: Their specs.

  Example:
    >>> import jax.numpy as jnp, optax
    >>> params = {"w": jnp.ones((4, 2))}
    >>> state = optax.sgd(0.1, momentum=0.9).init(params)
    >>> slot_specs(state, params, {"w": P("replica")})[0].trace
    {'w': P('replica',)}
  """
  # By path, not by optax.tree_utils.tree_map_params: that calls `tx.init` on a
  # placeholder, which L-BFGS and inits that look at their arrays cannot take.
  shapes = jax.tree_util.tree_leaves_with_path(update.with_optimizer(params))
  followed = {
    trees.path_strings(path): (tuple(p.shape), spec)
    for (path, p), spec in zip(
      shapes, jax.tree.leaves(update.with_optimizer(specs)), strict=True
    )
  }

  def spec_of(path: trees.Path, slot: Any) -> P:
    names, slot_shape = trees.path_strings(path), tuple(slot.shape)
    for start in range(len(names)):
      shape, spec = followed.get(names[start:], ((), P()))
      more = len(slot_shape) - len(shape)
      if tuple(spec) and slot_shape[more:] == shape:
        return P(*(None,) * more, *spec)
    return P()

  return jax.tree_util.tree_map_with_path(spec_of, opt_state)


def wrapper_specs(
  wrappers: tuple[base.Wrapper, ...],
  states: Mapping[str, PyTree],
  mesh: jax.sharding.Mesh,
) -> dict[str, PyTree]:
  """Returns the specs that the wrappers ask for, by wrapper name.

  Raises:
    TypeError, ValueError: `partition_specs` of a wrapper answers with another
      tree than that of its state, or with specs that do not fit.
  """
  result = {}
  for wrapper in wrappers:
    name = base.name_of(wrapper)
    given = wrapper.partition_specs(states[name])
    treedef: Any = jax.tree.structure(states[name])
    try:
      flat = treedef.flatten_up_to(given)
    except ValueError as e:
      raise ValueError(
        f"wrapper {name!r}: partition_specs must return a tree like the state, "
        f"with a PartitionSpec for each leaf, got {given!r}."
      ) from e
    leaves = jax.tree_util.tree_leaves_with_path(states[name])
    dims = [
      specs_lib.check(
        f"wrapper {name!r}: partition_specs[{trees.path_string(path)}]",
        spec,
        tuple(leaf.shape),
        mesh,
      )
      for (path, leaf), spec in zip(leaves, flat, strict=True)
    ]
    result[name] = treedef.unflatten(
      [specs_lib.shortest(d, mesh) for d in dims]
    )
  return result


def _shardings(specs: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
  return jax.tree.map(lambda s: jax.sharding.NamedSharding(mesh, s), specs)
