"""Memory that a step needs on a device, by what it is used for."""

from __future__ import annotations

import collections
from collections.abc import Mapping
import dataclasses
import re

from flax.training import train_state
import jax

from flaxshard.core import checks
from flaxshard.plans import step as step_lib

# GiB that a program on a TPU can use, by the kind of device and its cores.
# libtpu 0.0.42 names them when a program is too large: "exceeds available HBM
# (15.75G)". The rest of a chip's memory is the system's.
_HBM = {
  ("TPU v2", 1): 7.48,
  ("TPU v3", 1): 15.48,
  ("TPU v4", 1): 15.25,
  ("TPU v4", 2): 30.75,
  ("TPU v5 lite", 1): 15.75,
  ("TPU v5e", 1): 15.75,
  ("TPU v5", 2): 95.74,
  ("TPU v5p", 2): 95.74,
  ("TPU v6 lite", 1): 31.25,
  ("TPU v6e", 1): 31.25,
  ("TPU7x", 1): 94.75,
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)B?"
# libtpu stops before it assigns memory, with the bytes that arguments and
# temporaries need at least, or afterwards.
_NEEDED = re.compile(
  rf"(?:HLO temporaries \(|Used ){_SIZE}(?:\) exceeds available HBM \(| of )"
  rf"{_SIZE}"
)


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes on one device while a step runs.

  What only a compiled program tells is 0 if the compiler refuses the step.

  Attributes:
    state: Bytes of each field of the state, such as `params` and `opt_state`;
      the state of each wrapper is a field of its own.
    batch: Bytes of the batch.
    arguments: Bytes of the further arguments of the step.
    unused: Bytes of those of them all that the program does not read, which
      JAX leaves out.
    padding: Bytes that the layout of the device adds to the arguments.
    outputs: Bytes of the results that do not overwrite a donated argument.
    program: Bytes of the machine code.
    temporaries: Bytes of all other values.
    peak: Bytes in all. Of a step that the compiler refuses, those that it has
      counted until it gave up; None if its message has no number.
    hbm: Bytes that a device has for programs; None if unknown.
    refused: Whether the compiler refuses the step for its memory.
  """

  state: Mapping[str, int]
  batch: int
  arguments: int = 0
  unused: int = 0
  padding: int = 0
  outputs: int = 0
  program: int = 0
  temporaries: int = 0
  peak: int | None = None
  hbm: int | None = None
  refused: bool = False

  @property
  def state_bytes(self) -> int:
    """Bytes of the whole state."""
    return sum(self.state.values())

  @property
  def fits(self) -> bool | None:
    """Whether the step fits the device; None if unknown."""
    if self.refused:
      return False
    return None if self.excess is None else not self.excess

  @property
  def excess(self) -> int | None:
    """Bytes that the step needs more than a device has; None if unknown."""
    if self.peak is None or self.hbm is None:
      return None
    return max(self.peak - self.hbm, 0)


def read_memory(step: step_lib.Step) -> Memory:
  """Returns the memory of a step."""
  hbm = _usable_hbm(step.device)
  total = sum(leaf.nbytes for leaf in step.leaves)
  state = _bytes_of_fields(step)
  batch = sum(leaf.nbytes for leaf in step.batch_leaves)
  further = total - batch - sum(state.values())
  if step.compiled is None:
    needed, available = None, hbm
    if match := _NEEDED.search(step.error):
      needed = int(float(match[1]) * _UNITS[match[2]])
      available = int(float(match[3]) * _UNITS[match[4]])
    return Memory(
      state, batch, further, peak=needed, hbm=available, refused=True
    )
  unused = sum(leaf.nbytes for leaf in step.leaves if not leaf.is_read)
  stats = step.compiled.memory_analysis()
  outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
  return Memory(
    state,
    batch,
    further,
    unused=unused,
    padding=stats.argument_size_in_bytes - (total - unused),
    outputs=outputs,
    program=stats.generated_code_size_in_bytes,
    temporaries=stats.temp_size_in_bytes,
    peak=(
      stats.argument_size_in_bytes
      + outputs
      + stats.temp_size_in_bytes
      + stats.generated_code_size_in_bytes
    ),
    hbm=hbm,
  )


def _bytes_of_fields(step: step_lib.Step) -> dict[str, int]:
  """Returns the bytes of each field of a state, and of each wrapper."""
  if not isinstance(step.state, train_state.TrainState):
    return {"state": sum(leaf.nbytes for leaf in step.state_leaves)}
  fields: dict[str, int] = collections.defaultdict(int)
  for leaf in step.state_leaves:
    name, *rest = leaf.path.split("/")
    if name == "wrapper_states":
      name = rest[0]
      # A collection of the model may have the name of a wrapper.
      if hasattr(step.state, name):
        name = f"wrapper_states/{name}"
    fields[name] += leaf.nbytes
  return dict(fields)


def _usable_hbm(device: jax.Device) -> int | None:
  """Returns the bytes that a program on a device can use; None: unknown.

  On a device of this machine that is the limit of JAX's allocator, which a GPU
  sets by XLA_PYTHON_CLIENT_MEM_FRACTION. Else it is the figure of the table.
  """
  try:
    stats = device.memory_stats() or {}
  # Devices that exist only for the compiler have no allocator.
  except Exception:
    stats = {}
  if "bytes_limit" in stats:
    return int(stats["bytes_limit"])
  cores = getattr(device, "num_cores", None) or 1
  gigabytes = _HBM.get((device.device_kind, cores))
  return None if gigabytes is None else int(gigabytes * 2**30)


def rows_of(memory: Memory) -> list[tuple[str, str]]:
  """Returns the names and the sizes of a table of the memory."""
  rows = [(name, show_size(n)) for name, n in memory.state.items()]
  rows.append(("batch", show_size(memory.batch)))
  optional = {
    "other arguments": memory.arguments,
    "not read by the step": -memory.unused,
    "padding of the arguments": memory.padding,
    "new outputs": memory.outputs,
    "program": memory.program,
  }
  rows += [(name, show_size(n)) for name, n in optional.items() if n]
  at_least = "at least " if memory.refused else ""
  if not memory.refused:
    rows.append(("temporaries", show_size(memory.temporaries)))
  rows.append(("peak", at_least + show_size(memory.peak)))
  if memory.hbm is not None:
    share = f" ({memory.peak / memory.hbm:.0%} used)" if memory.peak else ""
    rows.append(("HBM for programs", show_size(memory.hbm) + share))
  if memory.fits is False:
    rows.append(("DOES NOT FIT, over by", at_least + show_size(memory.excess)))
  return rows


def show_size(nbytes: int | None) -> str:
  """Returns a number of bytes as text; "unknown" for None."""
  if nbytes is None:
    return "unknown"
  sign = "-" if nbytes < 0 else ""
  return sign + checks.format_bytes(abs(nbytes))
