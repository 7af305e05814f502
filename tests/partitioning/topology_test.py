"""Topologies and device assignments: layouts, rings, lookups and errors."""

import json
import pathlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import flaxshard as fs

DATA = pathlib.Path(__file__).parents[1] / "testdata"
GOLDEN = json.loads((DATA / "device_assignment.json").read_text())
ORIGIN = [0, 0, 0, 0]
build = fs.DeviceAssignment.build
read = fs.Topology.from_devices

# Two tasks of four cores: chips (0, 0) and (1, 0), then (0, 1) and (1, 1).
TWO_HOSTS = [
  [[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 1]],
  [[0, 1, 0, 0], [0, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 1]],
]


def tpu(coords, core=0, process=0, **attributes):
  return SimpleNamespace(
    coords=coords, core_on_chip=core, process_index=process, **attributes
  )


def device_at(topology, at):
  task = topology.task_ordinal_at_coordinates(at)
  return topology.devices[task, topology.tpu_device_ordinal_at_coordinates(at)]


# -- Topologies of devices.


def test_coordinates_of_tpus_are_shifted_to_start_at_zeros():
  # A part of a larger torus, which starts at (2, 4, 6); not in order.
  devices = [
    tpu((x, y, 6), core, process=3 + (y - 4))
    for core in (1, 0)
    for y in (5, 4)
    for x in (2, 3)
  ]
  topology = read(devices)
  assert topology.mesh_shape == (2, 2, 1, 2)
  np.testing.assert_array_equal(topology.device_coordinates, TWO_HOSTS)
  for device in devices:
    x, y, _ = device.coords
    at = (x - 2, y - 4, 0, device.core_on_chip)
    assert device_at(topology, at) is device
  same = read(iter(devices[::-1]), mesh_shape=[2, 2, 1, 2])
  assert same.devices.tolist() == topology.devices.tolist()


