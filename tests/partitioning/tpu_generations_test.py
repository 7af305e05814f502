"""Names of TPU topologies, and the devices that they describe."""

import pytest

from flaxshard.partitioning import described_devices
from flaxshard.partitioning import tpu_generations


@pytest.mark.parametrize(
  ("name", "num_slices", "expected"),
  [
    ("v5e:2x4", None, "v5e:2x4"),
    (" V5E : 2X4 ", None, "v5e:2x4"),
    ("v5e:2x4x1", None, "v5e:2x4"),
    ("2*v5e:4x4", None, "2*v5e:4x4"),
    ("2*v5e:4x4", 2, "2*v5e:4x4"),
    ("v5e:4x4", 2, "2*v5e:4x4"),
    ("v5e:1x1", 1, "v5e:1x1"),
    ("v3:32x32", None, "v3:32x32"),
    ("v5p:16x20x28", None, "v5p:16x20x28"),
    ("tpu7x:4x4x8", None, "tpu7x:4x4x8"),
  ],
)
def test_valid_name(name: str, num_slices: int | None, expected: str) -> None:
  assert str(tpu_generations.parse(name, num_slices)) == expected


@pytest.mark.parametrize(
  ("name", "parts"),
  [
    ("v5e-8", ["'v5e:2x4'"]),
    ("v5litepod-16", ["'v5e:4x4'"]),
    ("2*v5e-8", ["'2*v5e:2x4'"]),
    ("v5e:8", ["'v5e:2x4'"]),
    ("v4-8", ["'v4:2x2x1'"]),  # cores, of which a chip has two
    ("v2-8", ["'v2:2x2'"]),
    ("v5p-32", ["'v5p:2x2x4'"]),
    ("v5e", ["'v5e:2x4'", "tpu7x"]),
    ("v9:2x2", ["v2, v3, v4, v5e, v5p, v6e, tpu7x", "'v9'"]),
    ("trillium:2x4", ["'v6e'"]),
    ("v5:2x4", ["'v5p' or 'v5e'"]),
    ("v5e:3x5", ["15 chips", "256"]),
    ("v5e:1x2", ["2 chips"]),
    ("v5e:0x2", ["0 chips"]),
    ("v5e:4x64", ["'v5e:16x16'"]),
    ("v5p:32x32x32", ["8,960", "32,768"]),
    ("v5e:2x2x2", ["2 sides, got 3. Did you mean 'v5e:2x4'?"]),
    ("v4:2x2", ["3 sides", "'v4:2x2x1'"]),
    ("0*v5e:2x4", ["num_slices", "0"]),
  ],
)
def test_invalid_name_raises(name: str, parts: list[str]) -> None:
  with pytest.raises(ValueError) as info:
    tpu_generations.parse(name)
  for part in parts:
    assert part in str(info.value)


@pytest.mark.parametrize("name", ["v5e-512", "v5e-0", "v4-100000000"])
def test_no_hint_without_such_a_slice(name: str) -> None:
  with pytest.raises(ValueError) as info:
    tpu_generations.parse(name)
  assert "Did you mean" not in str(info.value)


def test_contradicting_slices_raise() -> None:
  with pytest.raises(ValueError, match="num_slices=3"):
    tpu_generations.parse("2*v5e:2x4", 3)


def test_described_devices_are_in_the_order_of_processes() -> None:
  name = tpu_generations.parse("2*v3:4x2")
  devices = list(described_devices.describe_devices(name))
  assert len(devices) == 32  # two slices of eight chips with two cores
  assert [d.id for d in devices[:9]] == [
    *(100_000, 100_001, 100_002, 100_003),  # chips (0, 0) and (1, 0)
    *(100_008, 100_009, 100_010, 100_011),  # chips (0, 1) and (1, 1)
    100_004,  # chip (2, 0), of the next process
  ]
  assert devices[8].process_index == 1 and devices[8].coords == [2, 0, 0]
  last = devices[-1]
  assert (last.process_index, last.slice_index, last.core_on_chip) == (3, 1, 1)
  assert last.coords == [3, 1, 0] and last.device_kind == "TPU v3"
