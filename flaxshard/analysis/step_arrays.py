"""The arrays that a step takes and returns, with what they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
import re
from typing import Any

import jax

from flaxshard.analysis.compilation import Compilation
from flaxshard.compiled import hlo
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees

PyTree = Any
P = jax.sharding.PartitionSpec


@dataclasses.dataclass(frozen=True)
class Leaf:
  """An array among the arguments of a step.

  Attributes:
    path: Its path in its argument, such as `params/Dense_0/kernel`.
    shape: Its shape.
    dtype: Its dtype.
    sharding: Its sharding in the program.
    donated: Whether the step may overwrite it.
    parameter: The number of the program's parameter that it is; None if the
      program does not read it.
    is_weak: Whether its dtype is weak, as that of a Python number is.
    slot_of: The path of the parameter whose slot it is; None if it is no slot.
    is_param: Whether it is a parameter of the model.
  """

  path: str
  shape: tuple[int, ...]
  dtype: Any
  sharding: Any
  donated: bool = False
  parameter: int | None = None
  is_weak: bool = False
  slot_of: str | None = None
  is_param: bool = False

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)

  @property
  def local_size(self) -> int:
    """Number of elements on each device."""
    if self.sharding is None:
      return self.size
    return math.prod(self.sharding.shard_shape(self.shape))

  @property
  def nbytes(self) -> int:
    """Bytes on each device."""
    return self.local_size * _itemsize(self.dtype)

  @property
  def axes(self) -> frozenset[str]:
    """Mesh axes of more than one device that split it."""
    names = (n for dim in range(len(self.shape)) for n in self.axes_of_dim(dim))
    return frozenset(n for n in names if self.sharding.mesh.shape[n] > 1)

  def axes_of_dim(self, dim: int) -> frozenset[str]:
    """Mesh axes along one dimension, also those of one device."""
    if not isinstance(self.sharding, jax.sharding.NamedSharding):
      return frozenset()
    entry = (*self.sharding.spec, *[None] * len(self.shape))[dim]
    if entry is None or entry is P.UNCONSTRAINED:
      return frozenset()
    return frozenset(entry if isinstance(entry, tuple) else (entry,))


def read_arguments(
  args: Sequence[PyTree],
  compiled: Any = None,
  program: hlo.Program | None = None,
) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
  """Returns the arrays of the state, and those of the other arguments.

  Args:
    args: The arguments of the step, the state first, arrays or
      `jax.ShapeDtypeStruct`s.
    compiled: The compiled step; None if it could not be compiled.
    program: Its program.
  """
  flat = jax.tree_util.tree_leaves_with_path(tuple(args))
  # A Python number has a shape and a dtype there, too.
  shapes = jax.tree.leaves(jax.eval_shape(lambda *args: args, *args))
  count = len(jax.tree.leaves(args[0]))
  shardings = [getattr(leaf, "sharding", None) for _, leaf in flat]
  donated = [False] * len(flat)
  numbers: list[int | None] = [None] * len(flat)
  if compiled is not None and program is not None:
    is_sharding = lambda x: isinstance(x, (jax.sharding.Sharding, type(None)))
    found = jax.tree.leaves(compiled.input_shardings, is_leaf=is_sharding)
    infos = jax.tree.leaves(compiled.args_info)
    if len(found) == len(infos) == len(flat):
      shardings = [
        x or given for x, given in zip(found, shardings, strict=True)
      ]
      donated = [info.donated for info in infos]
    numbers = _parameter_numbers(program, [path[1:] for path, _ in flat])
  leaves = [
    Leaf(
      trees.path_string(path[1:]),
      tuple(x.shape),
      x.dtype,
      sharding,
      is_donated,
      number,
      x.weak_type,
    )
    for (path, _), x, sharding, is_donated, number in zip(
      flat, shapes, shardings, donated, numbers, strict=True
    )
  ]
  return _name_slots(args[0], leaves[:count]), tuple(leaves[count:])


def params_of(state: PyTree) -> PyTree:
  """Returns the parameters in a state; all of it if it has no such field."""
  if isinstance(state, Mapping):
    return state.get("params", state)
  return getattr(state, "params", state)


def _name_slots(state: PyTree, leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
  params = params_of(state)
  if params is state:
    return tuple(dataclasses.replace(x, is_param=True) for x in leaves)
  owners = opt_state_lib.parameters_of(
    state, opt_state_lib.trained_params(opt_state_lib.optimized_params(params))
  )
  named = []
  for leaf, owner in zip(leaves, owners, strict=True):
    is_param = leaf.path.split("/")[0] == "params"
    slot_of = None if owner is None or is_param else trees.path_string(owner)
    named.append(dataclasses.replace(leaf, is_param=is_param, slot_of=slot_of))
  return tuple(named)


def read_new_state(
  state: PyTree, compilation: Compilation | None
) -> tuple[Leaf, ...] | None:
  """Returns the new state among the results of a step, or None."""
  if compilation is None or compilation.compiled is None:
    return None
  # The compiled program knows the shardings, the traced one the weak types.
  results = jax.tree.map(
    lambda x, traced: Leaf(
      "", x.shape, x.dtype, x.sharding, is_weak=traced.weak_type
    ),
    compilation.compiled.out_info,
    compilation.traced.out_info,
  )
  parts = results if type(results) in (tuple, list) else ()
  for part in (results, *parts):
    # By its type and paths: static fields may differ from call to call.
    if type(part) is type(state) and trees.paths(part) == trees.paths(state):
      return tuple(
        dataclasses.replace(x, path=trees.path_string(path))
        for path, x in jax.tree_util.tree_leaves_with_path(part)
      )
  return None


def _parameter_numbers(
  program: hlo.Program, paths: Sequence[trees.Path]
) -> list[int | None]:
  """Returns, for each argument, the parameter of the program that it is.

  JAX leaves out arguments that the program does not read. A parameter's name is
  that of the function's argument with the path in it.
  """
  parameters = program.entry.parameters
  numbers: list[int | None] = [None] * len(paths)
  if len(parameters) == len(paths):
    return list(range(len(paths)))
  names = [re.sub(r"^\w+", "", x.op_name) for x in parameters]
  # Strategy.jit has all leaves in one list.
  in_list = [re.fullmatch(r"leaves\[(\d+)\]", x.op_name) for x in parameters]
  position = 0
  for number, (name, listed) in enumerate(zip(names, in_list, strict=True)):
    if listed:
      numbers[int(listed[1])] = number
      continue
    for i in range(position, len(paths)):
      # The first key is the position of the argument.
      if jax.tree_util.keystr(paths[i]) == name:
        numbers[i] = number
        position = i + 1
        break
  return numbers


def _itemsize(dtype: Any) -> int:
  # PRNG keys have a dtype of their own.
  return int(getattr(dtype, "itemsize", 8))
