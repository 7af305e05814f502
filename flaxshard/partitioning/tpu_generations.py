"""Generations of TPUs: the names and shapes of their topologies."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any

from flaxshard.core import checks

Shape = tuple[int, int, int]

# The chips along x, y and z that one process drives, in slices of several.
_CHIPS_PER_PROCESS = (2, 2, 1)


@dataclasses.dataclass(frozen=True)
class Generation:
  """A generation of TPUs.

  Attributes:
    name: The name in topologies, such as "v5e".
    device_kind: JAX's name of its devices.
    rank: The number of dimensions of its network: 2 or 3.
    devices_per_chip: Number of JAX devices on a chip.
    cores_per_device: Number of TensorCores of a device.
    max_chips: Number of chips of the largest slice.
    chip_config: The compiler's name for this way of using a chip's cores; None
      is its default.
  """

  name: str
  device_kind: str
  rank: int
  devices_per_chip: int
  cores_per_device: int
  max_chips: int
  chip_config: str | None = None


# Sources: the devices that libtpu 0.0.42 describes; the sizes of pods in the
# documentation of Cloud TPU (cloud.google.com/tpu/docs/system-architecture).
GENERATIONS = {
  generation.name: generation
  for generation in (
    Generation("v2", "TPU v2", 2, 2, 1, 16 * 16),
    Generation("v3", "TPU v3", 2, 2, 1, 32 * 32),
    # On Cloud TPU, JAX shows the two cores of a v4 chip as one device.
    Generation("v4", "TPU v4", 3, 1, 2, 16 * 16 * 16, "megacore"),
    Generation("v5e", "TPU v5 lite", 2, 1, 1, 16 * 16),
    Generation("v5p", "TPU v5", 3, 1, 2, 16 * 20 * 28),
    Generation("v6e", "TPU v6 lite", 2, 1, 1, 16 * 16),
    Generation("tpu7x", "TPU7x", 3, 2, 1, 9216),
  )
}

# Other names of generations, for the hints in error messages.
_ALIASES = {
  "v5lite": "v5e",
  "v5litepod": "v5e",
  "v6": "v6e",
  "v7": "tpu7x",
  "v7x": "tpu7x",
  "tpu7": "tpu7x",
  "ironwood": "tpu7x",
  "trillium": "v6e",
}

_FORM = re.compile(r"(?:(\d+)\*)?(\w+):(\d+(?:x\d+)*)", re.ASCII)
_ACCELERATOR_TYPE = re.compile(r"(?:(\d+)\*)?(\w+?)[-:_](\d+)", re.ASCII)


@dataclasses.dataclass(frozen=True)
class TopologyName:
  """The checked name of a topology.

  Attributes:
    generation: The generation of its TPUs.
    shape: The chips of a slice along x, y and z.
    num_slices: Number of slices.
  """

  generation: Generation
  shape: Shape
  num_slices: int = 1

  @property
  def layout(self) -> str:
    """The compiler's name of one slice, such as "v5e:2x4"."""
    sides = self.shape[: self.generation.rank]
    return f"{self.generation.name}:{'x'.join(map(str, sides))}"

  @property
  def chips_per_process(self) -> Shape:
    """The chips along x, y and z that one process drives."""
    return (1, 1, 1) if self.shape == (1, 1, 1) else _CHIPS_PER_PROCESS

  def __str__(self) -> str:
    slices = f"{self.num_slices}*" if self.num_slices > 1 else ""
    return f"{slices}{self.layout}"


def parse(name: Any, num_slices: Any = None) -> TopologyName:
  """Checks the name of a topology.

  Args:
    name: Such as "v5e:2x4", or "2*v5e:2x4" for two slices.
    num_slices: Number of slices; None: the number in the name, else 1.

  Raises:
    TypeError: `name` is not a string, or `num_slices` not an integer.
    ValueError: There is no such topology, or the name has another number of
      slices.

  Example:
    >>> str(parse("v5e:4x4", num_slices=2))
    '2*v5e:4x4'
  """
  checks.string("topology", name)
  text = re.sub(r"\s", "", name).lower()
  match = _FORM.fullmatch(text)
  if match is None or "x" not in match[3]:
    raise ValueError(
      f"topology={name!r} must be a generation of TPUs and the chips of a "
      "slice along each axis, such as 'v5e:2x4', 'v5p:4x4x8', or '2*v5e:2x4' "
      f"for two slices; the generations are {', '.join(GENERATIONS)}."
      f"{_suggest_name(text)}"
    )
  generation = GENERATIONS.get(match[2])
  if generation is None:
    raise ValueError(
      f"topology={name!r}: the generation must be one of "
      f"{', '.join(GENERATIONS)}, got {match[2]!r}."
      f"{_suggest_generation(match[2])}"
    )
  named_slices = None if match[1] is None else int(match[1])
  given = named_slices if num_slices is None else num_slices
  slices = checks.integer(
    "num_slices", 1 if given is None else given, minimum=1
  )
  if named_slices not in (None, slices):
    raise ValueError(
      f"num_slices={slices} must be None or the number of slices in the name, "
      f"topology={name!r}."
    )
  shape = _check_shape(name, generation, [int(n) for n in match[3].split("x")])
  return TopologyName(generation, shape, slices)


