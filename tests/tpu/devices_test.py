"""The devices of named topologies are those of the TPU compiler."""

import os
from typing import Any

import pytest

from flaxshard.partitioning import compile_only
from flaxshard.partitioning import described_devices
from flaxshard.partitioning import tpu_generations

pytestmark = pytest.mark.tpu

_ATTRIBUTES = (
  *("id", "process_index", "core_on_chip", "num_cores", "device_kind"),
  "platform",
)


@pytest.mark.parametrize(
  "name",
  [
    *("v2:2x2", "v3:4x8", "v4:1x1x1", "v4:4x4x2", "2*v4:2x2x1", "v5e:1x1"),
    *("v5e:2x4", "2*v5e:4x8", "3*v5p:2x4x4", "v5p:16x20x28", "v6e:16x16"),
    *("tpu7x:4x4x2", "2*tpu7x:2x2x1"),
  ],
)
def test_descriptions_equal_those_of_libtpu(name: str) -> None:
  checked = tpu_generations.parse(name)
  given = compile_only.devices(checked)
  described = list(described_devices.describe_devices(checked))

  def facts(device: Any) -> list[Any]:
    values = [getattr(device, name) for name in _ATTRIBUTES]
    # Devices of a single slice have no index in libtpu.
    slice_index = getattr(device, "slice_index", 0)
    return [*values, list(device.coords), slice_index]

  def memories(device: Any) -> list[str]:
    default, others = device.default_memory(), device.addressable_memories()
    return [memory.kind for memory in (default, *others)]

  assert list(map(facts, described)) == list(map(facts, given))
  assert memories(described[0]) == memories(given[0])  # libtpu: if local
  assert compile_only.is_compile_only(given[0])


def test_environment_is_as_before() -> None:
  before = dict(os.environ)
  compile_only.devices(tpu_generations.parse("v6e:4x4"))
  names = {"TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"}
  assert names.isdisjoint(set(os.environ) - set(before))
