"""Names of the devices of a mesh."""

import jax
import pytest

import flaxshard as fs
from flaxshard.analysis import device_names


@pytest.mark.parametrize(
  ("name", "count", "expected"),
  [
    ("2*v5e:2x4", 16, "2*v5e:2x4"),
    ("v5e:4x4", 8, "v5e:4x2"),
    ("v5e:4x4", 2, "2 of TPU v5 lite"),  # no slice has 2 x 1 chips
    ("v5e:4x4", 6, "6 of TPU v5 lite"),  # not all of a process
  ],
)
def test_name_of_a_mesh(name: str, count: int, expected: str) -> None:
  devices = fs.Topology.named(name).devices.ravel()[:count]
  mesh = jax.sharding.Mesh(devices, ("x",))
  assert device_names.name_devices(devices[0], mesh) == expected


def test_name_of_a_device() -> None:
  assert device_names.name_devices(jax.devices()[0], None) == "1 of cpu"
