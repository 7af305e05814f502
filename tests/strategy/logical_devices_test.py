"""Strategies whose replicas have several logical devices."""

import collections
import functools
import re

from flax import linen as nn
import jax
import numpy as np
import optax
import pytest

import flaxshard as fs

P = jax.sharding.PartitionSpec
NamedSharding = jax.sharding.NamedSharding
EXPLICIT = jax.sharding.AxisType.Explicit
MESH_SHAPE = (2, 2, 1, 2)  # four chips of two cores, as on a TPU v3-8


def topology():
  return fs.Topology.from_devices(mesh_shape=MESH_SHAPE)


def strategy(replicas, logical, **options):
  """Returns a strategy whose logical axes are m0, m1, ..."""
  devices = jax.devices()[: replicas * logical]
  return fs.Strategy(
    fs.DeviceAssignment.build(
      fs.Topology.from_devices(devices, mesh_shape=(1, 1, replicas, logical)),
      (1, 1, 1, logical),
      num_replicas=replicas,
      device_order_mode="mesh",
    ),
    **options,
  )


def assert_close(got, want, rtol=1e-4, atol=1e-6):
  jax.tree.map(
    lambda g, w: np.testing.assert_allclose(g, w, rtol=rtol, atol=atol),
    got,
    want,
  )


# Construction


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
    topology(), shape, num_replicas=replicas, device_order_mode=mode
  )
  s = fs.Strategy(assignment)
  assert s.device_assignment is assignment
  assert list(s.mesh.shape.items()) == [("replica", replicas), *axes.items()]
  assert s.num_replicas_in_sync == replicas
  assert s.num_logical_devices == assignment.num_cores_per_replica
  assert (s.num_hosts, s.num_replicas_per_host) == (1, replicas)
  laid = s.mesh.devices.reshape(replicas, -1)
  for (replica, core), device in np.ndenumerate(laid):
    at = assignment.coordinates(replica, core)
    assert device is assignment.topology.device_at(at)


def by_hand():
  cores = [[[0, 0, 0, 1], [1, 1, 0, 0]], [[0, 1, 0, 1], [1, 0, 0, 0]]]
  return fs.DeviceAssignment(fs.Topology(MESH_SHAPE), cores)


def test_handwritten_assignment_uses_the_devices_in_order():
  for options, ids in (
    ({}, [1, 6, 5, 2]),
    ({"devices": jax.devices()[::-1]}, [6, 1, 2, 5]),
    ({"mesh_shape": {"model": -1, "replica": 2}}, [1, 6, 5, 2]),
  ):
    s = fs.Strategy(by_hand(), **options)
    assert [d.id for d in s.mesh.devices.flat] == ids
  assert list(s.mesh.shape.items()) == [("replica", 2), ("model", 2)]


def test_devices_keep_their_order():
  few = [jax.devices()[i] for i in (5, 0, 3)]
  assert fs.Strategy(devices=few).mesh.devices.tolist() == few
  with pytest.warns(UserWarning, match="no axis 'replica'.*one replica"):
    s = fs.Strategy(devices=jax.devices()[6:0:-1], mesh_shape={"m": 3, "n": -1})
  assert list(s.mesh.shape.items()) == [("replica", 1), ("m", 3), ("n", 2)]
  assert [d.id for d in s.mesh.devices.flat] == [6, 5, 4, 3, 2, 1]
  assert repr(s) == "Strategy(replica=1, m=3, n=2)"


@pytest.mark.parametrize(
  "options, error, message",
  [
    ({"devices": []}, ValueError, "devices"),
    ({"mesh_shape": {"replica": 3}}, ValueError, "mesh_shape.*8"),
    ({"device_assignment": [0]}, TypeError, "device_assignment.*devices="),
    ({"mesh_shape": [8]}, TypeError, "mesh_shape"),
    ({"mesh_shape": {"data": 8}}, ValueError, "'replica' instead of 'data'"),
    ({"mesh_shape": {"fsdp": -1, "model": 2}}, ValueError, "8 devices"),
    (
      {"device_assignment": by_hand(), "devices": jax.devices()[:4]},
      ValueError,
      "device 6",
    ),
    (
      {"device_assignment": by_hand(), "mesh_shape": {"replica": 4}},
      ValueError,
      "4.*device_assignment.*2",
    ),
  ],
)
def test_invalid_strategy_raises(options, error, message):
  with pytest.raises(error, match=message):
    fs.Strategy(**options)


# Annotations, in run


