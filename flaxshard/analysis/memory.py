"""Memory that a step needs on a device, by what it is used for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

from flax.training import train_state
import jax
import numpy as np

from flaxshard.analysis import tables
from flaxshard.analysis.compilation import Compilation
from flaxshard.compiled.buffers import Buffer
from flaxshard.core import trees
from flaxshard.partitioning import compile_only
from flaxshard.state import fields as fields_lib
from flaxshard.state import summary

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes on one device while a step runs.

  Attributes:
    state: Bytes of each field of the state, such as `params` and `opt_state`;
      the state of each wrapper is a field of its own.
    batch: Bytes of the batch.
    arguments: Bytes of the further arguments of the step.
    unused: Bytes of those of them all that the program does not read, which
      JAX leaves out; None if unknown.
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
  buffers: tuple[Buffer, ...] = ()

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
  args: Sequence[PyTree],
  batch_argnum: int,
  compilation: Compilation,
  hbm: int | None,
  buffers: tuple[Buffer, ...] = (),
) -> Memory:
  """Returns the memory of a step.

  Args:
    args: The arguments of the step, arrays or `jax.ShapeDtypeStruct`s. The
      state is the first one.
    batch_argnum: Position of the batch.
    compilation: The compiled step.
    hbm: Bytes that a device has; None if unknown.
    buffers: The largest buffers of the compiled step.
  """
  compiled = compilation.compiled
  unused = 0
  if compiled is not None:
    args, unused = _split_as_compiled(args, compiled)
  total, batch = _bytes_of(args), _bytes_of(args[batch_argnum])
  memory = Memory(
    {name: _bytes_of(tree) for name, tree in state_fields(args[0]).items()},
    batch=batch,
    arguments=total - batch - _bytes_of(args[0]),
    hbm=hbm,
  )
  if compiled is None and compilation.error is None:
    return memory
  if compiled is None:
    return dataclasses.replace(
      memory,
      peak=compilation.needed,
      peak_is_lower_bound=compilation.needed is not None,
      hbm=compilation.available or hbm,
      fits=False,
    )
  stats = compiled.memory_analysis()
  outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
  peak = (
    stats.argument_size_in_bytes
    + outputs
    + stats.temp_size_in_bytes
    + stats.generated_code_size_in_bytes
  )
  return dataclasses.replace(
    memory,
    unused=unused,
    padding=stats.argument_size_in_bytes - (total - unused),
    outputs=outputs,
    program=stats.generated_code_size_in_bytes,
    temporaries=stats.temp_size_in_bytes,
    peak=peak,
    buffers=buffers,
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


def _bytes_of(tree: PyTree) -> int:
  """Returns the bytes per device of a tree, without padding."""
  return sum(map(_bytes_per_device, jax.tree.leaves(tree)))


def _bytes_per_device(leaf: Any) -> int:
  sharding = getattr(leaf, "sharding", None)
  shape: tuple[int, ...] = np.shape(leaf)
  # Without a sharding, a device holds the whole array.
  part = shape if sharding is None else sharding.shard_shape(shape)
  dtype = trees.dtype_of(leaf)
  if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
    # Without jax_enable_x64, JAX turns 64 bits of NumPy into 32.
    dtype = jax.dtypes.canonicalize_dtype(dtype)
  return math.prod(part) * dtype.itemsize


def _split_as_compiled(
  args: Sequence[PyTree], compiled: Any
) -> tuple[Sequence[PyTree], int]:
  """Gives arguments the shardings of a program, which may split them itself.

  Args:
    args: The arguments.
    compiled: The program.

  Returns:
    The arguments, and the bytes per device of those that the program does not
    read, which JAX leaves out.
  """
  leaves, treedef = jax.tree.flatten(args)
  shardings = jax.tree.leaves(
    compiled.input_shardings, is_leaf=lambda x: x is None
  )
  split, unused = [], 0
  for leaf, sharding in zip(leaves, shardings, strict=True):
    if sharding is None:
      unused += _bytes_per_device(leaf)
    else:
      leaf = compile_only.abstract_array(leaf, sharding)
    split.append(leaf)
  return jax.tree.unflatten(treedef, split), unused


def format_bytes(nbytes: int | None) -> str:
  """Returns a number of bytes as text; "unknown" for None."""
  return "unknown" if nbytes is None else summary.format_bytes(nbytes)


def tables_of(memory: Memory) -> list[tables.Table]:
  """Returns the memory and its largest buffers as tables."""
  rows = [(name, format_bytes(n)) for name, n in memory.state.items()]
  rows.append(("batch", format_bytes(memory.batch)))
  if memory.arguments:
    rows.append(("other arguments", format_bytes(memory.arguments)))
  if memory.unused:
    rows.append(("not read by the step", f"-{format_bytes(memory.unused)}"))
  optional = {
    "padding of the arguments": memory.padding,
    "new outputs": memory.outputs,
    "program": memory.program,
  }
  rows += [(name, format_bytes(n)) for name, n in optional.items() if n]
  if not memory.peak_is_lower_bound:
    rows.append(("temporaries", format_bytes(memory.temporaries)))
  bold = {len(rows)}
  peak = format_bytes(memory.peak)
  at_least = "at least " if memory.peak_is_lower_bound else ""
  rows.append(("peak", at_least + peak))
  if memory.hbm is not None:
    share = ""
    if memory.peak is not None:
      share = f" ({memory.peak / memory.hbm:.0%} used)"
    rows.append(("HBM for programs", format_bytes(memory.hbm) + share))
  if memory.fits is False:
    bold.add(len(rows))
    excess = f"{at_least}{format_bytes(memory.excess)}"
    rows.append(("DOES NOT FIT, over by", excess))
  shown = [
    tables.Table(
      "memory per device", rows, numbers=frozenset({1}), bold=frozenset(bold)
    )
  ]
  if memory.buffers:
    shown.append(
      tables.Table(
        "largest buffers at the peak",
        [
          (format_bytes(b.nbytes), b.shape, b.kind, b.origin, b.source)
          for b in memory.buffers
        ],
        numbers=frozenset({0}),
      )
    )
  return shown
