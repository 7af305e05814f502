"""Device assignments: TensorFlow's layouts, rings, slices, what is refused."""

import dataclasses
import itertools
import json
import pathlib

import jax
import numpy as np
import pytest

import flaxshard as fs

GOLDEN = json.loads(
  (
    pathlib.Path(__file__).parents[1] / "testdata/device_assignment.json"
  ).read_text()
)
ORIGIN = [0, 0, 0, 0]


def in_blocks(mesh_shape, host_block):
  """One task per block of chips; x fastest everywhere, cores innermost."""

  def count(shape):
    return [c[::-1] for c in itertools.product(*map(range, shape[::-1]))]

  blocks = [n // m for n, m in zip(mesh_shape, host_block, strict=False)]
  tasks = [
    [
      [b * m + c for b, m, c in zip(block, host_block, chip, strict=True)]
      + [core]
      for chip in count(host_block)
      for core in range(mesh_shape[3])
    ]
    for block in count(blocks)
  ]
  return fs.Topology(mesh_shape, tasks)


def build(topology, case, mode=None):
  return fs.DeviceAssignment.build(
    topology,
    computation_shape=case["computation_shape"],
    computation_stride=case["computation_stride"],
    num_replicas=case["num_replicas"],
    device_order_mode=mode or case["device_order_mode"],
  )


@pytest.mark.filterwarnings("ignore:.*odd side")
@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_golden(case):
  topology = in_blocks(case["mesh_shape"], case["host_block"])
  if "error" in case:
    with pytest.raises(ValueError, match=r"device_order_mode .* got 'ring'"):
      build(topology, case)
    return
  assignment = build(topology, case)
  assert assignment.core_assignment.tolist() == case["core_assignment"]
  assert assignment.core_assignment.dtype == np.int32
  replicas = range(min(assignment.num_replicas, 8))
  last = assignment.num_cores_per_replica - 1
  # Of eight replicas: the first core's host and ordinal, the last's device.
  assert [assignment.host_device(r) for r in replicas] == case["host_device"]
  assert [assignment.tpu_ordinal(r) for r in replicas] == case["tpu_ordinal"]
  assert [assignment.tpu_device(r, last) for r in replicas] == (
    case["tpu_device"]
  )


# -- Layouts, by hand.


def test_a_ring_of_chips():
  # What the picture in the documentation says: one replica on 4 x 2 x 2.
  ring = fs.DeviceAssignment.build(
    fs.Topology((4, 2, 2, 1)), (4, 2, 2, 1), device_order_mode="ring"
  )
  order = np.empty((2, 2, 4), int)
  x, y, z, _ = ring.core_assignment[0].T
  order[z, y, x] = np.arange(16)
  assert order.tolist() == [
    [[0, 1, 2, 3], [7, 6, 5, 4]],
    [[15, 14, 13, 12], [8, 9, 10, 11]],
  ]


@pytest.mark.parametrize(
  "sides", [(2, 2, 1), (4, 1, 6), (1, 2, 4), (6, 4, 2), (4, 6, 8)]
)
def test_rings_are_closed_and_visit_every_chip(sides):
  mesh = (*sides, 2)
  for shape, num_replicas in ((mesh, 1), ((1, 1, 1, 2), np.prod(sides))):
    assignment = fs.DeviceAssignment.build(
      fs.Topology(mesh), shape, num_replicas=num_replicas
    )
    cores = assignment.core_assignment.reshape(-1, 2, 4)
    assert cores[:, :, 3].tolist() == [[0, 1]] * len(cores)
    chips = cores[:, 0, :3]
    assert len({tuple(chip) for chip in chips}) == len(chips) == np.prod(sides)
    hops = np.abs(chips - np.roll(chips, 1, axis=0)).sum(axis=1)
    assert set(hops) == {1}


def test_an_odd_side_has_no_ring():
  topology = fs.Topology((4, 3, 1, 1))
  with pytest.warns(UserWarning, match=r"odd side .* \(4, 3, 1\) chips"):
    asked = fs.DeviceAssignment.build(
      topology, (4, 3, 1, 1), device_order_mode="ring"
    )
  assert asked.core_assignment[0, 2:6, :2].tolist() == [
    [2, 0],
    [3, 0],
    [0, 1],
    [1, 1],
  ]
  assert asked == fs.DeviceAssignment.build(topology, (4, 3, 1, 1))
  # A line has one, if the torus closes it.
  line = fs.DeviceAssignment.build(
    fs.Topology((1, 3, 1, 1)), (1, 3, 1, 1), device_order_mode="ring"
  )
  assert line.core_assignment[0, :, 1].tolist() == [0, 1, 2]


def test_mesh_order():
  topology = fs.Topology((4, 4, 1, 2))
  assignment = fs.DeviceAssignment.build(
    topology, (2, 1, 1, 1), num_replicas=16, device_order_mode="Mesh"
  )
  first = assignment.core_assignment[:, 0]
  # Cores first, then x, y: each replica two chips wide.
  assert first[:6].tolist() == [
    [0, 0, 0, 0],
    [0, 0, 0, 1],
    [2, 0, 0, 0],
    [2, 0, 0, 1],
    [0, 1, 0, 0],
    [0, 1, 0, 1],
  ]
  np.testing.assert_array_equal(
    assignment.core_assignment[:, 1] - first, [[1, 0, 0, 0]] * 16
  )


def test_strides_interleave_replicas():
  assignment = fs.DeviceAssignment.build(
    fs.Topology((4, 1, 1, 1)), (2, 1, 1, 1), (2, 1, 1, 1), num_replicas=2
  )
  assert assignment.core_assignment[..., 0].tolist() == [[0, 2], [1, 3]]


def test_missing_devices_are_passed_over_in_the_order_of_tasks():
  tasks = [[[x, y, 0, 0] for x in (0, 1)] for y in (3, 0, 1)]
  topology = fs.Topology((2, 4, 1, 1), tasks)
  for mode in ("auto", "mesh"):
    assignment = fs.DeviceAssignment.build(
      topology, (1, 2, 1, 1), num_replicas=3, device_order_mode=mode
    )
    assert assignment.core_assignment.tolist() == tasks
  with pytest.raises(ValueError, match="without missing devices"):
    fs.DeviceAssignment.build(
      topology, (1, 2, 1, 1), num_replicas=3, device_order_mode="ring"
    )
  with pytest.raises(ValueError, match="num_replicas must be at most 3"):
    fs.DeviceAssignment.build(topology, (1, 2, 1, 1), num_replicas=4)
  with pytest.raises(ValueError, match=r"computation_stride .* \(1, 2, 1, 1\)"):
    fs.DeviceAssignment.build(topology, (1, 2, 1, 1), (1, 2, 1, 1))


# -- Look-ups.


def test_look_ups():
  topology = in_blocks((4, 2, 1, 2), (2, 2, 1))
  assignment = fs.DeviceAssignment.build(topology, (1, 2, 1, 1), num_replicas=6)
  assert assignment.topology is topology
  assert (assignment.num_replicas, assignment.num_cores_per_replica) == (6, 2)
  assert assignment.coordinates(5, 1) == (2, 1, 0, 1)
  assert all(type(i) is int for i in assignment.coordinates(5, 1))
  assert assignment.tpu_ordinal(5, 1) == 5
  assert assignment.tpu_device(5, 1) == "/task:1/device:TPU:5"
  assert assignment.tpu_device(5, 1, job="w") == "/job:w/task:1/device:TPU:5"
  assert assignment.host_device(np.int64(5)) == "/task:1/device:CPU:0"
  assert assignment.host_device(job="w") == "/job:w/task:0/device:CPU:0"
  assert assignment.lookup_replicas(0, 1) == [0, 1, 2, 3]
  assert assignment.lookup_replicas(1, 0) == [4, 5]


def test_devices():
  devices = jax.devices()
  topology = fs.Topology.from_devices(mesh_shape=(2, 2, 1, 2))
  assignment = fs.DeviceAssignment.build(topology, (2, 1, 1, 2), num_replicas=2)
  assert assignment.devices.tolist() == [devices[:4], devices[4:]]
  # The devices lie in the assignment's order.
  swapped = fs.DeviceAssignment(topology, assignment.core_assignment[:, ::-1])
  assert swapped.devices.tolist() == [devices[3::-1], devices[:3:-1]]
  without = fs.DeviceAssignment.build(fs.Topology((2, 2, 1, 2)))
  with pytest.raises(ValueError, match="must have devices"):
    without.devices  # noqa: B018


@pytest.mark.parametrize(
  ("method", "arguments", "error", "message"),
  [
    ("coordinates", (-1, 0), ValueError, "replica must be .* 0 and 1, got -1"),
    ("coordinates", (0, 2), ValueError, "logical_core .* 0 and 1, got 2"),
    ("tpu_ordinal", (2,), ValueError, "replica must be .* got 2"),
    ("host_device", (0, -1), ValueError, "logical_core must be .* got -1"),
    ("tpu_device", (0, 1.0), TypeError, "logical_core .* integer, got 1.0"),
    ("tpu_device", (True,), TypeError, "replica .* integer, got True"),
    ("tpu_device", (0, 0, 1), TypeError, "job must be a string or None"),
    ("lookup_replicas", (2, 0), ValueError, "task_id must be .* got 2"),
    ("lookup_replicas", (0, -1), ValueError, "logical_core must be .* got -1"),
    ("lookup_replicas", (1, 0), ValueError, r"one of \[0\], got 1"),
  ],
)
def test_look_ups_out_of_range(method, arguments, error, message):
  topology = in_blocks((4, 1, 1, 1), (2, 1, 1))
  assignment = fs.DeviceAssignment(
    topology, [[ORIGIN, [2, 0, 0, 0]], [[1, 0, 0, 0], [3, 0, 0, 0]]]
  )
  with pytest.raises(error, match=message):
    getattr(assignment, method)(*arguments)


def test_an_assignment_is_a_value():
  cores = [[[1, 0, 0, 0]], [ORIGIN]]
  topologies = [fs.Topology((2, 1, 1, 1)), fs.Topology((2, 1, 1, 1))]
  one, two = (fs.DeviceAssignment(topology, cores) for topology in topologies)
  others = [
    fs.DeviceAssignment(topologies[0], cores[::-1]),
    fs.DeviceAssignment(topologies[0], [[*cores[0], *cores[1]]]),
    fs.DeviceAssignment(fs.Topology((2, 1, 1, 2)), cores),
  ]
  assert one == two and hash(one) == hash(two)
  assert len({one, two, *others}) == 4
  assert one != cores
  with pytest.raises(dataclasses.FrozenInstanceError):
    one.core_assignment = None
  with pytest.raises(ValueError, match="read-only"):
    one.core_assignment[0, 0, 0] = 0


# -- What is refused.


@pytest.mark.parametrize(
  ("cores", "error", "message"),
  [
    ([ORIGIN], ValueError, r" .* got shape \[1, 4\]"),
    ([[[0, 0, 0]]], ValueError, r" .* got shape \[1, 1, 3\]"),
    (np.zeros((0, 1, 4), int), ValueError, " .* got shape"),
    ([[ORIGIN, ORIGIN], [ORIGIN]], ValueError, " must be"),
    ([[[0.0] * 4]], TypeError, " must be integers"),
    ([[[0, 0, 0, -1]]], ValueError, r"\[0, 0\] must be from 0 on"),
    (
      [[ORIGIN], [[0, 2, 0, 0]]],
      ValueError,
      r"\[1, 0\] .* below .* got \[0, 2",
    ),
    ([[[1, 1, 0, 0]]], ValueError, r"\[0, 0\] must be where .* got \[1, 1"),
    ([[ORIGIN, ORIGIN]], ValueError, r"\[0, 0\] must have a place of its own"),
    (
      [[ORIGIN], [ORIGIN]],
      ValueError,
      r"\[0, 0\] must have a place of its own",
    ),
  ],
)
def test_assignments_that_are_none(cores, error, message):
  topology = fs.Topology((2, 2, 1, 1), [[ORIGIN, [1, 0, 0, 0], [0, 1, 0, 0]]])
  with pytest.raises(
    error, match=f"DeviceAssignment: core_assignment.*{message}"
  ):
    fs.DeviceAssignment(topology, cores)


@pytest.mark.parametrize(
  ("arguments", "error", "message"),
  [
    ({"topology": b""}, TypeError, "topology must be a Topology, got b''"),
    ({"num_replicas": 0}, ValueError, "num_replicas must be .* got 0"),
    ({"num_replicas": -1}, ValueError, "num_replicas must be .* got -1"),
    ({"num_replicas": 2.0}, TypeError, "num_replicas must be .* got 2.0"),
    ({"num_replicas": True}, TypeError, "num_replicas must be .* got True"),
    ({"num_replicas": 33}, ValueError, "num_replicas .* at most 32, .* got 33"),
    (
      {"num_replicas": 5, "computation_shape": (2, 2, 1, 2)},
      ValueError,
      "num_replicas .* at most 4",
    ),
    (
      {"computation_shape": (2, 2, 1)},
      ValueError,
      r"computation_shape .* \[3\]",
    ),
    ({"computation_shape": (2, 2, 1, 0)}, ValueError, "computation_shape must"),
    (
      {"computation_shape": (2, 2, 1.5, 1)},
      TypeError,
      "computation_shape must",
    ),
    (
      {"computation_shape": (5, 1, 1, 1)},
      ValueError,
      "computation_shape .* fit",
    ),
    ({"computation_stride": (1, 1, 1)}, ValueError, "computation_stride must"),
    (
      {"computation_stride": (1, 1, 1, -1)},
      ValueError,
      "computation_stride .*-1",
    ),
    (
      {"computation_shape": (2,) * 4, "computation_stride": (3, 1, 1, 1)},
      ValueError,
      r"computation_stride must fit .* got \(2, 2, 2, 2\) times \(3, 1, 1, 1\)",
    ),
    (
      {"device_order_mode": "snake"},
      ValueError,
      "device_order_mode must be one of 'auto', 'ring', 'mesh', got 'snake'",
    ),
    ({"device_order_mode": 1}, TypeError, "device_order_mode must be one of"),
    ({"span_slices": 1}, TypeError, "span_slices must be a bool, got 1"),
  ],
)
def test_builds_that_are_refused(arguments, error, message):
  with pytest.raises(error, match=message):
    fs.DeviceAssignment.build(
      **{"topology": fs.Topology((4, 4, 1, 2)), **arguments}
    )


@pytest.mark.parametrize(
  ("shape", "num_replicas", "mode"),
  [
    ((1, 1, 1, 1), 8960, "ring"),
    ((1, 1, 1, 1), 8960, "mesh"),
    ((2, 2, 2, 1), 1120, "ring"),
    ((16, 20, 28, 1), 1, "ring"),
  ],
)
def test_a_full_slice_is_laid_out_on_every_chip(shape, num_replicas, mode):
  topology = fs.Topology((16, 20, 28, 1))
  assignment = fs.DeviceAssignment.build(
    topology, shape, num_replicas=num_replicas, device_order_mode=mode
  )
  assert assignment.core_assignment.shape[:2] == (num_replicas, np.prod(shape))
  chips = assignment.core_assignment.reshape(-1, 4)
  assert len(np.unique(chips, axis=0)) == num_replicas * np.prod(shape)
