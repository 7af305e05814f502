"""Descriptions of TPU devices, for lowering without the TPU compiler.

They have the attributes of JAX's compile-only devices that shardings, tracing
and lowering read. Compiling for them, or putting an array on them, is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import itertools
import math
from typing import Any

from flaxshard.partitioning.tpu_generations import Shape
from flaxshard.partitioning.tpu_generations import TopologyName

# The runtime type of JAX's compile-only clients.
RUNTIME_TYPE = "compile_only_runtime"


class _Memory(str):
  """A memory kind; JAX compares it with strings, and reads its kind."""

  @property
  def kind(self) -> str:
    return str(self)


# The memories of every generation in libtpu 0.0.42; the first is the default.
_MEMORIES = (
  _Memory("device"),
  _Memory("pinned_host"),
  _Memory("unpinned_host"),
)


class _Client:
  """Stands for the runtime of the devices of one process, as JAX sees it."""

  platform = "tpu"
  runtime_type = RUNTIME_TYPE
  is_c_api = True  # JAX 0.12: Lowered.cost_analysis() is then None

  def __init__(self, process_index: int):
    self._process_index = process_index

  def process_index(self) -> int:
    """Returns the process of its devices: JAX takes all of them for local."""
    # With a device that is not local, jax.device_put ends the process with
    # SIGSEGV (JAX 0.10.2). With local ones it is a TypeError.
    return self._process_index

  def make_python_callback_from_host_send_and_recv(self, *args: Any) -> Any:
    """Returns what the lowered program keeps alive for a callback."""
    return args

  @property
  def platform_version(self) -> str:
    # JAX asks for it before it looks a program up in its compilation cache, and
    # JAX 0.10 in Lowered.cost_analysis().
    raise _compiler_missing()

  def compile(self, *_: Any, **__: Any) -> Any:
    """Raises a ValueError."""
    raise _compiler_missing()

  compile_and_load = compile


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DescribedDevice:
  """The description of a TPU device, without its compiler."""

  id: int
  process_index: int
  coords: list[int]
  core_on_chip: int
  num_cores: int
  device_kind: str
  client: Any
  platform: str = "tpu"
  slice_index: int = 0

  def addressable_memories(self) -> list[_Memory]:
    """Returns the memories that programs on the device can use."""
    return list(_MEMORIES)

  def default_memory(self) -> _Memory:
    """Returns the memory of arrays without a memory kind."""
    return _MEMORIES[0]

  def __reduce__(self) -> Any:
    # A copy would be another device, and meshes over it would differ.
    raise TypeError(
      "a TPU device cannot be pickled or copied; create the strategy or "
      "topology from its name again."
    )

  def __repr__(self) -> str:
    return (
      f"DescribedDevice(id={self.id}, {self.device_kind}, process_index="
      f"{self.process_index}, coords={tuple(self.coords)}, core_on_chip="
      f"{self.core_on_chip}, slice_index={self.slice_index})"
    )


def describe_devices(name: TopologyName) -> Iterator[DescribedDevice]:
  """Describes the devices of a topology, in the order of the TPU compiler.

  Args:
    name: The checked name of the topology.
  """
  generation, bounds = name.generation, name.chips_per_process
  grid = [n // m for n, m in zip(name.shape, bounds, strict=True)]
  x_length, y_length, _ = name.shape
  per_chip = generation.devices_per_chip
  processes = math.prod(grid)
  for slice_index in range(name.num_slices):
    # With several slices the compiler numbers those of slice s from
    # (s + 1) * 100000.
    first = (slice_index + 1) * 100_000 if name.num_slices > 1 else 0
    # Processes, and the chips of each, are ordered with x fastest.
    for process, origin in enumerate(_positions(grid)):
      process_index = slice_index * processes + process
      client = _Client(process_index)
      for offset in _positions(bounds):
        x, y, z = (
          n * m + k for n, m, k in zip(origin, bounds, offset, strict=True)
        )
        chip = x + x_length * (y + y_length * z)
        for core in range(per_chip):
          yield DescribedDevice(
            id=first + chip * per_chip + core,
            process_index=process_index,
            coords=[x, y, z],
            core_on_chip=core,
            num_cores=generation.cores_per_device,
            device_kind=generation.device_kind,
            client=client,
            slice_index=slice_index,
          )


def _positions(shape: Any) -> Iterator[Shape]:
  """Yields the places of a box, x fastest."""
  x_length, y_length, z_length = shape
  for z, y, x in itertools.product(
    range(z_length), range(y_length), range(x_length)
  ):
    yield x, y, z


def _compiler_missing() -> ValueError:
  return ValueError(
    "compiling for TPUs that this machine does not have needs the TPU "
    'compiler: pip install "flaxshard[tpu]". Without it shardings, abstract '
    "states and lowered programs are available."
  )
