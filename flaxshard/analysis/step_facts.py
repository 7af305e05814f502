"""What the checks know of a step: its state, its batch and its program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
import re
from typing import Any

import jax
import numpy as np

from flaxshard.compiled import dataflow
from flaxshard.compiled import groups
from flaxshard.compiled import hlo
from flaxshard.compiled.find import find
from flaxshard.compiled.find import Found
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
    slot_of: The path of the parameter whose slot it is; None if it is no slot.
    is_param: Whether it is a parameter of the model.
  """

  path: str
  shape: tuple[int, ...]
  dtype: Any
  sharding: Any
  donated: bool = False
  parameter: int | None = None
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
    if not isinstance(self.sharding, jax.sharding.NamedSharding):
      return frozenset()
    shape = self.sharding.mesh.shape
    entries = (_names(entry) for entry in self.sharding.spec)
    return frozenset(n for names in entries for n in names if shape[n] > 1)

  def axes_of_dim(self, dim: int) -> frozenset[str]:
    """Mesh axes of more than one device that split one dimension."""
    if not isinstance(self.sharding, jax.sharding.NamedSharding):
      return frozenset()
    spec = tuple(self.sharding.spec)
    names = _names(spec[dim]) if dim < len(spec) else ()
    return frozenset(n for n in names if self.sharding.mesh.shape[n] > 1)


@dataclasses.dataclass(frozen=True)
class StepFacts:
  """A step with its arguments, compiled.

  Attributes:
    mesh: The mesh of the arguments; None if they are on one device.
    state: The arrays of the state.
    batch: The arrays of the batch and of the further arguments.
    outputs: The arrays of the new state; None if the step returns none.
    program: The compiled program; None if the step could not be compiled.
  """

  mesh: jax.sharding.Mesh | None
  state: tuple[Leaf, ...]
  batch: tuple[Leaf, ...]
  outputs: tuple[Leaf, ...] | None = None
  program: hlo.Program | None = None

  @functools.cached_property
  def collectives(self) -> list[Found]:
    """The collectives of the program."""
    return [] if self.program is None else find(self.program)

  @functools.cached_property
  def params(self) -> tuple[Leaf, ...]:
    """The parameters of the model."""
    return tuple(leaf for leaf in self.state if leaf.is_param)

  @functools.cached_property
  def batch_axes(self) -> frozenset[str]:
    """The mesh axes that split the examples of the batch."""
    # Dimension 1 if the batches of several steps are stacked.
    for dim in range(2):
      axes = frozenset[str]().union(*(x.axes_of_dim(dim) for x in self.batch))
      if axes:
        return axes
    return frozenset()

  @functools.cached_property
  def state_sizes(self) -> frozenset[int]:
    """Elements of each array of the state, whole, per device and per layer."""
    sizes: set[int] = set()
    for leaf in self.state:
      sizes.update((leaf.size, leaf.local_size))
      # Layers of equal shape are stacked along the first dimension by nn.scan.
      if len(leaf.shape) > 1 and leaf.shape[0]:
        sizes.add(leaf.size // leaf.shape[0])
        sizes.add(leaf.local_size // leaf.shape[0])
    return frozenset(sizes - {0, 1})

  @functools.cached_property
  def differentiates(self) -> bool:
    """Whether the program has a backward pass."""
    return self.program is not None and any(
      "jvp(" in instruction.attributes
      for computation in self.program.computations.values()
      for instruction in computation.instructions.values()
    )

  def spanned_axes(self, found: Found) -> frozenset[str]:
    """Returns the mesh axes along which a collective moves data."""
    assert self.program is not None and self.mesh is not None
    numbers = self._device_numbers
    attributes = found.instruction.attributes
    pairs = groups.source_target_pairs(attributes)
    count = len(numbers.positions[0])
    within = pairs or groups.replica_groups(attributes, count)
    within = numbers.to_positions(within or (tuple(range(count)),))
    shape = tuple(self.mesh.shape.values())
    axes: set[str] = set()
    for group in within:
      places = np.array(np.unravel_index(group, shape))
      moved = (places != places[:, :1]).any(axis=1)
      axes.update(np.array(self.mesh.axis_names)[moved].tolist())
    return frozenset(axes)

  def state_leaf(self, value: dataflow.Value) -> Leaf | None:
    """Returns the array of the state that a value of the program comes from."""
    assert self.program is not None
    number = dataflow.argument(self.program, value)
    return None if number is None else self._by_parameter.get(number)

  def is_from_batch(self, value: dataflow.Value) -> bool:
    """Returns whether a value of the program is a part of the batch."""
    assert self.program is not None
    number = dataflow.argument(self.program, value)
    return number is not None and any(
      leaf.parameter == number for leaf in self.batch
    )

  @functools.cached_property
  def _by_parameter(self) -> dict[int, Leaf]:
    return {x.parameter: x for x in self.state if x.parameter is not None}

  @functools.cached_property
  def _device_numbers(self) -> groups.DeviceNumbers:
    assert self.program is not None and self.mesh is not None
    return groups.device_numbers(self.program, self.mesh)


def collect(args: Sequence[PyTree], compiled: Any = None) -> StepFacts:
  """Collects what the checks need to know of a step.

  Args:
    args: The arguments of the step, the state first, arrays or
      `jax.ShapeDtypeStruct`s.
    compiled: The compiled step; None if it could not be compiled.
  """
  flat = jax.tree_util.tree_leaves_with_path(tuple(args))
  count = len(jax.tree.leaves(args[0]))
  shardings = [getattr(leaf, "sharding", None) for _, leaf in flat]
  donated = [False] * len(flat)
  numbers: list[int | None] = [None] * len(flat)
  program = None
  if compiled is not None:
    program = hlo.parse(compiled)
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
    )
    for (path, x), sharding, is_donated, number in zip(
      flat, shardings, donated, numbers, strict=True
    )
  ]
  state = _name_slots(args[0], leaves[:count])
  return StepFacts(
    _mesh_of(leaves),
    state,
    tuple(leaves[count:]),
    _find_new_state(args[0], compiled),
    program,
  )


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


