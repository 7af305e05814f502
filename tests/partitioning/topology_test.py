"""Topologies: coordinates, names, devices, and what is refused."""

import dataclasses
import pickle
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


def test_tasks_and_ordinals_at_coordinates():
  topology = fs.Topology((2, 2, 1, 2), TWO_HOSTS)
  assert topology.mesh_shape == (2, 2, 1, 2)
  assert topology.mesh_rank == 4
  assert topology.num_tasks == 2
  assert topology.num_tpus_per_task == 4
  assert topology.missing_devices.shape == (0, 4)
  np.testing.assert_array_equal(topology.device_coordinates, TWO_HOSTS)
  assert topology.device_coordinates.dtype == np.int32
  for task, host in enumerate(TWO_HOSTS):
    for ordinal, at in enumerate(host):
      assert topology.task_ordinal_at_coordinates(at) == task
      assert topology.tpu_device_ordinal_at_coordinates(at) == ordinal
  cpu_name = topology.cpu_device_name_at_coordinates
  tpu_name = topology.tpu_device_name_at_coordinates
  assert cpu_name((1, 1, 0, 0)) == "/task:1/device:CPU:0"
  assert cpu_name((1, 1, 0, 0), job="w") == "/job:w/task:1/device:CPU:0"
  assert tpu_name(np.array([1, 1, 0, 0])) == "/task:1/device:TPU:2"
  assert tpu_name([1, 1, 0, 0], "w") == "/job:w/task:1/device:TPU:2"


def test_without_coordinates_one_task_has_all_cores():
  topology = fs.Topology([2, 2, 2, 2])
  assert topology.num_tasks == 1
  # The cores of a chip, then x, y and z.
  assert topology.device_coordinates[0, :5].tolist() == [
    [0, 0, 0, 0],
    [0, 0, 0, 1],
    [1, 0, 0, 0],
    [1, 0, 0, 1],
    [0, 1, 0, 0],
  ]
  assert topology.device_coordinates[0, 8].tolist() == [0, 0, 1, 0]


def test_missing_devices():
  topology = fs.Topology((2, 2, 1, 2), TWO_HOSTS[1:])
  assert topology.missing_devices.tolist() == TWO_HOSTS[0]
  for method in (
    topology.task_ordinal_at_coordinates,
    topology.tpu_device_ordinal_at_coordinates,
    topology.cpu_device_name_at_coordinates,
    topology.tpu_device_name_at_coordinates,
  ):
    with pytest.raises(
      ValueError,
      match=r"device_coordinates must be where the topology has a device, got "
      r"\[1, 0, 0, 1\]",
    ):
      method([1, 0, 0, 1])


def test_a_topology_is_a_value():
  one, two = (fs.Topology((2, 2, 1, 2), TWO_HOSTS) for _ in range(2))
  others = [
    fs.Topology((2, 2, 1, 2), TWO_HOSTS[::-1]),
    fs.Topology((2, 2, 2, 2), TWO_HOSTS),
    fs.Topology((2, 2, 2, 2), TWO_HOSTS, num_slices=2),
    fs.Topology((2, 2, 1, 2), TWO_HOSTS, np.arange(8).reshape(2, 4)),
  ]
  assert one == two and hash(one) == hash(two)
  assert one == pickle.loads(pickle.dumps(one))
  assert len({one, two, *others}) == 5
  assert one != "topology"
  with pytest.raises(dataclasses.FrozenInstanceError):
    one.mesh_shape = (1, 1, 1, 1)
  for array in (one.device_coordinates, one.missing_devices):
    with pytest.raises(ValueError, match="read-only"):
      array[:] = 0
  assert repr(others[2]) == (
    "Topology(mesh_shape=(2, 2, 2, 2), num_tasks=2, num_tpus_per_task=4, "
    "num_slices=2)"
  )


def test_the_arguments_are_left_alone():
  coordinates = np.array(TWO_HOSTS, np.int32)
  devices = np.array([list("abcd"), list("efgh")], object)
  topology = fs.Topology((2, 2, 1, 2), coordinates, devices)
  coordinates[:], devices[:] = 7, None
  assert topology.device_at((1, 0, 0, 1)) == "d"
  assert topology.device_at((1, 1, 0, 0)) == "g"


