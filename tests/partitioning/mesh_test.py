"""The mesh of a strategy: its axes, and the order of its devices."""

import dataclasses

import jax
from jax.experimental import topologies
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.partitioning import mesh as mesh_lib

AUTO = jax.sharding.AxisType.Auto
EXPLICIT = jax.sharding.AxisType.Explicit
MESH_SHAPE = (2, 2, 1, 2)  # four chips of two cores, as on a TPU v3-8


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


def ids(grid):
  return [[d.id for d in row] for row in grid]


def by_hand(num_tasks=1):
  """Two replicas of two cores each, crosswise over a mesh of eight."""
  places = np.moveaxis(np.indices(MESH_SHAPE), 0, -1)
  topology = fs.Topology(MESH_SHAPE, places.reshape(num_tasks, -1, 4))
  cores = [[[0, 0, 0, 1], [1, 1, 0, 0]], [[0, 1, 0, 1], [1, 0, 0, 0]]]
  return fs.DeviceAssignment(topology, cores)


def of_shape(**mesh_shape):
  return {"mesh_shape": mesh_shape}


def named(device_assignment):
  return {"device_assignment": device_assignment}


HAND = named(by_hand())


@pytest.mark.parametrize(
  "shape, replicas, axes, mode",
  [
    ((1, 1, 1, 2), 3, {"m0": 2}, "auto"),
    ((1, 2, 1, 2), 2, {"m0": 2, "m1": 2}, "mesh"),
    ((2, 2, 1, 2), 1, {"m0": 2, "m1": 2, "m2": 2}, "ring"),
  ],
)
def test_mesh_has_the_order_of_the_assignment(shape, replicas, axes, mode):
  assignment = fs.DeviceAssignment.build(
    fs.Topology.from_devices(mesh_shape=MESH_SHAPE),
    shape,
    num_replicas=replicas,
    device_order_mode=mode,
  )
  s = fs.Strategy(assignment)
  assert s.device_assignment is assignment
  assert list(s.mesh.shape.items()) == [("replica", replicas), *axes.items()]
  assert set(s.mesh.axis_types) == {AUTO}
  assert s.num_replicas_in_sync == replicas
  assert s.num_logical_devices == assignment.num_cores_per_replica
  assert (s.num_hosts, s.num_replicas_per_host) == (1, replicas)
  laid = s.mesh.devices.reshape(replicas, -1)
  for (replica, core), device in np.ndenumerate(laid):
    assert device is jax.devices()[assignment.tpu_ordinal(replica, core)]


@pytest.mark.parametrize(
  ("options", "shape", "order"),
  [
    (HAND, {"m0": 2}, [1, 6, 3, 4]),
    ({**HAND, "devices": jax.devices()[::-1]}, {"m0": 2}, [6, 1, 4, 3]),
    ({**HAND, **of_shape(model=-1, replica=2)}, {"model": 2}, [1, 6, 3, 4]),
    ({"devices": [jax.devices()[i] for i in (5, 0, 3)]}, {}, [5, 0, 3]),
    (
      {
        "devices": jax.devices()[6:0:-1],
        **of_shape(m=np.int64(3), n=-1, replica=1),
      },
      {"m": 3, "n": 2},
      [6, 5, 4, 3, 2, 1],
    ),
    (of_shape(one=1, replica=-1), {"one": 1}, list(range(8))),
  ],
)
def test_devices_keep_their_order(options, shape, order):
  s = fs.Strategy(**options, axis_type=EXPLICIT)
  assert [d.id for d in s.mesh.devices.flat] == order
  names, sizes = list(s.mesh.shape), list(s.mesh.shape.values())
  assert (names[0], dict(zip(names[1:], sizes[1:], strict=True))) == (
    "replica",
    shape,
  )
  assert set(s.mesh.axis_types) == {EXPLICIT}


def test_mesh_shape_without_replicas_warns():
  with pytest.warns(UserWarning, match="no axis 'replica'.*one replica"):
    s = fs.Strategy(mesh_shape={"m": 4, "n": -1})
  assert repr(s) == "Strategy(replica=1, m=4, n=2)"


@pytest.mark.parametrize(
  ("options", "error", "facts"),
  [
    ({"devices": []}, ValueError, "devices .*at least one"),
    ({"device_assignment": [0]}, TypeError, "device_assignment .*devices="),
    ({"mesh_shape": [8]}, TypeError, r"mesh_shape=\[8\] .*dict of axis sizes"),
    (of_shape(replica=3), ValueError, "{'replica': 3} of 8 devices"),
    (of_shape(replica=0), ValueError, "{'replica': 0} of 8 devices"),
    (of_shape(replica=-1, m=-1), ValueError, "'m': -1"),
    (of_shape(replica=-2), ValueError, r"\['replica'\] .*least -1, got -2"),
    (of_shape(data=8), ValueError, "no axis 'replica'.* 8 devices"),
    (of_shape(fsdp=-1, model=2), ValueError, "no axis 'replica'"),
    ({**HAND, "devices": jax.devices()[:4]}, ValueError, "6 of .*4 dev.* 1 "),
    ({**HAND, **of_shape(replica=4)}, ValueError, "'replica': 4.* has 2"),
    # Topologies, for compiling alone.
    (named("v5e-8"), ValueError, "'v5e-8'.*'v5e:2x4'"),
    (named("v6e:1x2"), ValueError, r"no libtpu .*flaxshard\[tpu\]"),
    (named(fs.Topology(MESH_SHAPE)), ValueError, "Topology.named"),
  ],
)
def test_mistakes(monkeypatch, options, error, facts):
  def get_topology_desc(*_, **__):
    raise RuntimeError("no libtpu")

  monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
  with pytest.raises(error, match=facts):
    fs.Strategy(**options)


def test_abstract_batch_on_devices():
  strategy = fs.Strategy()
  batch = strategy.shard_batch({"x": jax.ShapeDtypeStruct((16, 2), np.float32)})
  spec = jax.sharding.PartitionSpec("replica")
  assert batch["x"].sharding == jax.NamedSharding(strategy.mesh, spec)
  assert strategy.jit(lambda b: b["x"].sum()).lower(batch).as_text()


# -- The order of devices that are not here.


def test_replica_on_several_slices_raises():
  devices = [Device(i, slice_index=i // 4) for i in range(8)]
  with pytest.raises(ValueError, match=r"\[4, 4\].*device_assignment") as e:
    mesh_lib.order_devices(devices, 8)
  assert "8 logical devices" in str(e.value)


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
    for i in np.random.default_rng(0).permutation(16)
  ]
  grid = mesh_lib.order_devices(devices, logical)
  assert grid.shape == (16 // logical, logical)
  assert sorted(d.id for d in grid.flat) == list(range(16))
  slices = [[d.slice_index for d in row] for row in grid]
  assert slices == sorted(slices) and all(len(set(s)) == 1 for s in slices)
  for row in grid:
    xy = np.array([d.coords[:2] for d in row])
    assert np.prod(np.ptp(xy, axis=0) + 1) == logical


def test_task_has_the_devices_of_its_process():
  # In one process, devices are given to the tasks in order.
  devices = [Device(10 + i) for i in range(8)]
  for num_tasks in (1, 4):
    grid = mesh_lib.assigned_devices(by_hand(num_tasks), devices)
    assert ids(grid) == [[11, 16], [13, 14]]
  devices = [Device(i, process_index=i % 2) for i in range(8)]
  grid = mesh_lib.assigned_devices(by_hand(num_tasks=2), devices)
  assert ids(grid) == [[2, 5], [6, 1]]
