"""Memory that a step needs on a device, by what it is used for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

from flax.training import train_state
import jax
import numpy as np

from flaxshard.analysis.compilation import Compilation
from flaxshard.core import trees
from flaxshard.state import fields as fields_lib

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes on one device while a step runs.

  Attributes:
    state: Bytes of each field of the state, such as `params` and `opt_state`;
      the state of each wrapper is a field of its own.
    batch: Bytes of the batch.
    arguments: Bytes of the further arguments of the step.
    unused: Bytes of all arguments that the program does not read and that JAX
      therefore leaves out; None if unknown.
    padding: Bytes that the layout of the device adds to the arguments; None if
      unknown.
    outputs: Bytes of the results that do not overwrite a donated argument; None
      if unknown.
    program: Bytes of the machine code; None if unknown.
    temporaries: Bytes of all other values; None if unknown.
    peak: Bytes in all; None if unknown.
    peak_is_lower_bound: Whether the compiler gave up with only this much
      assigned.
    hbm: Bytes that a device has; None if unknown.
    fits: Whether the step fits the device; None if unknown.
    buffers: The largest buffers that are in use at the peak.
  """

  state: Mapping[str, int]
  batch: int
  arguments: int = 0
  unused: int | None = None
  padding: int | None = None
  outputs: int | None = None
  program: int | None = None
  temporaries: int | None = None
  peak: int | None = None
  peak_is_lower_bound: bool = False
  hbm: int | None = None
  fits: bool | None = None
  buffers: tuple[Any, ...] = ()

  @property
  def state_bytes(self) -> int:
    """Bytes of the whole state."""
    return sum(self.state.values())

  @property
  def excess(self) -> int | None:
    """Bytes that the step needs more than a device has; None if unknown."""
    if self.peak is None or self.hbm is None:
      return None
    return max(self.peak - self.hbm, 0)


def read_memory(
  state: PyTree,
  batch: PyTree,
  args: Sequence[PyTree],
  compilation: Compilation | None,
  hbm: int | None,
) -> Memory:
  """Returns the memory of a step.

  Args:
    state: The state, arrays or `jax.ShapeDtypeStruct`s with shardings.
    batch: The batch.
    args: Further arguments of the step.
    compilation: The compiled step; None if there is no compiler for its
      devices.
    hbm: Bytes that a device has; None if unknown.
  """
  fields = state_fields(state)
  compiled = None if compilation is None else compilation.compiled
  if compiled is None:
    memory = Memory(
      {name: _bytes_of(tree) for name, tree in fields.items()},
      _bytes_of(batch),
      _bytes_of(args),
      hbm=hbm,
    )
    if compilation is None:
      return memory
    return dataclasses.replace(
      memory,
      peak=compilation.needed,
      peak_is_lower_bound=compilation.needed is not None,
      hbm=compilation.available or hbm,
      fits=False,
    )
  used, unused = _argument_bytes(compiled, (state, batch, *args))
  stats = compiled.memory_analysis()
  outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
  peak = (
    stats.argument_size_in_bytes
    + outputs
    + stats.temp_size_in_bytes
    + stats.generated_code_size_in_bytes
  )
  shardings = _input_shardings(compiled, (state, batch, *args))
  _, batch_shardings, *args_shardings = shardings
  return Memory(
    {name: _bytes_of(tree) for name, tree in fields.items()},
    _bytes_of(batch, batch_shardings),
    sum(map(_bytes_of, args, args_shardings)),
    unused=unused,
    padding=stats.argument_size_in_bytes - used,
    outputs=outputs,
    program=stats.generated_code_size_in_bytes,
    temporaries=stats.temp_size_in_bytes,
    peak=peak,
    hbm=hbm,
    fits=None if hbm is None else peak <= hbm,
  )


def state_fields(state: PyTree) -> dict[str, PyTree]:
  """Returns the trees of a state by field, each wrapper's state by its name."""
  if not isinstance(state, train_state.TrainState):
    return {"state": state}
  fields = dict(fields_lib.array_fields(state))
  for name, tree in fields.pop("wrapper_states", {}).items():
    # A collection of the model may have the name of a wrapper.
    key = f"wrapper_states/{name}" if name in fields else name
    fields[key] = tree
  return {name: tree for name, tree in fields.items() if jax.tree.leaves(tree)}


def _bytes_of(tree: PyTree, shardings: Sequence[Any] | None = None) -> int:
  """Returns the bytes per device of a tree, without padding.

  Args:
    tree: The tree.
    shardings: The sharding of each leaf in the program; None, or None for a
      leaf, means the sharding that the leaf has.
  """
  leaves = jax.tree.leaves(tree)
  shardings = shardings or [None] * len(leaves)
  return sum(
    _bytes_per_device(leaf, sharding)
    for leaf, sharding in zip(leaves, shardings, strict=True)
  )


def _bytes_per_device(leaf: Any, sharding: Any = None) -> int:
  sharding = sharding or getattr(leaf, "sharding", None)
  shape: tuple[int, ...] = np.shape(leaf)
  # Without a sharding, a device holds the whole array.
  part = shape if sharding is None else sharding.shard_shape(shape)
  # JAX gives the dtype of a Python number; NumPy arrays become 32 bits.
  dtype = trees.dtype_of(leaf)
  if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
    dtype = jax.dtypes.canonicalize_dtype(dtype)
  return math.prod(part) * dtype.itemsize


def _input_shardings(
  compiled: Any, args: Sequence[PyTree]
) -> list[list[Any] | None]:
  """Returns the shardings of the leaves of each argument in the program.

  JAX leaves out arguments that the program does not read; their sharding is
  None.
  """
  flat = jax.tree.leaves(compiled.input_shardings, is_leaf=lambda x: x is None)
  counts = [len(jax.tree.leaves(arg)) for arg in args]
  if len(flat) != sum(counts):
    return [None] * len(args)
  ends = np.cumsum(counts).tolist()
  return [
    flat[end - count : end] for count, end in zip(counts, ends, strict=True)
  ]


def _argument_bytes(compiled: Any, args: Sequence[PyTree]) -> tuple[int, int]:
  """Returns the bytes of the arguments that a program reads, and of others."""
  used = unused = 0
  for arg, shardings in zip(
    args, _input_shardings(compiled, args), strict=True
  ):
    leaves = jax.tree.leaves(arg)
    for i, leaf in enumerate(leaves):
      is_unused = shardings is not None and shardings[i] is None
      nbytes = _bytes_per_device(leaf, shardings and shardings[i])
      if is_unused:
        unused += nbytes
      else:
        used += nbytes
  return used, unused