# The message for TWO_HOSTS, as TensorFlow 2.21 writes it.
SERIALIZED = (
  b"\x0a\x04\x02\x02\x01\x02\x10\x02\x18\x04\x22\x20"
  + np.array(TWO_HOSTS, np.uint8).tobytes()
)


def test_serialized_is_tensorflows_topology_proto():
  topology = fs.Topology((2, 2, 1, 2), TWO_HOSTS)
  assert topology.serialized() == SERIALIZED
  assert fs.Topology.from_serialized(SERIALIZED) == topology
  # A hardware feature, as TensorFlow may add; integers one by one.
  assert fs.Topology.from_serialized(SERIALIZED + b"\x2a\x02\x08\x02")
  singly = b"\x08\x01\x08\x02\x08\x01\x08\x01\x10\x01\x18\x01"
  singly += b"\x20\x00\x20\x01\x20\x00\x20\x00"
  assert fs.Topology.from_serialized(singly) == fs.Topology(
    (1, 2, 1, 1), [[[0, 1, 0, 0]]]
  )


def test_serialized_round_trip():
  topology = fs.Topology((200, 1, 4, 1), [[[150, 0, 3, 0]]], num_slices=2)
  assert fs.Topology.from_serialized(topology.serialized()) == topology


@pytest.mark.parametrize(
  ("serialized", "error", "message"),
  [
    ("text", TypeError, "serialized must be bytes"),
    (b"", ValueError, "serialized must be a whole TopologyProto"),
    (SERIALIZED[:-1], ValueError, "serialized must be a whole TopologyProto"),
    (SERIALIZED[:12], ValueError, "serialized must be a whole TopologyProto"),
    (SERIALIZED + b"\x4d", ValueError, "wire type 5"),
    (SERIALIZED + b"\x18\x03", ValueError, "whole TopologyProto"),
    (SERIALIZED + b"\x18\x00", ValueError, "whole TopologyProto"),
    (SERIALIZED[:-1] + b"\x09", ValueError, "must be from 0 on and below"),
    (
      b"\x0a\x04\x01\x01\x01\x01\x10\x01\x18\x01\x20\x00\x20\x00\x20\x00\x20"
      + b"\xff" * 9
      + b"\x01",
      ValueError,
      r"got \[0, 0, 0, -1\]",
    ),
  ],
)
def test_broken_bytes_are_refused(serialized, error, message):
  with pytest.raises(error, match=message):
    fs.Topology.from_serialized(serialized)


