"""The arrays and the program of a step, for the checks."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax

from flaxshard.analysis import step_arrays
from flaxshard.analysis.compilation import Compilation
from flaxshard.analysis.step_arrays import Leaf
from flaxshard.compiled import dataflow
from flaxshard.compiled import groups
from flaxshard.compiled import hlo
from flaxshard.compiled import values as values_lib
from flaxshard.compiled.find import find
from flaxshard.compiled.find import Found

PyTree = Any


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

  @property
  def values(self) -> values_lib.Values:
    """The values of the program."""
    assert self.program is not None
    return values_lib.trace(self.program)

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
    # Dimension 1 if the batches of several steps are stacked. An axis of one
    # device along dimension 0 says that the examples are there.
    for dim in range(2):
      axes = frozenset[str]().union(
        *(x.axes_of_dim(dim) for x in self.batch if dim < len(x.shape))
      )
      if axes and self.mesh is not None:
        shape = self.mesh.shape
        return frozenset(name for name in axes if shape[name] > 1)
    return frozenset()

  def has_examples(self, dims: Sequence[int], axes: frozenset[str]) -> bool:
    """Returns whether an array has the batch's examples along a dimension.

    Args:
      dims: Lengths of the array on each device.
      axes: Mesh axes along which the array is not split.
    """
    assert self.mesh is not None
    shape = self.mesh.shape
    parts = math.prod(shape[name] for name in self.batch_axes - axes)
    lengths = {
      # The dimensions behind, such as the time, may be merged into it.
      math.prod(leaf.shape[start:stop]) // parts
      for leaf in self.batch
      for start in range(2)
      for stop in range(start + 1, len(leaf.shape) + 1)
    }
    return bool((lengths - {0, 1}) & set(dims))

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
    pairs = tuple((group[0], other) for group in within for other in group)
    return frozenset(numbers.axes_of_pairs(pairs))

  def state_leaf(self, value: int) -> Leaf | None:
    """Returns the array of the state that a value of the program comes from."""
    number = dataflow.argument(self.values, value)
    return None if number is None else self._by_parameter.get(number)

  def is_from_batch(self, value: int) -> bool:
    """Returns whether a value of the program is a part of the batch."""
    number = dataflow.argument(self.values, value)
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


def collect(
  args: Sequence[PyTree], compilation: Compilation | None = None
) -> StepFacts:
  """Collects what the checks need to know of a step.

  Args:
    args: The arguments of the step, the state first, arrays or
      `jax.ShapeDtypeStruct`s.
    compilation: The compiled step; None if nothing can compile it here.
  """
  compiled = None if compilation is None else compilation.compiled
  program = None if compilation is None else compilation.program
  state, batch = step_arrays.read_arguments(args, compiled, program)
  return StepFacts(
    _mesh_of((*state, *batch)),
    state,
    batch,
    step_arrays.read_new_state(args[0], compilation),
    program,
  )


def _mesh_of(leaves: Sequence[Leaf]) -> jax.sharding.Mesh | None:
  for leaf in leaves:
    sharding = leaf.sharding
    if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(
      sharding.mesh, jax.sharding.Mesh
    ):
      return sharding.mesh
  return None
