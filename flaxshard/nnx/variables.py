"""Variables of NNX objects: their places in a TrainState and on a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp

from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import rules as rules_lib
from flaxshard.state import fields as fields_lib
from flaxshard.state import nnx_adapter
from flaxshard.state.train_state import TrainState

PyTree = Any


def parts(
  model: Any, wrt: Any = nnx.Param
) -> Iterator[tuple[nnx.State, dict[nnx_adapter.Place, Any]]]:
  """Yields the parameters of a module, and its other variables.

  Args:
    model: The module.
    wrt: The filter of the parameters.

  Yields:
    Each part, and its leaves by their places in a TrainState: in `params`, and
    in the collections of Linen's names. Parameters that are not trained are in
    `frozen`.
  """
  trained, others = nnx.state(model, wrt, ...)
  leaves = nnx_adapter.leaves_of(trained)
  yield trained, {("params", *place[1:]): x for place, _, x in leaves}
  name_of = lambda place: "frozen" if place[0] == "params" else place[0]
  leaves = nnx_adapter.leaves_of(others)
  yield others, {(name_of(place), *place[1:]): x for place, _, x in leaves}


def update(
  model: nnx.Module, state: TrainState, *, wrt: Any = nnx.Param
) -> None:
  """Sets the variables of a module to those of a TrainState.

  `nnx.update(model, state.params)` raises a KeyError for a module with a list
  of layers, whose keys are integers in NNX and strings in a TrainState.

  The arrays are copied, so that donating the state does not delete those of the
  module.

  Args:
    model: The module, of the structure of the one that the state was made of.
    state: The result of `create_train_state` with an NNX module.
    wrt: The filter of the variables in `state.params`, if they are not all
      parameters; see `Optimizer.train_state`.

  Raises:
    ValueError: The module lacks a variable of the state or has another
      parameter, or a variable has another shape.

  Example:
    >>> import flaxshard as fs, optax
    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> state = fs.create_train_state(model, None, None, optax.sgd(0.1))
    >>> other = nnx.Linear(2, 1, rngs=nnx.Rngs(1))
    >>> fs.nnx.update(other, state)
    >>> bool((other.kernel == model.kernel).all())
    True
  """
  given = traverse_util.flatten_dict(fields_lib.variables(state))
  own: dict[nnx_adapter.Place, Any] = {}
  new = []
  for part, leaves in parts(model, wrt):
    own |= leaves
    # Calls may have added others to the module, such as sown values.
    copies = [jnp.copy(given.get(place, x)) for place, x in leaves.items()]
    new.append(jax.tree.unflatten(jax.tree.structure(part), copies))
  wanted = {
    place: x
    for place, x in own.items()
    if place in given or place[0] in ("params", "frozen")
  }
  difference = trees.difference_by_path(given, wanted, dtypes=False)
  if difference:
    raise ValueError(
      "model must have the structure of the module that the state was made of; "
      f"the state differs at {difference}."
    )
  for part in new:
    nnx.update(model, part)


def assign(variables: PyTree, arrays: PyTree) -> None:
  """Sets each variable of a tree to the array at its path."""
  arrays = trees.conform("the state given", arrays, nnx.as_pure(variables))
  jax.tree.map(
    lambda variable, x: variable.set_value(x),
    variables,
    arrays,
    is_leaf=lambda x: isinstance(x, nnx.Variable),
  )


# -- On the mesh of a strategy.


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

  def place(state: nnx.State, rules: rules_lib.Rules, name: str) -> nnx.State:
    boxed = {
      place[1:]: nnx_adapter.box(variable, value)
      for place, variable, value in nnx_adapter.leaves_of(state)
    }
    specs = rules_lib.resolve(
      rules, mesh, traverse_util.unflatten_dict(boxed), argument=name
    )
    by_path = traverse_util.flatten_dict(specs)
    treedef: Any = jax.tree.structure(state)
    ordered: nnx.State = treedef.unflatten([by_path[path] for path in boxed])
    nnx.update(model, _place(state, ordered, mesh))
    return ordered

  # LoRA trains few of the parameters, and the others are the large ones.
  params, others = nnx.state(model, nnx.Any(wrt, nnx.Param), ...)
  specs = place(params, rules, "params")
  place(others, None, "variables")
  return nnx.as_pure(nnx.filter_state(specs, wrt))


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
  variables = (optimizer.step, optimizer.opt_state, optimizer.wrapper_states)
  arrays = nnx.as_pure(variables)
  _, opt_state, states = arrays
  specs = (
    jax.P(),
    opt_state_lib.specs(opt_state, params, param_specs),
    fields_lib.wrapper_specs(
      optimizer.wrappers, states, params, param_specs, mesh
    ),
  )
  assign(variables, _place(arrays, specs, mesh))


def _place(tree: PyTree, specs: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
  """Returns a tree of arrays on a mesh."""

  def place(x: Any, spec: jax.P) -> jax.Array:
    sharding = jax.sharding.NamedSharding(mesh, spec)
    if isinstance(x, jax.core.Tracer):
      return mesh_lib.constrain(x, sharding)
    return mesh_lib.put(jnp.asarray(x), sharding)

  return jax.tree.map(place, tree, specs)
