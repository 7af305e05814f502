"""The mesh of a strategy: axes, orders, what a partition is made of."""

import dataclasses
import itertools
import math
import types

from factors import factorizations
import jax
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.partitioning import mesh as mesh_lib

P = jax.sharding.PartitionSpec
AUTO = jax.sharding.AxisType.Auto
EXPLICIT = jax.sharding.AxisType.Explicit


@dataclasses.dataclass(frozen=True)
class Device:
  """What `lay_out` reads of a device."""

  id: int
  process_index: int = 0
  slice_index: int | None = 0
  platform: str = "cpu"
  device_kind: str = "stand-in"
  coords: tuple[int, ...] = (0, 0, 0)
  core_on_chip: int = 0


def devices(*shape):
  return np.array(jax.devices()[: math.prod(shape)]).reshape(shape)


def ids(array):
  return [[d.id for d in row] for row in array]


# make


@pytest.mark.parametrize(
  "count, axes",
  [
    (1, {}),
    (2, {"m0": 2}),
    (3, {"m0": 3}),
    (6, {"m0": 2, "m1": 3}),
    (8, {"m0": 2, "m1": 2, "m2": 2}),
    (12, {"m0": 2, "m1": 2, "m2": 3}),
    (8960, {**{f"m{i}": 2 for i in range(8)}, "m8": 5, "m9": 7}),
    (997, {"m0": 997}),
  ],
)
def test_prime_axes(count, axes):
  assert mesh_lib.prime_axes(count) == axes


def test_make_keeps_the_order_of_devices():
  laid = devices(8)[::-1].reshape(2, 4)
  mesh = mesh_lib.make(laid)
  assert dict(mesh.shape) == {"replica": 2, "m0": 2, "m1": 2}
  assert mesh.axis_types == (AUTO,) * 3
  np.testing.assert_array_equal(mesh.devices.reshape(2, 4), laid)


def test_make_names_axes_the_first_one_slowest():
  mesh = mesh_lib.make(devices(1, 8), {"data": 2, "model": 4}, EXPLICIT)
  assert list(mesh.shape.items()) == [("replica", 1), ("data", 2), ("model", 4)]
  assert mesh.axis_types == (EXPLICIT,) * 3
  assert mesh.devices[0, 1, 2].id == 6


@pytest.mark.parametrize("replicas, logical", [(1, 8), (4, 2), (8, 1), (2, 3)])
def test_what_the_mesh_has(replicas, logical):
  laid = devices(replicas, logical)
  mesh = mesh_lib.make(laid, axis_type=EXPLICIT)
  assert mesh_lib.num_logical_devices(mesh) == logical
  assert mesh_lib.logical_axes(mesh) == tuple(mesh_lib.prime_axes(logical))
  for i in range(logical):
    part = mesh_lib.logical_device(mesh, i)
    assert part.axis_names == ("replica",) and part.axis_types == (AUTO,)
    assert part.devices.tolist() == laid[:, i].tolist()
  for i in range(replicas):
    part = mesh_lib.replica(mesh, i)
    assert part.axis_names == mesh.axis_names
    assert part.devices.ravel().tolist() == laid[i].tolist()


# partition_spec


def abstract(axes):
  """All that `partition_spec` reads of a mesh, for more devices than here."""
  shape = {"replica": 2, **axes}
  return types.SimpleNamespace(shape=shape, axis_names=tuple(shape))


def axes_of(entry):
  return (entry,) if isinstance(entry, str) else entry or ()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8, 12, 30, 64])
def test_every_partition_has_a_spec(count):
  axes = mesh_lib.prime_axes(count)
  for rank in range(1, 6):
    for pieces in factorizations(count, rank):
      spec = mesh_lib.partition_spec(abstract(axes), pieces)
      used = [axes_of(entry) for entry in spec]
      assert tuple(math.prod(axes[a] for a in names) for names in used) == (
        pieces
      )
      names = list(itertools.chain(*used))
      assert sorted(names) == sorted(axes)
      if len(set(axes.values())) <= 1:
        assert names == list(axes)  # row-major
      for entry in used:
        assert list(entry) == sorted(entry, key=list(axes).index)