def test_missing_tpus_leave_places_without_devices():
  devices = [tpu((x, y, 0), process=y) for y in range(3) for x in range(2)]
  topology = read(devices[:2] + devices[4:])
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
  topology = read(devices)
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
  devices = [
    tpu((0,), process=p, platform="gpu", slice_index=p // 2)
    for p in (3, 0, 2, 1) * 4
  ]
  topology = read(devices)
  assert topology.mesh_shape == (4, 4, 1, 1)
  for process in range(4):
    mine = [d for d in devices if d.process_index == process]
    for x, device in enumerate(mine):
      assert device_at(topology, (x, process, 0, 0)) is device


def test_cpu_devices_keep_their_order_in_a_given_mesh():
  assert read().mesh_shape == (8, 1, 1, 1)
  devices = jax.devices()[::-1]
  topology = read(devices, mesh_shape=(2, 2, 1, 2))
  assert (topology.num_tasks, topology.devices.tolist()) == (1, [devices])
  places = [(0, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, 0)]
  assert [device_at(topology, at).id for at in places] == [6, 5, 3]


# -- Assignments.


def topology_in_blocks(mesh_shape, host_block):
  """Returns a topology with one task for each block of chips.

  Blocks and chips are numbered with x fastest, the cores of a chip innermost.
  """
  blocks = np.array(mesh_shape[:3]) // host_block
  # `np.indices` varies its last axis fastest.
  sizes = (*blocks[::-1], *host_block[::-1], mesh_shape[3])
  numbers = np.indices(sizes).reshape(7, blocks.prod(), -1)
  chips = numbers[2::-1] * np.array(host_block)[:, None, None] + numbers[5:2:-1]
  return fs.Topology(mesh_shape, np.stack([*chips, numbers[6]], -1))


@pytest.mark.filterwarnings("ignore:.*odd side")
@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_assignment_agrees_with_tensorflow(case):
  topology = topology_in_blocks(case["mesh_shape"], case["host_block"])
  names = "computation_shape computation_stride num_replicas device_order_mode"
  arguments = {name: case[name] for name in names.split()}
  if "error" in case:
    with pytest.raises(ValueError, match=r"device_order_mode .* got 'ring'"):
      build(topology, **arguments)
    return
  assignment = build(topology, **arguments)
  assert assignment.core_assignment.tolist() == case["core_assignment"]
  assert assignment.core_assignment.dtype == np.int32
  last = assignment.num_cores_per_replica - 1
  # The first core's host and ordinal and the last core's device of up to
  # eight replicas are recorded.
  replicas = range(min(assignment.num_replicas, 8))
  for replica in replicas:
    assert assignment.host_device(replica) == case["host_device"][replica]
    assert assignment.tpu_ordinal(replica) == case["tpu_ordinal"][replica]
    assert assignment.tpu_device(replica, last) == case["tpu_device"][replica]


# -- Rings.


@pytest.mark.parametrize("sides", [(4, 1, 6), (4, 6, 8)])
def test_rings_are_closed_and_visit_every_chip(sides):
  mesh = (*sides, 2)
  for shape, num_replicas in ((mesh, 1), ((1, 1, 1, 2), np.prod(sides))):
    assignment = build(fs.Topology(mesh), shape, num_replicas=num_replicas)
    cores = assignment.core_assignment.reshape(-1, 2, 4)
    assert cores[:, :, 3].tolist() == [[0, 1]] * len(cores)
    chips = cores[:, 0, :3]
    assert len({tuple(chip) for chip in chips}) == len(chips) == np.prod(sides)
    hops = np.abs(chips - np.roll(chips, 1, axis=0)).sum(axis=1)
    assert set(hops) == {1}


def test_odd_side_has_no_ring_and_warns():
  shape = (4, 3, 1, 1)
  with pytest.warns(UserWarning, match=r"odd side .*\(4, 3, 1\) chips"):
    build(fs.Topology(shape), shape, device_order_mode="ring")
  # A line is a ring that the torus closes.
  shape = (1, 3, 1, 1)
  line = build(fs.Topology(shape), shape, device_order_mode="ring")
  assert line.core_assignment[0, :, 1].tolist() == [0, 1, 2]


# -- Lookups.


def test_lookups():
  topology = topology_in_blocks((4, 2, 1, 2), (2, 2, 1))
  assignment = build(topology, (1, 2, 1, 1), num_replicas=6)
  assert assignment.topology is topology
  sizes = topology.mesh_rank, topology.num_tasks, topology.num_tpus_per_task
  assert sizes == (4, 2, 8)
  assert topology.missing_devices.shape == (0, 4)
  assert (assignment.num_replicas, assignment.num_cores_per_replica) == (6, 2)
  assert assignment.coordinates(5, 1) == (2, 1, 0, 1)
  assert all(type(i) is int for i in assignment.coordinates(5, 1))
  assert assignment.tpu_device(5, 1, job="w") == "/job:w/task:1/device:TPU:5"
  assert assignment.host_device(np.int64(5)) == "/task:1/device:CPU:0"
  assert assignment.host_device(job="w") == "/job:w/task:0/device:CPU:0"
  assert assignment.lookup_replicas(0, 1) == [0, 1, 2, 3]
  assert assignment.lookup_replicas(1, 0) == [4, 5]


# -- On several slices, which a slower network connects.


SLICES = fs.Topology((2, 2, 3, 1), num_slices=3)


def test_slices_are_filled_one_after_another():
  # All are in the first slice; TensorFlow's grid would extend along z.
  ring = build(SLICES, num_replicas=4, device_order_mode="ring")
  xy = [[0, 0], [1, 0], [1, 1], [0, 1]]
  assert ring.core_assignment[:, 0].tolist() == [[*at, 0, 0] for at in xy]
  # All replicas have one order, which is a ring only if all slices have rings.
  part = build(SLICES, num_replicas=6).core_assignment[:, 0]
  assert part[2:4].tolist() == [[0, 1, 0, 0], [1, 1, 0, 0]]


# -- Mistakes.

PAIR = (1, 1, 2, 1)
UNEVEN = [tpu((x, 0, 0), process=x // 2) for x in range(3)]
LINE = [tpu((x, 0, 0), slice_index=x // 2) for x in range(4)]
SOME = fs.Topology((2, 2, 1, 1), [[ORIGIN, [1, 0, 0, 0], [0, 1, 0, 0]]])
# Two tasks of two chips, each with a core of each replica.
ACROSS = fs.DeviceAssignment(
  topology_in_blocks((4, 1, 1, 1), (2, 1, 1)),
  [[ORIGIN, [2, 0, 0, 0]], [[1, 0, 0, 0], [3, 0, 0, 0]]],
)


def full(num_replicas=1, **arguments):
  build(fs.Topology((4, 4, 1, 2)), num_replicas=num_replicas, **arguments)


def assign(*cores):
  fs.DeviceAssignment(SOME, list(cores))


@pytest.mark.parametrize(
  ("call", "facts"),
  [
    (lambda: fs.Topology((2, 2, 1.0, 1)), r"mesh_shape\[2\] .*1\.0"),
    (lambda: fs.Topology((2, 2)), r"mesh_shape must be four .*\(2, 2\)"),
    (lambda: fs.Topology(PAIR, [[[0, 0, 2, 0]]]), r"\[0, 0\] .*0, 2, 0"),
    (lambda: fs.Topology(PAIR, [[ORIGIN]] * 2), r"\[0, 0\] .*another core"),
    (lambda: fs.Topology(PAIR, None, ["a"] * 2), r"devices .*\[1, 2\].*\[2\]"),
    (lambda: fs.Topology((2, 1, 4, 1), num_slices=3), "num_slices=3, .*got 4"),
    (lambda: read(LINE[1:]), "slices of equal shape"),
    (lambda: read(LINE[:2], (1, 2, 1, 1)), r"shape .*\(2, 1, 1, 1\), got"),
    (lambda: read([]), r"devices .*at least one, got \[\]"),
    (lambda: read(UNEVEN), r"processes, .*\[2, 1\]"),
    (lambda: read(None, (2, 2, 1, 1)), "devices, 8, .*2, 2"),
    # Assignments.
    (lambda: ACROSS.coordinates(-1, 0), "replica .*got -1"),
    (lambda: ACROSS.tpu_device(0, 1.0), "logical_core .*1.0"),
    (lambda: ACROSS.lookup_replicas(2, 0), "task_id .*got 2"),
    (lambda: ACROSS.lookup_replicas(1, 0), r"\[0\], got 1"),
    (lambda: assign(ORIGIN), r"core_assignment .*\[1, 4\]"),
    (lambda: assign([[0.0] * 4]), "core_assignment .*integers"),
    (lambda: assign([ORIGIN], [[0, -1, 0, 0]]), r"\[1, 0\] .*0, -1, 0"),
    (lambda: assign([[1, 1, 0, 0]]), r"a device, got \[1, 1, 0, 0\]"),
    (lambda: assign([ORIGIN], [ORIGIN]), r"\[0, 0\] .*another core"),
    (lambda: full(-1), "num_replicas .*got -1"),
    (lambda: full(computation_shape=(0, 1, 1, 1)), r"shape\[0\]"),
    (lambda: full(computation_stride=(5, 1, 1, 1)), r"stride \(5, 1, 1, 1\)"),
    (lambda: full(computation_shape=(9, 1, 1, 1)), r"shape \(9, .* not fit"),
    (lambda: full(device_order_mode="snake"), "'ring'.*'snake'"),
    (lambda: full(device_order_mode=1), "'ring'.*'1'"),
    (lambda: build(SLICES, (2, 1, 1, 1), (1,) * 4, 7), "must be at most 6"),
    (lambda: build(SLICES, None, None, 5, "ring"), r"full of replicas \(4\)"),
  ],
)
def test_mistakes(call, facts):
  with pytest.raises(ValueError, match=facts):
    call()
