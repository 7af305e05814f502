"""Replicas of several logical devices: annotations, eagerly, in jit and run."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tree_equality import assert_trees_close
from tree_equality import assert_trees_equal

import flaxshard as fs

P = jax.sharding.PartitionSpec
NamedSharding = jax.sharding.NamedSharding
AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit


@functools.cache
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


S = strategy(2, 4)  # over the axes m0 and m1
MESH = S.mesh
X = np.arange(32, dtype=np.float32).reshape(8, 4)


def put_batch(mesh=MESH, x=X, spec=None):
  """Puts an array on the mesh, split over the replicas."""
  spec = P("replica") if spec is None else spec
  return jax.device_put(x, NamedSharding(mesh, spec))


def shard_shapes(array):
  return {shard.data.shape for shard in array.addressable_shards}


def starts(array):
  """Returns where the piece of each device of the first replica begins."""
  shards = sorted(array.addressable_shards, key=lambda s: s.device.id)
  shards = shards[: array.sharding.mesh.devices[0].size]
  return [tuple(i.start or 0 for i in shard.index) for shard in shards]


def device_ids(array):
  return sorted(d.id for d in array.sharding.device_set)


# -- split and replicate.


NAMED = fs.Strategy(mesh_shape={"replica": 1, "a": 2, "b": 4, "one": 1})


@pytest.mark.parametrize(
  ("s", "partitions"),
  [
    (strategy(1, 8), [(8,), (1, 8), (2, 4), (4, 1, 2, 1), (2, 2, 2)]),
    (strategy(1, 6), [(6, 1), (2, 3), (3, 1, 2)]),
    (S, [(4,), (2, 2), (1, 4)]),
    (NAMED, [(1, 2, 4), (4, 2), (8, 1)]),
  ],
  ids=str,
)
def test_partitions_split_as_asked(s, partitions):
  for pieces in partitions:
    # Two elements for each piece along each dimension.
    sides = [2 * n for n in pieces]
    x = np.arange(np.prod(sides), dtype=np.float32).reshape(sides)
    split = functools.partial(
      s.split_to_logical_devices, partition_dimensions=pieces
    )
    for array in (split(x), jax.jit(lambda x, split=split: split(x) + 0)(x)):
      assert_trees_equal(array, x)
      assert shard_shapes(array) == {(2,) * len(pieces)}
      assert len(set(starts(array))) == s.num_logical_devices
      # Axes of one size: in row-major order.
      if len(set(s.mesh.axis_sizes[1:])) == 1:
        assert starts(array) == sorted(starts(array))


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_each_replica_splits_its_tensor_in_run(axis_type):
  partitions = [(4,), (2, 2), (2, 1, 1, 1, 2)]
  s = strategy(2, 4, axis_type=axis_type)
  xs = [
    np.arange(2 * np.prod(p) * 2 ** len(p)).reshape(2, *(2 * n for n in p))
    for p in partitions
  ]

  @s.jit
  def split_and_undo(xs):
    split = [
      s.split_to_logical_devices(x[0] * 3, p)
      for x, p in zip(xs, partitions, strict=True)
    ]
    return split, [s.replicate_to_logical_devices(x) / 3 for x in split]

  split, undone = split_and_undo([put_batch(s.mesh, x) for x in xs])
  for x, p, y, z in zip(xs, partitions, split, undone, strict=True):
    np.testing.assert_array_equal(y, 3 * x)
    np.testing.assert_array_equal(z, x)
    assert shard_shapes(y.value) == {(1, *[2] * len(p))}
    assert shard_shapes(z.value) == {(1, *x.shape[1:])}


def test_split_keeps_the_split_of_other_dimensions_over_replicas():
  x = np.arange(128, dtype=np.float32).reshape(2, 4, 4, 4)
  split = lambda x: S.split_to_logical_devices(x, [1, 2, 2, 1])
  for array in (split(put_batch(x=x)), jax.jit(split)(put_batch(x=x))):
    assert_trees_equal(array, x)
    assert array.sharding.spec[:3] == ("replica", "m0", "m1")
  # A dimension that is split into pieces is no longer split over replicas.
  rows = lambda x: S.split_to_logical_devices(x, [4, 1])
  for array in (rows(put_batch()), jax.jit(rows)(put_batch())):
    assert_trees_equal(array, X)
    assert shard_shapes(array) == {(2, 4)}


def test_replicate_gathers_only_within_a_replica():
  spread = put_batch(spec=P("replica", ("m0", "m1")))

  def split_and_replicate(x):
    x = S.split_to_logical_devices(x, [1, 4]) * 2
    return S.replicate_to_logical_devices(x) / 2

  for array in (
    S.replicate_to_logical_devices(spread),
    jax.jit(split_and_replicate)(spread),
    jax.vmap(S.replicate_to_logical_devices)(spread),
  ):
    assert_trees_equal(array, X)
    assert array.sharding.spec[0] == "replica"
    assert shard_shapes(array) == {(4, 4)}
  text = jax.jit(split_and_replicate).lower(spread).compile().as_text()
  # It gathers the quarters of a replica, not the half of the other replica.
  assert "all-gather" in text and "f32[8," not in text.split("ENTRY")[1]
  whole = jax.jit(lambda x: S.replicate_to_logical_devices(x) + 0)(X)
  assert shard_shapes(whole) == {(8, 4)}


# -- assign and on_logical_device.


@pytest.mark.parametrize("replicas, logical", [(2, 3), (4, 1)])
def test_assign_moves_arrays_to_one_logical_device(replicas, logical):
  s = strategy(replicas, logical)
  for i in range(logical):
    ids = [replica * logical + i for replica in range(replicas)]
    for x, shape in ((X, (8, 4)), (put_batch(s.mesh), (8 // replicas, 4))):
      array = s.assign_to_logical_device(x, i)
      assert_trees_equal(array, X)
      assert device_ids(array) == ids
      assert shard_shapes(array) == {shape}
  # JAX computes where the data is.
  later = jnp.tanh(array) @ X.T
  assert device_ids(later) == ids
  assert device_ids(s.assign_to_logical_device(later, 0))[0] == 0


VALUES = {
  "nonfinite": np.array([np.nan, np.inf, -np.inf, 0.0], np.float32),
  "bfloat16": jnp.asarray(X, jnp.bfloat16),
  "complex64": X * np.complex64(1 - 2j),
  "bool": X > 9,
  "int8": np.array([-128, 127, 3], np.int8),
  "uint32": np.array([2**32 - 1], np.uint32),
  "int4": jnp.array([-8, 7], jnp.int4),
  "empty": np.zeros((0, 3), np.float32),
  "scalar": np.float32(3),
  "keys": jax.random.split(jax.random.key(0), 4),
}


@pytest.mark.parametrize("traced", [False, True])
def test_every_dtype_keeps_its_values(traced):
  def move_twice(values):
    moved = {k: S.assign_to_logical_device(v, 1) for k, v in values.items()}
    return S.on_logical_device(2, lambda v: [v, {"v": v}], moved)

  values = {k: jnp.asarray(v) for k, v in VALUES.items()}
  first, second = (jax.jit(move_twice) if traced else move_twice)(values)
  for name, value in values.items():
    assert_trees_equal(first[name], value)
    assert_trees_equal(second["v"][name], value)
    assert device_ids(first[name]) == (list(range(8)) if traced else [2, 6])


W = [
  np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3),
  np.linspace(1, 2, 3, dtype=np.float32),
]


def two_stages(params, x):
  h = S.on_logical_device(1, lambda w, x: jnp.tanh(x @ w), params[0], x)
  h = S.assign_to_logical_device(h, 2)
  return S.on_logical_device(3, lambda w, h: (h @ w) ** 2, params[1], h)


def one_stage(params, x):
  return (jnp.tanh(x @ params[0]) @ params[1]) ** 2


@pytest.mark.slow
def test_eager_gradients_are_on_the_devices_of_the_parameters():
  params = [S.assign_to_logical_device(w, 1 + 2 * i) for i, w in enumerate(W)]
  batch = S.assign_to_logical_device(put_batch(), 1)
  grads, batch_grad = jax.grad(lambda p, x: two_stages(p, x).sum(), (0, 1))(
    params, batch
  )
  ids = [device_ids(g) for g in (*grads, batch_grad)]
  assert ids == [[1, 5], [3, 7], [1, 5]]
  assert_trees_close(grads, jax.grad(lambda p: one_stage(p, X).sum())(W))


def test_traced_gradients():
  staged, wanted = (
    jax.jit(jax.vmap(jax.grad(f), (None, 0))) for f in (two_stages, one_stage)
  )
  assert_trees_close(staged(W, put_batch(x=X / 32)), wanted(W, X / 32))


def test_function_runs_on_one_logical_device_of_each_replica():
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
  twice, total = S.run(lambda x: S.on_logical_device(2, fn, x), (x,))
  np.testing.assert_array_equal(twice, [2 * x] * 2)
  np.testing.assert_array_equal(total, [2 * x + 1] * 2)
  assert calls == {0: 1, 1: 1}


# -- Mistakes.


def on_device_with(fn):
  return lambda x: S.on_logical_device(1, fn, x)


def closes(x):
  y = S.assign_to_logical_device(x, 1)
  return S.on_logical_device(2, lambda x: x + y, x)


split = S.split_to_logical_devices
assign = S.assign_to_logical_device
on_device = S.on_logical_device
ONE_AXIS = fs.Strategy(mesh_shape={"replica": 1, "model": 8})
ALONE = "_device.*: .* alone"


@pytest.mark.parametrize(
  ("call", "facts"),
  [
    (lambda x: split(x, [4]), r"partition.*\(8, 4\).*got 1"),
    (lambda x: split(x, [3, 1]), "devices, 4; .* product 3"),
    (lambda x: split(x, [4, 2.0]), r"dimensions\[1\].*got 2\.0"),
    (lambda x: split(x[:6], [4, 1]), r"=\[4, 1\].*axis 0.*4 times.*\(6, 4\)"),
    (lambda x: split(np.full((4, 4), 2**31), [2, 2]), "tensor.*2147.*int32"),
    (lambda x: assign(x, 4), "logical_device_id.*got 4"),
    (lambda x: assign(x, -1), "logical_device_id.*got -1"),
    (
      lambda x: ONE_AXIS.split_to_logical_devices(x, [2, 4]),
      r"partition.*\[2, 4\] cannot be built .*{'model': 8}",
    ),
    # In a trace alone: there one program runs on all devices.
    (
      jax.jit(on_device_with(lambda x: split(x, [2, 2]))),
      f"^split_to.*{ALONE}",
    ),
    (jax.jit(on_device_with(on_device_with(jnp.sin))), f"^on_logical.*{ALONE}"),
    (jax.jit(closes), r"closes over a traced float32\[8,4\]"),
  ],
)
def test_mistakes(call, facts):
  with pytest.raises(ValueError, match=facts):
    call(X)


def test_trace_on_another_mesh_raises():
  replicate = S.replicate_to_logical_devices
  for mesh in (jax.sharding.Mesh(jax.devices(), "data"), strategy(4, 2).mesh):
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="traced on the m"):
      jax.jit(replicate)(X)
  with jax.set_mesh(MESH):
    assert_trees_equal(jax.jit(replicate)(X), X)


# -- A convolution.


def image_gradient(s, pieces):
  """Returns a function of a kernel and of images, which it splits."""

  def loss_fn(kernel, images):
    images = s.split_to_logical_devices(images, pieces)
    out = jax.nn.relu(jax.lax.conv(images, kernel, (1, 1), "SAME"))
    out = s.replicate_to_logical_devices(out.max((2, 3)))
    return (out**2).mean()

  return s.jit(jax.value_and_grad(loss_fn))


def test_split_images_equal_whole_ones_and_exchange_borders_alone():
  rng = np.random.default_rng(0)
  args = [
    rng.normal(size=shape).astype(np.float32)
    for shape in ((4, 2, 3, 3), (4, 2, 16, 16))
  ]
  wanted = image_gradient(strategy(1, 1), [1, 1, 1, 1])(*args)
  split = image_gradient(strategy(1, 8), [1, 1, 2, 4])
  assert_trees_close(split(*args), wanted, rtol=1e-4)
  text = split.lower(*args).compile().as_text()
  assert "collective-permute" in text
  assert "all-gather" not in text and "all-to-all" not in text