@pytest.mark.parametrize(
  ("arguments", "error", "message"),
  [
    ([(2, 2, 1)], ValueError, r"mesh_shape must be .* got shape \[3\]"),
    ([2], ValueError, r"mesh_shape must be .* got shape \[\]"),
    ([(2, 2, 0, 1)], ValueError, "mesh_shape .* positive .* got"),
    ([(2, 2, 1.0, 1)], TypeError, r"mesh_shape .* got \(2, 2, 1.0, 1\)"),
    ([(True,) * 4], TypeError, "mesh_shape must be integers"),
    ([("2", "2", "1", "1")], TypeError, "mesh_shape must be integers"),
    ([(2**30,) * 4], ValueError, "mesh_shape .* a product of at most"),
    ([(1, 1, 1, 1), [[0, 0, 0, 0]]], ValueError, r"shape \[n, n, 4\]"),
    ([(1, 1, 1, 1), [[[0, 0, 0]]]], ValueError, r"got shape \[1, 1, 3\]"),
    ([(1, 1, 1, 1), np.zeros((1, 0, 4), int)], ValueError, r"\[1, 0, 4\]"),
    ([(1, 1, 1, 1), [[[0] * 4], []]], ValueError, "device_coordinates must"),
    ([(1, 1, 1, 1), [[[0.0] * 4]]], TypeError, "device_coordinates must"),
    (
      [(1, 1, 2, 1), [[[0] * 4, [0, 0, 2, 0]]]],
      ValueError,
      r"device_coordinates\[0, 1\] must be from 0 on .* got \[0, 0, 2, 0\]",
    ),
    (
      [(1, 1, 2, 1), [[[0, 0, -1, 0]]]],
      ValueError,
      r"device_coordinates\[0, 0\] must be from 0 on .* got \[0, 0, -1, 0\]",
    ),
    (
      [(1, 1, 2, 1), [[[0, 0, 1, 0]], [[0, 0, 1, 0]]]],
      ValueError,
      r"\[0, 0\] must have a place of its own, .* got \[0, 0, 1, 0\]",
    ),
    ([(2, 1, 1, 1), None, ["a", "b"]], ValueError, r"devices .* \[1, 2\]"),
    ([(2, 1, 1, 1), None, [["a", "a"]]], ValueError, r"devices\[0, 0\] .* 'a'"),
    ([(2, 1, 1, 1), None, [["a", None]]], ValueError, r"devices\[0, 1\] .* No"),
    ([(2, 1, 4, 1), None, None, 3], ValueError, "a multiple of num_slices=3"),
    ([(2, 1, 4, 1), None, None, 0], ValueError, "num_slices must be .* got 0"),
    ([(2, 1, 4, 1), None, None, 2.0], TypeError, "num_slices .* got 2.0"),
  ],
)
def test_nonsense_is_refused(arguments, error, message):
  with pytest.raises(error, match=message):
    fs.Topology(*arguments)


@pytest.mark.parametrize(
  ("coordinates", "error"),
  [
    ((0, 0, 0), ValueError),
    ((0, 0, 0, -1), ValueError),
    ((2, 0, 0, 0), ValueError),
    ((0, 0, 0, 0.0), TypeError),
  ],
)
def test_look_ups_count_from_zero(coordinates, error):
  with pytest.raises(error, match="device_coordinates must"):
    fs.Topology((2, 2, 1, 2)).tpu_device_name_at_coordinates(coordinates)


def test_other_errors_of_look_ups():
  topology = fs.Topology((2, 2, 1, 2))
  with pytest.raises(ValueError, match="must have devices"):
    topology.device_at((0, 0, 0, 0))
  with pytest.raises(TypeError, match="job must be a string or None, got 3"):
    topology.cpu_device_name_at_coordinates((0, 0, 0, 0), job=3)


# -- From devices.


def test_tpus_say_where_they_are():
  # A part of a larger torus, so that nothing begins at 0; in no order.
  devices = [
    tpu((x, y, 6), core, process=3 + (y - 4))
    for core in (1, 0)
    for y in (5, 4)
    for x in (2, 3)
  ]
  topology = fs.Topology.from_devices(devices)
  assert topology == fs.Topology(
    (2, 2, 1, 2), TWO_HOSTS, topology.devices.tolist()
  )
  for device in devices:
    x, y, _ = device.coords
    at = (x - 2, y - 4, 0, device.core_on_chip)
    assert topology.device_at(at) is device
  same = fs.Topology.from_devices(iter(devices[::-1]), mesh_shape=[2, 2, 1, 2])
  assert same == topology
  with pytest.raises(ValueError, match=r"mesh_shape .* \(2, 2, 1, 2\), got"):
    fs.Topology.from_devices(devices, mesh_shape=(4, 1, 1, 2))


def test_tpus_may_be_missing():
  devices = [tpu((x, y, 0), process=y) for y in range(3) for x in range(2)]
  topology = fs.Topology.from_devices(devices[:2] + devices[4:])
  assert topology.mesh_shape == (2, 3, 1, 1)
  assert topology.missing_devices.tolist() == [[0, 1, 0, 0], [1, 1, 0, 0]]
  # Tasks are counted without gaps.
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
    assert topology.device_at(at) is device
    assert topology.task_ordinal_at_coordinates(at) == device.process_index
  with pytest.raises(ValueError, match=r"devices must be slices of one shape"):
    fs.Topology.from_devices(devices[3:])


