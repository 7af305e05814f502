"""The mesh of a strategy: its axes, and the order of its devices."""

import dataclasses

import jax
from jax.experimental import topologies
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.partitioning import device_mesh

AUTO = jax.sharding.AxisType.Auto
EXPLICIT = jax.sharding.AxisType.Explicit
MESH_SHAPE = (2, 2, 1, 2)  # four chips of two cores, as on a TPU v3-8
DEVICES = jax.devices()


def by_hand(num_tasks=1):
  """Two replicas of two cores each, crosswise over a mesh of eight."""
  places = np.moveaxis(np.indices(MESH_SHAPE), 0, -1)
  topology = fs.Topology(MESH_SHAPE, places.reshape(num_tasks, -1, 4))
  cores = [[[0, 0, 0, 1], [1, 1, 0, 0]], [[0, 1, 0, 1], [1, 0, 0, 0]]]
  return fs.DeviceAssignment(topology, cores)


def make(device_assignment=None, devices=None, axis_type=AUTO, **mesh_shape):
  """Makes a strategy, with axes by name."""
  return fs.Strategy(
    device_assignment,
    devices=devices,
    mesh_shape=mesh_shape or None,
    axis_type=axis_type,
  )


def build(shape, num_replicas):
  topology = fs.Topology.from_devices(mesh_shape=MESH_SHAPE)
  return fs.DeviceAssignment.build(topology, shape, num_replicas=num_replicas)


HAND = by_hand()


@pytest.mark.parametrize(
  ("strategy", "shape", "order"),
  [
    (make(HAND), {"m0": 2}, [1, 6, 3, 4]),
    # In one process, devices are given to the tasks in order.
    (make(by_hand(num_tasks=4)), {"m0": 2}, [1, 6, 3, 4]),
    (make(HAND, DEVICES[::-1]), {"m0": 2}, [6, 1, 4, 3]),
    (make(HAND, model=-1, replica=2), {"model": 2}, [1, 6, 3, 4]),
    (make(build((1, 1, 1, 2), 3)), {"m0": 2}, [0, 1, 2, 3, 4, 5]),
    (
      make(build((2, 2, 1, 2), 1)),
      {"m0": 2, "m1": 2, "m2": 2},
      [0, 1, 2, 3, 6, 7, 4, 5],
    ),
    (make(None, [DEVICES[i] for i in (5, 0, 3)]), {}, [5, 0, 3]),
    (
      make(None, DEVICES[6:0:-1], EXPLICIT, m=np.int64(3), n=-1, replica=1),
      {"m": 3, "n": 2},
      [6, 5, 4, 3, 2, 1],
    ),
    (make(one=1, replica=-1), {"one": 1}, [*range(8)]),
  ],
)
def test_devices_keep_their_order(strategy, shape, order):
  assert [d.id for d in strategy.mesh.devices.flat] == order
  logical = np.prod([*shape.values()], dtype=int)
  replicas = len(order) // logical
  axes = [("replica", replicas), *shape.items()]
  assert list(strategy.mesh.shape.items()) == axes
  axis_type = EXPLICIT if "n" in shape else AUTO
  assert set(strategy.mesh.axis_types) == {axis_type}
  assert strategy.num_replicas_in_sync == replicas
  assert strategy.num_logical_devices == logical
  assert (strategy.num_hosts, strategy.num_replicas_per_host) == (1, replicas)


def test_mesh_shape_without_replicas_warns():
  with pytest.warns(UserWarning, match="no axis 'replica'.*one replica"):
    s = make(m=4, n=-1)
  assert repr(s) == "Strategy(replica=1, m=4, n=2)"


@pytest.mark.parametrize(
  ("call", "error", "facts"),
  [
    (lambda: make(None, []), ValueError, "devices .*at least one"),
    (lambda: make(None, [0, 1]), ValueError, r"devices .*got \[0, 1\]"),
    (lambda: make(None, jax.devices()[:1] * 2), ValueError, "each once"),
    (lambda: make([0]), TypeError, "device_assignment .*devices="),
    (
      lambda: fs.Strategy(mesh_shape=[8]),
      TypeError,
      r"mesh_shape=\[8\] .*dict of axis sizes",
    ),
    (lambda: make(replica=3), ValueError, "{'replica': 3} of 8 devices"),
    (lambda: make(replica=-1, m=-1), ValueError, "'m': -1"),
    (lambda: make(replica=-2), ValueError, r"\['replica'\] .*-1, got -2"),
    (lambda: make(data=8), ValueError, "no axis 'replica'.* 8 devices"),
    (lambda: make(HAND, DEVICES[:4]), ValueError, "6 of .*4 dev.* 1 "),
    (lambda: make(HAND, replica=4), ValueError, "'replica': 4.* has 2"),
    # Topologies, for compiling alone.
    (lambda: make("v5e-8"), ValueError, "'v5e-8'.*'v5e:2x4'"),
    (lambda: make("v6e:1x2"), ValueError, r"no libtpu .*flaxshard\[tpu\]"),
    (lambda: make(fs.Topology(MESH_SHAPE)), ValueError, "Topology.named"),
    # Devices that are not here.
    (
      lambda: device_mesh.order_devices(
        [Device(i, slice_index=i // 4) for i in range(8)], 8
      ),
      ValueError,
      r"has 8 logical devices .*\[4, 4\].*device_assignment",
    ),
  ],
)
def test_mistakes(monkeypatch, call, error, facts):
  def get_topology_desc(*_, **__):
    raise RuntimeError("no libtpu")

  monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
  with pytest.raises(error, match=facts):
    call()


# -- The order of devices that are not here.


@dataclasses.dataclass(frozen=True)
class Device:
  """A stand-in with all attributes that `order_devices` reads."""

  id: int
  process_index: int = 0
  slice_index: int = 0
  platform: str = "cpu"
  device_kind: str = "TPU v4"
  coords: tuple[int, ...] = (0, 0, 0)
  core_on_chip: int = 0


def test_tpu_replica_is_a_box_in_one_slice():
  devices = [
    Device(
      id=i,
      slice_index=i // 8,
      platform="tpu",
      coords=(i % 2, i // 2 % 4, 0),
    )
    for i in np.random.default_rng(0).permutation(16)
  ]
  grid = device_mesh.order_devices(devices, 4)
  assert grid.shape == (4, 4)
  assert sorted(d.id for d in grid.flat) == list(range(16))
  slices = [[d.slice_index for d in row] for row in grid]
  assert slices == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]
  for row in grid:
    xy = np.array([d.coords[:2] for d in row])
    assert np.prod(np.ptp(xy, axis=0) + 1) == 4


def test_task_has_the_devices_of_its_process():
  devices = [Device(i, process_index=i % 2) for i in range(8)]
  grid = device_mesh.assigned_devices(by_hand(num_tasks=2), devices)
  assert [[d.id for d in row] for row in grid] == [[2, 5], [6, 1]]