def test_the_spec_of_the_design():
  mesh = mesh_lib.make(devices(1, 8))
  spec = mesh_lib.partition_spec(mesh, [1, 2, 4, 1])
  assert spec == P(None, "m0", ("m1", "m2"), None)


def test_named_axes_make_the_partitions_they_can():
  mesh = abstract({"model": 2, "data": 4, "one": 1})
  spec = mesh_lib.partition_spec(mesh, (1, 2, 4, 1))
  assert spec == P(None, "model", "data", None)
  assert mesh_lib.partition_spec(mesh, (4, 2)) == P("data", "model")
  assert mesh_lib.partition_spec(mesh, (8, 1)) == P(("model", "data"), None)


@pytest.mark.parametrize(
  "axes, pieces",
  [
    ({"model": 8}, [1, 2, 4, 1]),
    ({"model": 2, "data": 4}, [2, 2, 2]),
    ({f"a{i}": 4 for i in range(8)}, [2, 2**15]),
  ],
)
def test_named_axes_that_cannot_say_what_would(axes, pieces):
  with pytest.raises(ValueError) as e:
    mesh_lib.partition_spec(abstract(axes), pieces)
  assert f"partition_dimensions={pieces} cannot be made of" in str(e.value)
  assert str(axes) in str(e.value)
  assert "mesh_shape of prime axes" in str(e.value)


# named_sizes


@pytest.mark.parametrize(
  "mesh_shape, sizes",
  [
    ({"replica": 4, "model": 2}, {"replica": 4, "model": 2}),
    ({"model": 2, "replica": -1}, {"replica": 4, "model": 2}),
    ({"model": -1}, {"replica": 1, "model": 8}),
    ({"a": 2, "b": 2, "c": 2}, {"replica": 1, "a": 2, "b": 2, "c": 2}),
    ({"replica": np.int64(8), "m": np.int8(-1)}, {"replica": 8, "m": 1}),
  ],
)
def test_named_sizes(mesh_shape, sizes):
  found = mesh_lib.named_sizes(mesh_shape, 8)
  assert list(found.items()) == list(sizes.items())
  assert {type(size) for size in found.values()} == {int}


@pytest.mark.parametrize(
  "mesh_shape, error, message",
  [
    ({"replica": 3}, ValueError, "must be the number of devices, 8"),
    ({}, ValueError, "must be the number of devices, 8"),
    ({"replica": -1, "m": 3}, ValueError, "must be the number of devices, 8"),
    ({"replica": -1, "m": 16}, ValueError, "must be the number of devices, 8"),
    ({"replica": -1, "m": -1}, ValueError, "only one axis may be -1"),
    ({"replica": 0}, ValueError, "'replica' must be at least 1"),
    ({"m": -2}, ValueError, "'m' must be at least 1"),
    ({"m": 2.0}, TypeError, "'m' must be an integer, got 2.0"),
    ({"m": True}, TypeError, "'m' must be an integer, got True"),
    ({"m": None}, TypeError, "'m' must be an integer, got None"),
    ({"m": "8"}, TypeError, "'m' must be an integer, got '8'"),
    ({1: 8}, TypeError, "must be a string, got 1"),
    ({"": 8}, TypeError, "must be a string, got ''"),
    ([("replica", 8)], TypeError, "must be a dict of axis sizes"),
    ((4, 2), TypeError, "must be a dict of axis sizes"),
    (8, TypeError, "must be a dict of axis sizes"),
  ],
)
def test_named_sizes_that_cannot_be(mesh_shape, error, message):
  with pytest.raises(error) as e:
    mesh_lib.named_sizes(mesh_shape, 8)
  assert str(e.value).startswith(f"mesh_shape={mesh_shape!r}")
  assert message in str(e.value)