@pytest.mark.parametrize(
  ("devices", "error", "message"),
  [
    ([], ValueError, "devices must be at least one"),
    (7, TypeError, "devices must be a list of devices, got 7"),
    ([tpu((0, 0, 0)), 7], TypeError, r"devices\[1\] must be a jax device"),
    ([tpu((0, 0, 0)), gpu(0)], ValueError, "devices must all be TPUs or none"),
    (
      [tpu((0, 0, 1)), tpu((0, 0, 0)), tpu((0, 0, 1))],
      ValueError,
      r"devices\[0\] must have a place of its own",
    ),
    ([tpu((0, 0))], ValueError, "devices' coords and core_on_chip must be"),
    ([tpu((0, 0, 0.5))], TypeError, "devices' coords and core_on_chip must be"),
    (
      [tpu((x, 0, 0), process=x // 2) for x in range(3)],
      ValueError,
      r"devices must be equally many in all processes, got \[2, 1\]",
    ),
    (
      [gpu(0, slice_index=0), gpu(1, slice_index=1), gpu(2, slice_index=1)],
      ValueError,
      r"devices must be equally many in all slices, got \[1, 2\]",
    ),
  ],
)
def test_devices_that_make_no_topology(devices, error, message):
  with pytest.raises(error, match=f"Topology.from_devices: {message}"):
    fs.Topology.from_devices(devices)


def test_gpus_by_process_and_node():
  # GPUs have coords as well; they are not those of a torus.
  devices = [gpu(p, slice_index=p // 2, coords=(0,)) for p in (3, 0, 2, 1) * 4]
  topology = fs.Topology.from_devices(devices)
  assert topology.mesh_shape == (4, 2, 2, 1)
  assert topology.num_slices == 2
  for process in range(4):
    mine = [d for d in devices if d.process_index == process]
    for x, device in enumerate(mine):
      at = (x, process % 2, process // 2, 0)
      assert topology.device_at(at) is device
      assert topology.task_ordinal_at_coordinates(at) == process
      assert topology.tpu_device_ordinal_at_coordinates(at) == x
  with pytest.raises(ValueError, match=r"mesh_shape\[2\] must be a multiple"):
    fs.Topology.from_devices(devices, mesh_shape=(4, 4, 1, 1))


def test_cpu_devices_rehearse_a_tpu_layout():
  devices = jax.devices()
  topology = fs.Topology.from_devices()
  assert topology.mesh_shape == (8, 1, 1, 1)
  assert topology.devices.tolist() == [devices]
  topology = fs.Topology.from_devices(mesh_shape=(2, 2, 1, 2))
  assert topology.num_tasks == 1
  assert topology.device_at((0, 0, 0, 1)) is devices[1]
  assert topology.device_at((1, 0, 0, 0)) is devices[2]
  assert topology.device_at((0, 1, 0, 0)) is devices[4]
  assert topology == fs.Topology((2, 2, 1, 2), None, [devices])
  reversed_ = fs.Topology.from_devices(devices[::-1], mesh_shape=(1, 8, 1, 1))
  assert reversed_.device_at((0, 0, 0, 0)) is devices[7]
  with pytest.raises(ValueError, match=r"the 8 devices .* got \(2, 2, 1, 1\)"):
    fs.Topology.from_devices(mesh_shape=(2, 2, 1, 1))
  with pytest.raises(TypeError, match="from_devices: mesh_shape must be int"):
    fs.Topology.from_devices(mesh_shape=(8.0, 1, 1, 1))
  with pytest.raises(ValueError, match=r"devices\[0, 0\] must be a device"):
    fs.Topology.from_devices([devices[0]] * 2)


def test_a_mesh_is_filled_process_by_process():
  devices = [gpu(process) for _ in range(4) for process in (1, 0)]
  topology = fs.Topology.from_devices(devices, mesh_shape=(2, 2, 1, 2))
  np.testing.assert_array_equal(topology.device_coordinates, TWO_HOSTS)
  assert topology.devices[0].tolist() == devices[1::2]
