"""Topologies: coordinates, names, devices, and errors."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import flaxshard as fs

# Two tasks of four cores: chips (0, 0) and (1, 0), then (0, 1) and (1, 1).
TWO_HOSTS = [
  [[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 1]],
  [[0, 1, 0, 0], [0, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 1]],
]


def tpu(coords, core=0, process=0, **attributes):
  return SimpleNamespace(
    coords=coords, core_on_chip=core, process_index=process, **attributes
  )


def gpu(process, **attributes):
  return SimpleNamespace(platform="gpu", process_index=process, **attributes)


def device_at(topology, at):
  task = topology.task_ordinal_at_coordinates(at)
  return topology.devices[task, topology.tpu_device_ordinal_at_coordinates(at)]


# -- From devices.


def test_coordinates_of_tpus_are_shifted_to_start_at_zeros():
  # A part of a larger torus, which starts at (2, 4, 6); not in order.
  devices = [
    tpu((x, y, 6), core, process=3 + (y - 4))
    for core in (1, 0)
    for y in (5, 4)
    for x in (2, 3)
  ]
  topology = fs.Topology.from_devices(devices)
  assert topology.mesh_shape == (2, 2, 1, 2)
  np.testing.assert_array_equal(topology.device_coordinates, TWO_HOSTS)
  for device in devices:
    x, y, _ = device.coords
    at = (x - 2, y - 4, 0, device.core_on_chip)
    assert device_at(topology, at) is device
  same = fs.Topology.from_devices(iter(devices[::-1]), mesh_shape=[2, 2, 1, 2])
  assert same.devices.tolist() == topology.devices.tolist()


def test_missing_tpus_leave_places_without_devices():
  devices = [tpu((x, y, 0), process=y) for y in range(3) for x in range(2)]
  topology = fs.Topology.from_devices(devices[:2] + devices[4:])
  assert topology.mesh_shape == (2, 3, 1, 1)
  assert topology.missing_devices.tolist() == [[0, 1, 0, 0], [1, 1, 0, 0]]
  # Tasks are numbered without gaps.
  assert topology.task_ordinal_at_coordinates((0, 2, 0, 0)) == 1


def test_slices_are_stacked_along_z():
  devices = [
    tpu((x, 4 * s, z), process=2 * s + z, slice_index=7 - s)
    for s in range(2)
    for z in range(2)
    for x in range(3)
  ]
  topology = fs.Topology.from_devices(devices)
  assert topology.mesh_shape == (3, 1, 4, 1)
  assert topology.slice_shape == (3, 1, 2, 1)
  assert topology.num_slices == 2
  for device in devices:
    x, _, z = device.coords
    at = (x, 0, z + 2 * (device.slice_index - 6), 0)
    assert device_at(topology, at) is device
    assert topology.task_ordinal_at_coordinates(at) == device.process_index


def test_gpus_are_ordered_by_process():
  # The coords of GPUs are not those of a torus, and are ignored.
  devices = [gpu(p, slice_index=p // 2, coords=(0,)) for p in (3, 0, 2, 1) * 4]
  topology = fs.Topology.from_devices(devices)
  assert topology.mesh_shape == (4, 4, 1, 1)
  for process in range(4):
    mine = [d for d in devices if d.process_index == process]
    for x, device in enumerate(mine):
      assert device_at(topology, (x, process, 0, 0)) is device


def test_cpu_devices_keep_their_order_in_a_given_mesh():
  assert fs.Topology.from_devices().mesh_shape == (8, 1, 1, 1)
  devices = jax.devices()[::-1]
  topology = fs.Topology.from_devices(devices, mesh_shape=(2, 2, 1, 2))
  assert (topology.num_tasks, topology.devices.tolist()) == (1, [devices])
  places = [(0, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, 0)]
  assert [device_at(topology, at).id for at in places] == [6, 5, 3]


MESH, ZEROS = (1, 1, 2, 1), [0, 0, 0, 0]
read = fs.Topology.from_devices
UNEVEN = [tpu((x, 0, 0), process=x // 2) for x in range(3)]
LINE = [tpu((x, 0, 0), slice_index=x // 2) for x in range(4)]


@pytest.mark.parametrize(
  ("call", "facts"),
  [
    (lambda: fs.Topology((2, 2, 1.0, 1)), r"mesh_shape\[2\] .*1\.0"),
    (lambda: fs.Topology(MESH, [[ZEROS, [0, 0, 2, 0]]]), r"\[0, 1\] .*0, 2, 0"),
    (lambda: fs.Topology(MESH, [[ZEROS], [ZEROS]]), r"\[0, 0\] .*another core"),
    (lambda: fs.Topology(MESH, None, ["a"] * 2), r"devices .*\[1, 2\].*\[2\]"),
    (lambda: fs.Topology((2, 1, 4, 1), num_slices=3), "num_slices=3, .*got 4"),
    (lambda: read(LINE[1:]), "slices of equal shape"),
    (lambda: read(LINE[:2], (1, 2, 1, 1)), r"shape .*\(2, 1, 1, 1\), got"),
    (lambda: read([]), r"devices .*at least one, got \[\]"),
    (lambda: read(UNEVEN), r"processes, .*\[2, 1\]"),
    (lambda: read(None, (2, 2, 1, 1)), "devices, 8, .*2, 2"),
    (lambda: read(None, (8.0, 1, 1, 1)), r"mesh_shape\[0\].*8\.0"),
  ],
)
def test_mistakes(call, facts):
  with pytest.raises(ValueError, match=facts):
    call()