# lay_out


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6, 7], [4, 0, 5, 1]])
def test_devices_stay_in_their_order_slices_outermost(order):
  given = [Device(i, slice_index=i // 4) for i in order]
  by_slice = sorted(order, key=lambda i: i // 4)
  pairs = np.array(by_slice).reshape(-1, 2).tolist()
  assert ids(mesh_lib.lay_out(given, 2)) == pairs


def test_devices_that_know_no_slice_are_in_one():
  given = [Device(i, slice_index=None) for i in range(4)]
  assert ids(mesh_lib.lay_out(given, 4)) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("logical", [3, 8, 16])
def test_replicas_do_not_straddle_slices(logical):
  given = [Device(i, slice_index=i // 4) for i in range(8)]
  with pytest.raises(ValueError, match=r"slices of \[4, 4\] devices") as e:
    mesh_lib.lay_out(given, logical)
  assert f"{logical} logical devices a replica" in str(e.value)
  assert "device_assignment" in str(e.value)


@pytest.mark.parametrize("logical", [1, 2, 4, 8])
def test_on_tpus_a_replica_is_a_box_of_one_slice(logical):
  given = [
    Device(
      id=i,
      slice_index=i // 8,
      platform="tpu",
      device_kind="TPU v4",
      coords=(i % 2, i // 2 % 4, 0),
    )
    for i in range(16)
  ]
  shuffled = [given[i] for i in np.random.default_rng(0).permutation(16)]
  laid = mesh_lib.lay_out(shuffled, logical)
  assert laid.shape == (16 // logical, logical)
  assert sorted(d.id for d in laid.flat) == list(range(16))
  slices = [[d.slice_index for d in row] for row in laid]
  assert slices == sorted(slices) and all(len(set(s)) == 1 for s in slices)
  for row in laid:
    xy = np.array([d.coords[:2] for d in row])
    assert np.prod(np.ptp(xy, axis=0) + 1) == logical


# assigned_devices


def by_hand(num_tasks=1):
  """Two replicas of two cores each, crosswise over a mesh of eight."""
  places = np.array(list(itertools.product(range(2), range(2), [0], range(2))))
  topology = fs.Topology((2, 2, 1, 2), places.reshape(num_tasks, -1, 4))
  cores = [[[0, 0, 0, 1], [1, 1, 0, 0]], [[0, 1, 0, 1], [1, 0, 0, 0]]]
  return fs.DeviceAssignment(topology, cores)


@pytest.mark.parametrize("num_tasks", [1, 2, 4])
def test_a_topology_by_hand_deals_out_the_devices_of_one_process(num_tasks):
  given = [Device(10 + i) for i in range(8)]
  laid = mesh_lib.assigned_devices(by_hand(num_tasks), given)
  assert ids(laid) == [[11, 16], [13, 14]]


def test_task_t_has_the_devices_of_process_t():
  given = [Device(i, process_index=i % 2) for i in range(8)]
  laid = mesh_lib.assigned_devices(by_hand(num_tasks=2), given)
  assert ids(laid) == [[2, 5], [6, 1]]


def test_without_devices_those_of_the_topology_or_of_jax():
  assert ids(mesh_lib.assigned_devices(by_hand(), None)) == [[1, 6], [3, 4]]
  topology = fs.Topology.from_devices(
    jax.devices()[::-1], mesh_shape=(2, 2, 1, 2)
  )
  assignment = fs.DeviceAssignment(topology, by_hand().core_assignment)
  laid = mesh_lib.assigned_devices(assignment, None)
  assert laid.tolist() == assignment.devices.tolist()
  assert laid[0, 0] is topology.device_at((0, 0, 0, 1))


def test_too_few_devices():
  with pytest.raises(ValueError, match="needs device 6 of task 0") as e:
    mesh_lib.assigned_devices(by_hand(), [Device(i) for i in range(6)])
  assert "devices are 6 in 1 processes" in str(e.value)
