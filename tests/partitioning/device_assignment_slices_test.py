"""Device assignments on several slices, which a slower network connects."""

import itertools

import numpy as np
import pytest

import flaxshard as fs


def test_slices_are_filled_one_after_another():
  topology = fs.Topology((2, 2, 3, 1), num_slices=3)
  build = fs.DeviceAssignment.build
  full = build(topology, (2, 1, 1, 1), num_replicas=6)
  assert full.core_assignment[:, 0, 2].tolist() == [0, 0, 1, 1, 2, 2]
  np.testing.assert_array_equal(
    full.core_assignment[:4],
    build(topology, (2, 1, 1, 1), num_replicas=4).core_assignment,
  )
  # All are in the first slice; TensorFlow's grid would extend along z.
  some = build(topology, num_replicas=4, device_order_mode="ring")
  assert some.core_assignment[:, 0].tolist() == [
    [0, 0, 0, 0],
    [1, 0, 0, 0],
    [1, 1, 0, 0],
    [0, 1, 0, 0],
  ]
  with pytest.raises(ValueError, match=r"full of replicas \(4\)"):
    build(topology, num_replicas=5, device_order_mode="ring")
  # All replicas have one order, which is a ring only if all slices have rings.
  part = build(topology, num_replicas=6).core_assignment[:, 0]
  assert part[2:4].tolist() == [[0, 1, 0, 0], [1, 1, 0, 0]]
  with pytest.raises(ValueError, match="num_replicas must be at most 6"):
    build(topology, (2, 1, 1, 1), num_replicas=7)


@pytest.mark.parametrize("seed", range(3))
def test_replica_is_within_one_slice(seed):
  rng = np.random.default_rng(seed)
  mesh = [*rng.integers(1, 4, 2), rng.integers(1, 4), rng.integers(1, 3)]
  shape = [rng.integers(1, n + 1) for n in mesh]
  depth, num_slices = int(mesh[2]), 3
  mesh[2] *= num_slices
  room = np.prod([n // m for n, m in zip(mesh, shape, strict=True)])
  room = room // (mesh[2] // shape[2]) * (depth // shape[2]) * num_slices
  assignment = fs.DeviceAssignment.build(
    fs.Topology(mesh, num_slices=num_slices), shape, num_replicas=room
  )
  slices = assignment.core_assignment[..., 2] // depth
  np.testing.assert_array_equal(slices, slices[:, :1].repeat(np.prod(shape), 1))
  np.testing.assert_array_equal(slices[:, 0], np.sort(slices[:, 0]))


def test_span_slices_divides_a_replica_over_slices():
  topology = fs.Topology((4, 2, 8, 1), num_slices=4)
  with pytest.raises(ValueError, match="span_slices=True"):
    fs.DeviceAssignment.build(topology, (2, 2, 4, 1))
  assignment = fs.DeviceAssignment.build(
    topology,
    (2, 2, 4, 1),
    num_replicas=4,
    device_order_mode="ring",
    span_slices=True,
  )
  slices = assignment.core_assignment[..., 2] // 2
  assert slices.tolist() == [[0] * 8 + [1] * 8] * 2 + [[2] * 8 + [3] * 8] * 2
  # On each slice: the layout of a single slice with half of each replica.
  one = fs.DeviceAssignment.build(
    fs.Topology((4, 2, 2, 1)), (2, 2, 2, 1), num_replicas=2
  ).core_assignment
  for group, part in itertools.product(range(2), range(2)):
    np.testing.assert_array_equal(
      assignment.core_assignment[
        2 * group : 2 * group + 2, 8 * part : 8 * part + 8
      ],
      one + np.array([0, 0, 4 * group + 2 * part, 0]),
    )
  # A replica that fits in a slice stays in one.
  for shape in ((2, 2, 2, 1), (1, 1, 1, 1)):
    np.testing.assert_array_equal(
      fs.DeviceAssignment.build(
        topology, shape, num_replicas=2, span_slices=True
      ).core_assignment,
      fs.DeviceAssignment.build(
        topology, shape, num_replicas=2
      ).core_assignment,
    )


def test_strides_over_several_slices():
  assignment = fs.DeviceAssignment.build(
    fs.Topology((1, 1, 8, 1), num_slices=4),
    (1, 1, 2, 1),
    (1, 1, 2, 1),
    num_replicas=4,
    span_slices=True,
  )
  # Two replicas interleave on the first two slices, two on the others.
  assert assignment.core_assignment[..., 2].tolist() == [
    [0, 2],
    [1, 3],
    [4, 6],
    [5, 7],
  ]


def test_replica_on_several_slices_must_take_whole_slices():
  topology = fs.Topology((1, 1, 8, 1), num_slices=4)
  for depth in (3, 10):
    with pytest.raises(
      ValueError, match=rf"computation_shape\[2\] .* got {depth} "
    ):
      fs.DeviceAssignment.build(topology, (1, 1, depth, 1), span_slices=True)


def test_slice_with_missing_devices_has_runs_of_devices():
  whole = fs.Topology((2, 2, 2, 1), num_slices=2)
  devices = whole.device_coordinates[0]
  topology = fs.Topology((2, 2, 2, 1), [devices[1:]], num_slices=2)
  assignment = fs.DeviceAssignment.build(topology, (2, 1, 1, 1), num_replicas=3)
  assert (
    assignment.core_assignment.tolist()
    == [
      devices[1:3].tolist(),  # of the three devices of the first slice
      devices[4:6].tolist(),
      devices[6:8].tolist(),
    ]
  )
  # A slice without replicas may have missing devices.
  topology = fs.Topology((2, 2, 2, 1), [devices[:-1]], num_slices=2)
  assignment = fs.DeviceAssignment.build(
    topology, num_replicas=4, device_order_mode="ring"
  )
  assert assignment.core_assignment[:, 0, 2].tolist() == [0] * 4
  both = fs.DeviceAssignment.build(
    topology, (1, 1, 2, 1), num_replicas=3, span_slices=True
  )
  np.testing.assert_array_equal(both.core_assignment[:, 1], devices[4:7])