def _check_shape(name: str, generation: Generation, sides: list[int]) -> Shape:
  """Returns the chips along x, y and z, if the generation has that shape."""
  rank = generation.rank
  where = f"topology={name!r}: {generation.name} has"
  # A third side of 1 describes the same slice of a generation with two.
  if len(sides) != rank and sides[rank:] != [1]:
    raise ValueError(
      f"{where} slices of {rank} sides, got {len(sides)}."
      f"{_suggest_shape(generation, math.prod(sides))}"
    )
  x, y, z = (*sides, 1)[:3]
  if not _is_valid(generation, (x, y, z)):
    raise ValueError(
      f"{where} slices of one chip, or of even lengths along x and y, with at "
      f"most {generation.max_chips:,} chips, got {math.prod(sides):,} chips."
      f"{_suggest_shape(generation, math.prod(sides))}"
    )
  return x, y, z


def _is_valid(generation: Generation, shape: Shape) -> bool:
  # Processes of 2 x 2 chips fill the slice.
  chips = math.prod(shape)
  whole = all(
    n % m == 0 for n, m in zip(shape, _CHIPS_PER_PROCESS, strict=True)
  )
  # The largest slice of a two-dimensional generation is a square.
  side = math.isqrt(generation.max_chips) if generation.rank == 2 else chips
  fits = 0 < chips <= generation.max_chips and max(shape) <= side
  return chips == 1 or (whole and fits)


def _default_shape(generation: Generation, chips: int) -> Shape | None:
  """Returns the shape that is closest to a cube, or None if there is none."""
  divisors = [n for n in range(1, chips + 1) if chips % n == 0]
  shapes = [
    (x, y, chips // (x * y))
    for x, y in itertools.product(divisors, repeat=2)
    if chips % (x * y) == 0 and (generation.rank == 3 or x * y == chips)
  ]
  valid = [shape for shape in shapes if _is_valid(generation, shape)]
  return min(valid, key=lambda s: (max(s), sum(s), s), default=None)


def _suggest_shape(generation: Generation, chips: int, slices: int = 1) -> str:
  """Returns a hint at a slice of that many chips, or "" if there is none."""
  # Finding the divisors of a very large number takes long.
  if not 0 < chips <= generation.max_chips:
    return ""
  shape = _default_shape(generation, chips)
  if shape is None:
    return ""
  return f" Did you mean {str(TopologyName(generation, shape, slices))!r}?"


def _suggest_name(text: str) -> str:
  """Returns a hint for a name like that of an accelerator: "v5litepod-8"."""
  match = _ACCELERATOR_TYPE.fullmatch(text)
  if match is None:
    return ""
  generation = GENERATIONS.get(_ALIASES.get(match[2], match[2]))
  if generation is None:
    return ""
  # Cloud TPU's names count TensorCores.
  cores = generation.devices_per_chip * generation.cores_per_device
  chips = int(match[3]) // cores
  return _suggest_shape(generation, chips, int(match[1] or 1))


def _suggest_generation(word: str) -> str:
  """Returns a hint for an unknown generation, or "" if none is similar."""
  alias = _ALIASES.get(word)
  if alias is not None:
    return f" Did you mean {alias!r}?"
  return checks.did_you_mean(word, GENERATIONS)


def topology_name(
  device_kind: str, shape: Shape, num_slices: int, num_devices: int
) -> str | None:
  """Returns the name of a topology, or None if it has none.

  Args:
    device_kind: JAX's name of its devices.
    shape: The chips of a slice along x, y and z.
    num_slices: Number of slices.
    num_devices: Number of devices of all slices.

  Example:
    >>> topology_name("TPU v5 lite", (2, 4, 1), 1, 8)
    'v5e:2x4'
  """
  for generation in GENERATIONS.values():
    devices = num_slices * math.prod(shape) * generation.devices_per_chip
    if (
      generation.device_kind == device_kind
      and devices == num_devices
      and _is_valid(generation, shape)
    ):
      return str(TopologyName(generation, shape, num_slices))
  return None
