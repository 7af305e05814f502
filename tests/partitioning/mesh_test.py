"""The mesh of a strategy: its axes, and the order of its devices."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.partitioning import mesh as mesh_lib

AUTO = jax.sharding.AxisType.Auto
EXPLICIT = jax.sharding.AxisType.Explicit


@dataclasses.dataclass(frozen=True)
class Device:
  """A stand-in with all attributes that `order_devices` reads."""

  id: int
  process_index: int = 0
  slice_index: int | None = 0
  platform: str = "cpu"
  device_kind: str = "stand-in"
  coords: tuple[int, ...] = (0, 0, 0)
  core_on_chip: int = 0


def device_grid(*shape):
  return np.array(jax.devices()[: math.prod(shape)]).reshape(shape)


def ids(grid):
  return [[d.id for d in row] for row in grid]


# from_grid


def test_from_grid_keeps_the_order_of_devices():
  grid = device_grid(8)[::-1].reshape(2, 4)
  mesh = mesh_lib.from_grid(grid)
  assert dict(mesh.shape) == {"replica": 2, "m0": 2, "m1": 2}
  assert mesh.axis_types == (AUTO,) * 3
  np.testing.assert_array_equal(mesh.devices.reshape(2, 4), grid)


@pytest.mark.parametrize("replicas, logical", [(8, 1), (2, 3)])
def test_parts_of_a_mesh(replicas, logical):
  grid = device_grid(replicas, logical)
  mesh = mesh_lib.from_grid(grid, axis_type=EXPLICIT)
  assert mesh_lib.num_logical_devices(mesh) == logical
  assert mesh_lib.logical_axes(mesh) == tuple(mesh_lib.prime_axes(logical))
  for i in range(logical):
    part = mesh_lib.logical_device_mesh(mesh, i)
    assert part.axis_names == ("replica",) and part.axis_types == (AUTO,)
    assert part.devices.tolist() == grid[:, i].tolist()
  for i in range(replicas):
    part = mesh_lib.replica_mesh(mesh, i)
    assert part.axis_names == mesh.axis_names
    assert part.devices.ravel().tolist() == grid[i].tolist()


# axis_sizes


@pytest.mark.parametrize(
  "mesh_shape, sizes",
  [
    ({"model": 2, "replica": -1}, {"replica": 4, "model": 2}),
    ({"model": -1, "replica": 1}, {"replica": 1, "model": 8}),
    ({"replica": np.int64(8), "m": np.int8(-1)}, {"replica": 8, "m": 1}),
  ],
)
def test_axis_sizes(mesh_shape, sizes):
  found = mesh_lib.axis_sizes(mesh_shape, 8)
  assert list(found.items()) == list(sizes.items())
  assert {type(size) for size in found.values()} == {int}


@pytest.mark.parametrize(
  "mesh_shape, error, facts",
  [
    ({"replica": 3}, ValueError, ("{'replica': 3}", "8 devices")),
    ({"replica": -1, "m": -1}, ValueError, ("'m': -1", "one unknown")),
    ({"replica": 0}, ValueError, ("{'replica': 0}", "8 devices")),
    ({"replica": -2}, ValueError, ("['replica']", "at least -1", "got -2")),
    ([("replica", 8)], TypeError, ("[('replica', 8)]", "dict of axis sizes")),
  ],
)
def test_invalid_mesh_shape_raises(mesh_shape, error, facts):
  with pytest.raises(error) as e:
    mesh_lib.axis_sizes(mesh_shape, 8)
  for fact in ("mesh_shape", *facts):
    assert fact in str(e.value)


# order_devices


def test_devices_keep_their_order_within_slices():
  order = [4, 0, 5, 1]
  devices = [Device(i, slice_index=i // 4) for i in order]
  by_slice = sorted(order, key=lambda i: i // 4)
  pairs = np.array(by_slice).reshape(-1, 2).tolist()
  assert ids(mesh_lib.order_devices(devices, 2)) == pairs


def test_replica_on_several_slices_raises():
  logical = 8
  devices = [Device(i, slice_index=i // 4) for i in range(8)]
  with pytest.raises(ValueError, match=r"\[4, 4\]") as e:
    mesh_lib.order_devices(devices, logical)
  assert f"{logical} logical devices" in str(e.value)
  assert "device_assignment" in str(e.value)


def test_tpu_replica_is_a_box_in_one_slice():
  logical = 4
  devices = [
    Device(
      id=i,
      slice_index=i // 8,
      platform="tpu",
      device_kind="TPU v4",
      coords=(i % 2, i // 2 % 4, 0),
    )
    for i in range(16)
  ]
  shuffled = [devices[i] for i in np.random.default_rng(0).permutation(16)]
  grid = mesh_lib.order_devices(shuffled, logical)
  assert grid.shape == (16 // logical, logical)
  assert sorted(d.id for d in grid.flat) == list(range(16))
  slices = [[d.slice_index for d in row] for row in grid]
  assert slices == sorted(slices) and all(len(set(s)) == 1 for s in slices)
  for row in grid:
    xy = np.array([d.coords[:2] for d in row])
    assert np.prod(np.ptp(xy, axis=0) + 1) == logical


# assigned_devices


def assignment_by_hand(num_tasks=1):
  """Two replicas of two cores each, crosswise over a mesh of eight."""
  places = np.array(list(itertools.product(range(2), range(2), [0], range(2))))
  topology = fs.Topology((2, 2, 1, 2), places.reshape(num_tasks, -1, 4))
  cores = [[[0, 0, 0, 1], [1, 1, 0, 0]], [[0, 1, 0, 1], [1, 0, 0, 0]]]
  return fs.DeviceAssignment(topology, cores)


def test_devices_of_one_process_are_given_to_the_tasks_in_order():
  devices = [Device(10 + i) for i in range(8)]
  for num_tasks in (1, 4):
    grid = mesh_lib.assigned_devices(assignment_by_hand(num_tasks), devices)
    assert ids(grid) == [[11, 16], [13, 14]]


def test_task_has_the_devices_of_its_process():
  devices = [Device(i, process_index=i % 2) for i in range(8)]
  grid = mesh_lib.assigned_devices(assignment_by_hand(num_tasks=2), devices)
  assert ids(grid) == [[2, 5], [6, 1]]


def test_too_few_devices_for_an_assignment_raises():
  with pytest.raises(ValueError, match="device 6 of Topology") as e:
    mesh_lib.assigned_devices(
      assignment_by_hand(), [Device(i) for i in range(6)]
    )
  assert "6 devices in 1 processes" in str(e.value)