PARTITIONS = [
  (4,),
  (2, 2),
  (4, 1),
  (1, 2, 2),
  (2, 1, 1, 1, 2),
]


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, EXPLICIT])
def test_each_replica_splits_its_tensor(axis_type):
  s = strategy(2, 4, axis_type=axis_type)
  xs = [
    np.arange(2 * np.prod(p) * 2 ** len(p)).reshape(2, *(2 * n for n in p))
    for p in PARTITIONS
  ]
  batch = [jax.device_put(x, NamedSharding(s.mesh, P("replica"))) for x in xs]

  @s.jit
  def split_and_undo(xs):
    split = [
      s.split_to_logical_devices(x[0] * 3, p)
      for x, p in zip(xs, PARTITIONS, strict=True)
    ]
    return split, [s.replicate_to_logical_devices(x) / 3 for x in split]

  split, undone = split_and_undo(batch)
  for x, p, y, z in zip(xs, PARTITIONS, split, undone, strict=True):
    np.testing.assert_array_equal(y, 3 * x)
    np.testing.assert_array_equal(z, x)
    assert {i.data.shape for i in y.value.addressable_shards} == {
      (1, *(2 for _ in p))
    }
    for shard in y.value.addressable_shards:
      replica, *core = np.argwhere(s.mesh.devices == shard.device)[0]
      tile = np.unravel_index(2 * core[0] + core[1], p)
      at = (replica, *(slice(2 * i, 2 * i + 2) for i in tile))
      np.testing.assert_array_equal(shard.data[0], 3 * x[at])
    whole = {i.data.shape for i in z.value.addressable_shards}
    assert whole == {(1, *x.shape[1:])}


def test_function_runs_on_one_logical_device_of_each_replica():
  s = strategy(2, 4)
  calls = collections.Counter()

  def host(replica, x):
    calls[int(replica)] += 1
    return np.asarray(x) * 2

  def fn(x):
    context = fs.get_replica_context()
    replica = context.replica_id_in_sync_group
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    twice = jax.pure_callback(host, out, replica, x)
    return twice, context.all_reduce("sum", x + replica)

  x = np.arange(3, dtype=np.float32)
  twice, total = s.run(lambda x: s.on_logical_device(2, fn, x), (x,))
  np.testing.assert_array_equal(twice, [2 * x] * 2)
  np.testing.assert_array_equal(total, [2 * x + 1] * 2)
  assert calls == {0: 1, 1: 1}


# Training


class Net(nn.Module):
  """A small image model."""

  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Conv(4, (3, 3), use_bias=False)(x))
    return nn.Dense(3)(x.max((1, 2)))


@functools.cache
def images():
  rng = np.random.default_rng(0)
  return {
    "image": rng.normal(size=(4, 16, 16, 2)).astype(np.float32),
    "label": rng.integers(0, 3, 4),
  }


def cross_entropy(logits, labels):
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return losses.mean()


def image_step(s, pieces=None, device=None):
  def step(state, batch):
    image, label = batch["image"], batch["label"]
    apply = lambda params, x: state.apply_fn({"params": params}, x)

    def loss_fn(params):
      if pieces is not None:
        split = s.split_to_logical_devices(image, pieces)
        logits = s.replicate_to_logical_devices(apply(params, split))
        return cross_entropy(logits, s.replicate_to_logical_devices(label))
      if device is not None:
        apply_again = jax.checkpoint(apply)
        logits = s.on_logical_device(device, apply_again, params, image)
        return cross_entropy(logits, label)
      return cross_entropy(apply(params, image), label)

    return state.minimize(loss_fn)

  return step


@functools.cache
def image_params():
  return jax.jit(Net().init)(jax.random.key(0), images()["image"])["params"]


def image_state(s):
  return fs.TrainState.create(
    apply_fn=Net().apply,
    params=image_params(),
    tx=optax.adam(1e-2),
    strategy=s,
  )


@functools.cache
def trained():
  """Three steps on one device."""
  s = strategy(1, 1)
  state = image_state(s)
  return s.run_steps(image_step(s), state, [images()] * 3, reduce="mean")


def assert_trained(state, loss):
  want, want_loss = trained()
  np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
  assert_close(state.params, want.params, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
  "pieces, device",
  [([1, 2, 2, 1], None), pytest.param(None, 3, marks=pytest.mark.slow)],
)
def test_split_training_equals_one_device(pieces, device):
  s = strategy(2, 4)
  batches = s.shard_batch(
    jax.tree.map(lambda x: np.stack([x] * 3), images()), P(None, "replica")
  )
  step = image_step(s, pieces, device)
  assert_trained(*s.run_steps(step, image_state(s), batches, reduce="mean"))


def test_split_convolution_exchanges_borders_only():
  s = strategy(1, 8)
  step = s.jit(image_step(s, [1, 2, 4, 1]))
  state = image_state(s)
  text = step.lower(state, images()).compile().as_text()
  assert "collective-permute" in text
  assert "all-gather" not in text and "all-to-all" not in text
  # Of 16 by 16 the first convolution sees 8 by 4.
  shapes = re.findall(r"= f32\[4,(\d+),(\d+),4\]\S* convolution\(", text)
  assert ("8", "4") in shapes and ("16", "16") not in shapes
  for _ in range(3):
    state, loss = step(state, images())
  assert_trained(state, loss[0])
