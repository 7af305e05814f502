"""Speeds and memory of accelerators, from their makers' publications.

Figures that the named sources do not give are None: nothing is estimated.

Sources:

- Google Cloud's pages of each TPU: https://docs.cloud.google.com/tpu/docs/ with
  `v3`, `v4`, `v5e`, `v5p`, `v6e` and `tpu7x`.
- [scaling book]: J. Austin et al., How to Scale Your Model, "TPU specs",
  https://jax-ml.github.io/scaling-book/tpus/
- [ISCA 2023]: N. Jouppi et al., TPU v4: An Optically Reconfigurable
  Supercomputer, table 4, https://arxiv.org/abs/2304.01433
- [libtpu]: the memory that libtpu 0.0.42 names when a program is too large,
  "exceeds available HBM (15.75G)". The rest of a chip's memory is the system's.
- NVIDIA's data sheets: https://www.nvidia.com/en-us/data-center/ with `a100`,
  `h100` and `h200`. Rates are those without sparsity, half of the printed ones.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any, Literal

_GIB = 2**30
_GB = 1e9
_TERA = 1e12


@dataclasses.dataclass(frozen=True)
class Chip:
  """One kind of chip.

  Figures are those of a whole chip, unless "device" is said. A JAX device is a
  whole chip or one of its cores; see `Device`.

  Attributes:
    name: The usual name, such as "TPU v5e".
    cores: TensorCores of a chip; a GPU counts as one.
    flops: Peak FLOP/s by the dtype of the operands of a matrix product: "bf16",
      "f16", "f32" (at JAX's default precision), "int8", "fp8".
    hbm: Bytes that a program can use, by the cores of a device.
    hbm_bandwidth: Bytes per second between HBM and the cores.
    link_bandwidth: Bytes per second of one link between two chips, in one
      direction.
    links: Number of these links. A TPU has two for each dimension of the torus.
    ring: When the chips along a dimension of a slice form a ring: with the
      dimension's full length (an int), or if all sides of the slice are
      multiples of four ("cubes"). None: all are connected with all.
    dcn_bandwidth: Bytes per second to other slices or hosts, in one direction.
  """

  name: str
  cores: int
  flops: Mapping[str, float]
  hbm: Mapping[int, int]
  hbm_bandwidth: float | None
  link_bandwidth: float | None
  links: int
  ring: int | Literal["cubes"] | None
  dcn_bandwidth: float | None


@dataclasses.dataclass(frozen=True)
class Device:
  """A JAX device: a chip, or a share of its cores.

  Attributes:
    chip: The chip.
    cores: Number of the chip's cores that the device has.
  """

  chip: Chip
  cores: int

  @property
  def share(self) -> float:
    """The device's share of the chip, such as 0.5."""
    return self.cores / self.chip.cores

  @property
  def hbm_bytes(self) -> int | None:
    """Bytes of HBM that a program on the device can use; None: unknown."""
    return self.chip.hbm.get(self.cores)

  @property
  def hbm_bandwidth(self) -> float | None:
    """Bytes per second between HBM and the device; None: unknown."""
    whole = self.chip.hbm_bandwidth
    return None if whole is None else whole * self.share

  @property
  def dcn_bandwidth(self) -> float | None:
    """Bytes per second from the device to other slices; None: unknown."""
    whole = self.chip.dcn_bandwidth
    return None if whole is None else whole * self.share

  def flops(self, dtype: str = "bf16") -> float | None:
    """Returns the device's peak FLOP/s for a dtype; None: unknown.

    Args:
      dtype: One of the keys of `Chip.flops`.
    """
    whole = self.chip.flops.get(dtype)
    return None if whole is None else whole * self.share


def _tpu_flops(bf16: float, **others: float) -> dict[str, float]:
  # By default JAX lets the TPU round float32 operands to bfloat16, in one pass:
  # https://docs.jax.dev/en/latest/_autosummary/jax.lax.Precision.html
  # The TPU has no float16 units; XLA computes in types that it has.
  rates = {"bf16": bf16, "f16": bf16, "f32": bf16, **others}
  return {dtype: rate * _TERA for dtype, rate in rates.items()}


def _gpu(
  name: str,
  gigabytes: float,
  bandwidth: float,
  links: int,
  *,
  bf16: float,
  tf32: float,
  **others: float,
) -> Chip:
  """Returns a GPU with NVLink; by default JAX multiplies float32 as TF32."""
  rates = {"bf16": bf16, "f16": bf16, "f32": tf32, **others}
  return Chip(
    name,
    1,
    {dtype: rate * _TERA for dtype, rate in rates.items()},
    # The data sheet's. Programs can use what JAX's allocator says.
    {1: int(gigabytes * _GB)},
    bandwidth * _GB,
    # Data sheets give all links in both directions: 12 of 50 GB/s for an A100
    # (600 GB/s), 18 for an H100 and H200 (900 GB/s).
    25 * _GB,
    links,
    None,
    # It depends on the host's network cards.
    None,
  )


_V2 = Chip(
  "TPU v2",
  2,
  # Google publishes no table for it. Its speeds are unknown here.
  {},
  {1: int(7.48 * _GIB)},  # [libtpu]
  None,
  None,
  4,
  16,
  None,
)

_V3 = Chip(
  "TPU v3",
  2,
  _tpu_flops(123),
  {1: int(15.48 * _GIB)},  # [libtpu]; 32 GiB a chip
  900 * _GB,
  70 * _GB,  # [ISCA 2023], "4 links @ 70 GB/s"
  4,
  32,  # a pod of 1,024 chips is a torus of 32x32
  None,
)

_V4 = Chip(
  "TPU v4",
  2,
  _tpu_flops(275, int8=275),
  {1: int(15.25 * _GIB), 2: int(30.75 * _GIB)},  # [libtpu]; 32 GiB a chip
  1200 * _GB,
  50 * _GB,  # [ISCA 2023], "6 links @ 50 GB/s"
  6,
  "cubes",
  6.25 * _GB,  # [scaling book]
)

_V5E = Chip(
  "TPU v5e",
  1,
  _tpu_flops(197, int8=393),
  {1: int(15.75 * _GIB)},  # [libtpu]; 16 GB a chip
  819 * _GB,
  50 * _GB,  # 400 GB/s a chip: 4 links, both directions
  4,
  16,  # a pod of 256 chips is a torus of 16x16
  3.125 * _GB,  # two cards of 100 Gbit/s for the 8 chips of a host
)

_V5P = Chip(
  "TPU v5p",
  2,
  _tpu_flops(459, fp8=459, int8=918),  # int8: [scaling book]
  {2: int(95.74 * _GIB)},  # [libtpu]
  2765 * _GB,
  100 * _GB,  # 1200 GB/s a chip: 6 links, both directions
  6,
  "cubes",
  6.25 * _GB,  # 50 Gbit/s a chip
)

_V6E = Chip(
  "TPU v6e",
  1,
  _tpu_flops(918, fp8=918, int8=1836),
  {1: int(31.25 * _GIB)},  # [libtpu]; 32 GB a chip
  1638 * _GB,  # the page of tpu7x; that of v6e rounds to 1600
  100 * _GB,  # 800 GB/s a chip: 4 links, both directions
  4,
  16,
  12.5 * _GB,  # 100 Gbit/s a chip
)

_TPU7X = Chip(
  "TPU7x",
  2,
  _tpu_flops(2307, fp8=4614),
  {1: int(94.75 * _GIB)},  # [libtpu]; 192 GiB a chip
  7380 * _GB,
  100 * _GB,  # 1200 GB/s a chip: 6 links, both directions
  6,
  "cubes",
  12.5 * _GB,  # 100 Gbit/s a chip
)

_AMPERE = {"bf16": 312.0, "tf32": 156.0, "int8": 624.0}
_HOPPER = {"bf16": 989.5, "tf32": 494.5, "fp8": 1979.0, "int8": 1979.0}
_A100_40GB = _gpu("A100 SXM 40 GB", 40, 1555, 12, **_AMPERE)
_A100_80GB = _gpu("A100 SXM 80 GB", 80, 2039, 12, **_AMPERE)
_H100 = _gpu("H100 SXM", 80, 3350, 18, **_HOPPER)
_H200 = _gpu("H200 SXM", 141, 4800, 18, **_HOPPER)

_CHIPS = {
  "TPU v2": _V2,
  "TPU v3": _V3,
  "TPU v4": _V4,
  "TPU v5 lite": _V5E,
  "TPU v5e": _V5E,
  "TPU v5": _V5P,
  "TPU v5p": _V5P,
  "TPU v6 lite": _V6E,
  "TPU v6e": _V6E,
  "TPU7x": _TPU7X,
  "NVIDIA A100-SXM4-40GB": _A100_40GB,
  "NVIDIA A100-SXM4-80GB": _A100_80GB,
  "NVIDIA H100 80GB HBM3": _H100,
  "NVIDIA H200": _H200,
}


def find_device(device: Any) -> Device | None:
  """Returns what is known of a JAX device; None if its chip is not known.

  Args:
    device: A `jax.Device`, also one that exists only for the compiler.

  Example:
    >>> import jax
    >>> print(find_device(jax.devices("cpu")[0]))
    None
  """
  chip = _CHIPS.get(device.device_kind)
  if chip is None:
    return None
  # A v4 or v5p device has both cores of its chip, a v3 or TPU7x device one.
  return Device(chip, getattr(device, "num_cores", None) or 1)


def usable_hbm_bytes(device: Any) -> int | None:
  """Returns the bytes that a program on a device can use; None: unknown.

  On a device of this machine that is the limit of JAX's allocator, which a GPU
  sets by XLA_PYTHON_CLIENT_MEM_FRACTION. Else it is the figure of the table.

  Args:
    device: A `jax.Device`, also one that exists only for the compiler.
  """
  try:
    stats = device.memory_stats() or {}
  # Devices that exist only for the compiler have no allocator.
  except Exception:
    stats = {}
  if "bytes_limit" in stats:
    return int(stats["bytes_limit"])
  found = find_device(device)
  return None if found is None else found.hbm_bytes


def has_ring(chip: Chip, sides: tuple[int, ...], dimension: int) -> bool:
  """Returns whether the chips along a dimension of a slice form a ring.

  Without one they form a line, whose first and last chip have no link.
  Sources: https://docs.cloud.google.com/tpu/docs/v4 ("3D mesh and 3D torus")
  and the scaling book.

  Args:
    chip: The kind of chip.
    sides: Number of chips along each dimension of the slice.
    dimension: Which dimension.

  Example:
    >>> has_ring(_V5E, (8, 16), 0), has_ring(_V5E, (8, 16), 1)
    (False, True)
    >>> has_ring(_V5P, (4, 4, 8), 0), has_ring(_V5P, (2, 2, 4), 2)
    (True, False)
  """
  if chip.ring == "cubes":
    return len(sides) == 3 and all(side % 4 == 0 for side in sides)
  return chip.ring is not None and sides[dimension] == chip.ring
