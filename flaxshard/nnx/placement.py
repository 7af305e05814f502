"""Puts an NNX module and its optimizer on the mesh of a strategy."""

from __future__ import annotations

from typing import Any

from flax import nnx
from flax import traverse_util
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
  params, others = nnx.state(model, is_param, ...)
  param_specs = _place_state(model, params, mesh, rules, "params")
  _place_state(model, others, mesh, None, "variables")
  return nnx.as_pure(nnx.filter_state(param_specs, wrt))


def _place_state(
  model: Any,
  state: nnx.State,
  mesh: jax.sharding.Mesh,
  rules: rules_lib.Rules,
  name: str,
) -> nnx.State:
  """Puts variables of a module on a mesh; returns their PartitionSpecs."""
  boxed: dict[tuple[str, ...], Any] = {}
  for place, variable, value in nnx_adapter.leaves_of(state):
    boxed[place[1:]] = nnx_adapter.box(variable, value)
  nested = traverse_util.unflatten_dict(boxed)
  resolved = rules_lib.resolve(rules, mesh, nested, argument=name)
  by_path = traverse_util.flatten_dict(resolved)
  specs = [by_path[path] for path in boxed]
  arrays, treedef = jax.tree.flatten(state)
  placed = jax.tree.unflatten(treedef, _place(arrays, specs, mesh))
  nnx.update(model, placed)
  specs_state: nnx.State = jax.tree.unflatten(treedef, specs)
  return specs_state


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
    leaves, treedef = jax.tree.flatten(arrays)
    placed = _place(leaves, jax.tree.leaves(specs), mesh)
    variables_lib.assign(variables, jax.tree.unflatten(treedef, placed))


def _place(
  arrays: list[Any], specs: list[jax.P], mesh: jax.sharding.Mesh
) -> list[Any]:
  return [
    mesh_lib.constrain(x, NamedSharding(mesh, spec))
    if isinstance(x, jax.core.Tracer)
    else mesh_lib.put(jnp.asarray(x), NamedSharding(mesh, spec))
    for x, spec in zip(arrays, specs, strict=True)
  ]
