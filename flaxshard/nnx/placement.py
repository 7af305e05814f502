"""Puts an NNX module and its optimizer on the mesh of a strategy."""

from __future__ import annotations

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from flaxshard.core import opt_state as opt_state_lib
from flaxshard.nnx import variables as variables_lib
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import rules as rules_lib
from flaxshard.state import nnx_adapter
from flaxshard.state import sharding as sharding_lib

PyTree = Any
NamedSharding = jax.sharding.NamedSharding


def place_module(
  model: Any, mesh: jax.sharding.Mesh, wrt: Any, rules: rules_lib.Rules
) -> PyTree:
  """Puts the arrays of a module on a mesh.

  Args:
    model: The module; its variables are set.
    mesh: The mesh.
    wrt: The filter of the trained parameters.
    rules: How all parameters are split, those that are not trained too.

  Returns:
    The PartitionSpecs of the trained parameters, a tree like them.
  """
  # LoRA trains few of the parameters, and the others are the large ones.
  is_param = nnx.Any(wrt, nnx.Param)
  specs: dict[tuple[Any, ...], Any] = {}
  for state, name, group_rules in zip(
    nnx.state(model, is_param, ...),
    ("params", "variables"),
    (rules, None),
    strict=True,
  ):
    flat = dict(nnx.to_flat_state(state))
    boxed: dict[str, Any] = {}
    for path, variable in flat.items():
      for key, value in nnx_adapter.leaves_of(path, variable):
        shape = value
        if isinstance(value, jax.core.Tracer):
          shape = jax.ShapeDtypeStruct(value.shape, value.dtype)
        nnx_adapter.set_leaf(boxed, key, nnx_adapter.box(variable, shape))
    resolved = rules_lib.resolve(group_rules, mesh, boxed, argument=name)
    for path, variable in flat.items():
      keys = [key for key, _ in nnx_adapter.leaves_of(path, variable)]
      own = [nnx_adapter.get_leaf(resolved, key) for key in keys]
      treedef: Any = jax.tree.structure(variable)
      specs[path] = treedef.unflatten(own)
      placed = _place(jax.tree.leaves(variable), own, mesh)
      flat[path] = treedef.unflatten(placed)
    nnx.update(model, nnx.from_flat_state(list(flat.items())))
  trained = [path for path, _ in nnx.to_flat_state(nnx.state(model, wrt))]
  return nnx.as_pure(
    nnx.from_flat_state([(path, specs[path]) for path in trained])
  )


def place_optimizer(
  optimizer: Any, params: PyTree, param_specs: PyTree, mesh: jax.sharding.Mesh
) -> None:
  """Puts the arrays of an optimizer on a mesh, slots like their parameters.

  Args:
    optimizer: The optimizer; its variables are set.
    params: The parameters.
    param_specs: Their PartitionSpecs.
    mesh: The mesh.
  """
  opt_state = nnx.as_pure(optimizer.opt_state)
  states = nnx.as_pure(optimizer.wrapper_states)
  for variables, arrays, specs in (
    (optimizer.step, optimizer.step[...], jax.P()),
    (
      optimizer.opt_state,
      opt_state,
      opt_state_lib.specs(opt_state, params, param_specs),
    ),
    (
      optimizer.wrapper_states,
      states,
      sharding_lib.wrapper_specs(
        optimizer.wrappers, states, params, param_specs, mesh
      ),
    ),
  ):
    placed = _place(jax.tree.leaves(arrays), jax.tree.leaves(specs), mesh)
    variables_lib.assign(variables, placed)


def _place(
  arrays: list[Any], specs: list[jax.P], mesh: jax.sharding.Mesh
) -> list[Any]:
  return [
    mesh_lib.constrain(x, NamedSharding(mesh, spec))
    if isinstance(x, jax.core.Tracer)
    else mesh_lib.put(jnp.asarray(x), NamedSharding(mesh, spec))
    for x, spec in zip(arrays, specs, strict=True)
  ]
