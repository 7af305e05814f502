"""Generations of TPUs: the names, shapes and devices of their topologies."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from flaxshard.core import checks

# The chips along x, y and z that one process drives.
CHIPS_PER_PROCESS = (2, 2, 1)


@dataclasses.dataclass(frozen=True)
class Generation:
  """A generation of TPUs.

  Attributes:
    name: The name in topologies, such as "v5e".
    device_kind: JAX's name of its devices.
    rank: The number of dimensions of its torus: 2 or 3.
    devices_per_chip: Number of JAX devices on a chip.
    cores_per_device: Number of TensorCores of a device.
    chip_config: The compiler's name for this way of using a chip's cores; None
      is its default.
  """

  name: str
  device_kind: str
  rank: int
  devices_per_chip: int
  cores_per_device: int
  chip_config: str | None = None


# Source: the devices that libtpu 0.0.42 describes.
GENERATIONS = {
  generation.name: generation
  for generation in (
    Generation("v2", "TPU v2", 2, 2, 1),
    Generation("v3", "TPU v3", 2, 2, 1),
    # On Cloud TPU, JAX shows the two cores of a v4 chip as one device.
    Generation("v4", "TPU v4", 3, 1, 2, "megacore"),
    Generation("v5e", "TPU v5 lite", 2, 1, 1),
    Generation("v5p", "TPU v5", 3, 1, 2),
    Generation("v6e", "TPU v6 lite", 2, 1, 1),
    Generation("tpu7x", "TPU7x", 3, 2, 1),
  )
}

_FORM = re.compile(r"(?:(\d+)\s*\*\s*)?([a-z0-9]+):(\d+(?:x\d+)*)", re.I)


@dataclasses.dataclass(frozen=True)
class TopologyName:
  """A checked name of a topology.

  Attributes:
    generation: The generation of its TPUs.
    shape: The chips of a slice along x, y and z.
    num_slices: Number of slices.
  """

  generation: Generation
  shape: tuple[int, int, int]
  num_slices: int

  @property
  def layout(self) -> str:
    """The compiler's name of one slice, such as "v5e:2x4"."""
    sides = self.shape[: self.generation.rank]
    return f"{self.generation.name}:{'x'.join(map(str, sides))}"

  @property
  def chips_per_process(self) -> tuple[int, int, int]:
    """The chips along x, y and z that one process drives."""
    return (1, 1, 1) if math.prod(self.shape) == 1 else CHIPS_PER_PROCESS

  def __str__(self) -> str:
    slices = f"{self.num_slices}*" if self.num_slices > 1 else ""
    return f"{slices}{self.layout}"


def parse(name: Any, num_slices: Any = None) -> TopologyName:
  """Checks the name of a topology.

  Args:
    name: Such as "v5e:2x4", or "2*v5e:2x4" for two slices.
    num_slices: Number of slices; None: the number in the name, else 1.

  Raises:
    TypeError: `name` is not a string, or `num_slices` no integer.
    ValueError: There is no such topology.
  """
  checks.string("topology", name)
  match = _FORM.fullmatch(name.strip())
  if match is None:
    raise ValueError(
      f"topology={name!r} must be a generation and the chips of a slice, such "
      "as 'v5e:2x4' or 'v5p:4x4x8', or '2*v5e:2x4' for two slices."
    )
  slices, generation_name, sides = match.groups()
  generation = GENERATIONS.get(generation_name.lower())
  if generation is None:
    raise ValueError(
      f"topology={name!r}: the generation must be one of "
      f"{', '.join(GENERATIONS)}, got {generation_name!r}."
    )
  if num_slices is None:
    num_slices = int(slices or 1)
  num_slices = checks.integer("num_slices", num_slices, minimum=1)
  shape = [int(side) for side in sides.split("x")]
  return TopologyName(generation, (*shape, 1, 1)[:3], num_slices)


def described_devices(name: TopologyName) -> tuple[Any, ...]:
  """Returns descriptions of devices, for a machine without the compiler."""
  raise ValueError(
    f"Topology.named({str(name)!r}) needs the TPU compiler: pip install "
    '"flaxshard[tpu]".'
  )
