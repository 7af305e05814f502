import types

import jax
import pytest

from flaxshard.analysis import chips
from flaxshard.analysis import tables

GIB = 2**30


def describe(kind, cores=1):
  return types.SimpleNamespace(device_kind=kind, num_cores=cores)


@pytest.mark.parametrize(
  "kind, cores, bf16, hbm, bandwidth",
  [
    ("TPU v3", 1, 61.5e12, 15.48 * GIB, 450e9),  # half of a chip
    ("TPU v4", 1, 137.5e12, 15.25 * GIB, 600e9),
    ("TPU v4", 2, 275e12, 30.75 * GIB, 1200e9),
    ("TPU v5 lite", 1, 197e12, 15.75 * GIB, 819e9),
    ("TPU v5", 2, 459e12, 95.74 * GIB, 2765e9),
    ("TPU v6 lite", 1, 918e12, 31.25 * GIB, 1638e9),
    ("TPU7x", 1, 1153.5e12, 94.75 * GIB, 3690e9),
    ("NVIDIA H100 80GB HBM3", None, 989.5e12, 80e9, 3350e9),
  ],
)
def test_figures_are_those_of_a_jax_device(kind, cores, bf16, hbm, bandwidth):
  device = chips.find_device(describe(kind, cores))
  assert device.flops("bf16") == bf16
  assert device.hbm_bytes == int(hbm)
  assert device.hbm_bandwidth == bandwidth


def test_unpublished_figures_are_unknown():
  v2 = chips.find_device(describe("TPU v2"))
  assert v2.flops("bf16") is None
  assert v2.hbm_bandwidth is v2.dcn_bandwidth is v2.chip.link_bandwidth is None
  v5e = chips.find_device(describe("TPU v5 lite"))
  assert v5e.flops("fp8") is None
  assert chips.find_device(describe("TPU v99")) is None


def test_float32_runs_at_the_rate_of_bfloat16_on_tpu_and_of_tf32_on_gpu():
  v5e = chips.find_device(describe("TPU v5 lite"))
  assert v5e.flops("f32") == v5e.flops("bf16")
  a100 = chips.find_device(describe("NVIDIA A100-SXM4-80GB"))
  assert a100.flops("f32") == 156e12


def test_hbm_of_a_device_of_this_machine_is_the_limit_of_its_allocator():
  gpu = describe("NVIDIA H100 80GB HBM3")
  gpu.memory_stats = lambda: {"bytes_limit": 123}
  assert chips.usable_hbm_bytes(gpu) == 123
  gpu.memory_stats = lambda: None
  assert chips.usable_hbm_bytes(gpu) == 80e9
  assert chips.usable_hbm_bytes(jax.devices("cpu")[0]) is None


@pytest.mark.tpu
@pytest.mark.parametrize(
  "name", ["v3:2x2", "v5e:2x2", "v5p:2x2x1", "tpu7x:2x2x1"]
)
def test_hbm_is_what_the_compiler_says(name):
  from flaxshard.partitioning import Topology

  device = Topology.named(name).devices.flat[0]
  known = chips.find_device(device).hbm_bytes
  sharding = jax.sharding.SingleDeviceSharding(device)
  x = jax.ShapeDtypeStruct((2**19, 2**19), "float32", sharding=sharding)
  with pytest.raises(jax.errors.JaxRuntimeError) as error:
    jax.jit(lambda x: x + 1).lower(x).compile()
  assert f"exceeds available HBM ({known / GIB:.2f}G)" in str(error.value)


@pytest.mark.parametrize(
  "value, expected",
  [(None, "unknown"), (0, "0 B/s"), (50e9, "50 GB/s"), (7, "7 B/s")],
)
def test_format_rate(value, expected):
  assert tables.format_rate(value, "B/s") == expected