def _find_new_state(state: PyTree, compiled: Any) -> tuple[Leaf, ...] | None:
  """Returns the new state among the results of a step, or None."""
  if compiled is None:
    return None
  results = compiled.out_info
  parts = results if type(results) in (tuple, list) else ()
  for part in (results, *parts):
    # By its type and paths: static fields may differ from call to call.
    if type(part) is type(state) and trees.paths(part) == trees.paths(state):
      return tuple(
        Leaf(trees.path_string(path), tuple(x.shape), x.dtype, x.sharding)
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
  names = [
    "".join(re.findall(r"^\w+(.*)$", x.op_name, re.DOTALL)) for x in parameters
  ]
  # Strategy.jit has all leaves in one list.
  in_list = [re.fullmatch(r"leaves\[(\d+)\]", x.op_name) for x in parameters]
  position = 0
  for number, (name, listed) in enumerate(zip(names, in_list, strict=True)):
    if listed:
      numbers[int(listed[1])] = number
      continue
    matching = range(position, len(paths))
    for i in matching:
      # The first key is the position of the argument.
      if jax.tree_util.keystr(paths[i]) == name:
        numbers[i] = number
        position = i + 1
        break
  return numbers


def _mesh_of(leaves: Sequence[Leaf]) -> jax.sharding.Mesh | None:
  for leaf in leaves:
    sharding = leaf.sharding
    if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(
      sharding.mesh, jax.sharding.Mesh
    ):
      return sharding.mesh
  return None


def _itemsize(dtype: Any) -> int:
  # PRNG keys have a dtype of their own.
  return int(getattr(dtype, "itemsize", 8))


def _names(entry: Any) -> tuple[str, ...]:
  if entry is None or entry is P.UNCONSTRAINED:
    return ()
  return entry if isinstance(entry, tuple) else (entry,)
