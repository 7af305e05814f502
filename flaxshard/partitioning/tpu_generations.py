"""Generations of TPUs: the names, shapes and devices of their topologies."""

from __future__ import annotations

from collections.abc import Iterator
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
      f"{_hint(text)}"
    )
  generation = GENERATIONS.get(match[2])
  if generation is None:
    other = _ALIASES.get(match[2])
    hint = f" Did you mean {other + ':' + match[3]!r}?" if other else ""
    raise ValueError(
      f"topology={name!r}: the generation must be one of "
      f"{', '.join(GENERATIONS)}, got {match[2]!r}.{hint}"
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
      f"{where} slices of {rank} sides, such as "
      f"{_default_name(generation, 8)!r}, got {len(sides)}."
      f"{_other_shapes(generation, sides)}"
    )
  x, y, z = (*sides, 1)[:3]
  if not _is_valid(generation, (x, y, z)):
    raise ValueError(
      f"{where} slices of one chip, or of even lengths along x and y, with at "
      f"most {generation.max_chips:,} chips, got {math.prod(sides):,} chips."
      f"{_other_shapes(generation, sides)}"
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


def _default_name(generation: Generation, chips: int, slices: int = 1) -> str:
  """Returns the name of a slice of that many chips, or "" without a shape."""
  shape = _default_shape(generation, min(chips, generation.max_chips))
  return str(TopologyName(generation, shape, slices)) if shape else ""


def _other_shapes(generation: Generation, sides: list[int]) -> str:
  """Returns a hint at a valid shape with as many chips, or "" without one."""
  chips = math.prod(sides)
  named = 0 < chips <= generation.max_chips and _default_name(generation, chips)
  return f" Did you mean {named!r}?" if named else ""


def _hint(text: str) -> str:
  """Returns a hint for a name like that of an accelerator: "v5litepod-8"."""
  match = _ACCELERATOR_TYPE.fullmatch(text)
  if match is None:
    return ""
  generation = GENERATIONS.get(_ALIASES.get(match[2], match[2]))
  if generation is None:
    return ""
  # Cloud TPU's names count TensorCores.
  cores = generation.devices_per_chip * generation.cores_per_device
  chips = max(int(match[3]) // cores, 1)
  named = _default_name(generation, chips, int(match[1] or 1))
  return f" Did you mean {named!r}?" if named else ""


# -- Devices.


class _DescribedClient:
  """Stands for the compiler of described devices, as JAX sees it.

  Tracing and lowering read its facts. Compiling raises a ValueError.
  """

  platform = "tpu"
  runtime_type = "compile_only_runtime"

  def process_index(self) -> int:
    """Returns a number that no described device has: none is local."""
    return -1

  @property
  def platform_version(self) -> str:
    # JAX asks for it before it looks a program up in its compilation cache.
    raise _compiler_missing()

  def compile(self, *_: Any, **__: Any) -> Any:
    """Raises a ValueError."""
    raise _compiler_missing()

  compile_and_load = compile


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DescribedDevice:
  """The description of a TPU device, without its compiler.

  It has the attributes of the compile-only devices of JAX that shardings,
  tracing and lowering use.
  """

  id: int
  process_index: int
  coords: list[int]
  core_on_chip: int
  num_cores: int
  device_kind: str
  client: Any
  platform: str = "tpu"
  slice_index: int = 0

  def __repr__(self) -> str:
    return (
      f"DescribedDevice(id={self.id}, {self.device_kind}, process_index="
      f"{self.process_index}, coords={tuple(self.coords)}, core_on_chip="
      f"{self.core_on_chip}, slice_index={self.slice_index})"
    )


def described_devices(name: TopologyName) -> Iterator[DescribedDevice]:
  """Describes the devices of a topology, in the order of the TPU compiler.

  Args:
    name: The checked name of the topology.
  """
  generation, bounds = name.generation, name.chips_per_process
  client = _DescribedClient()
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
      for offset in _positions(bounds):
        x, y, z = (
          n * m + k for n, m, k in zip(origin, bounds, offset, strict=True)
        )
        chip = x + x_length * (y + y_length * z)
        for core in range(per_chip):
          yield DescribedDevice(
            id=first + chip * per_chip + core,
            process_index=slice_index * processes + process,
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
