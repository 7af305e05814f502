"""Device assignments on several slices, which a slower network connects."""

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
