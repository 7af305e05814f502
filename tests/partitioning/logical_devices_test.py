"""Replicas of several logical devices: annotations, eagerly, in jit and run."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tree_equality import assert_trees_close
from tree_equality import assert_trees_equal

import flaxshard as fs

P = jax.sharding.PartitionSpec
NamedSharding = jax.sharding.NamedSharding
EXPLICIT = jax.sharding.AxisType.Explicit


def strategy(replicas, *sizes, **options):
  """Returns a strategy whose logical axes are m0, m1, ... of these sizes."""
  axes = {f"m{i}": size for i, size in enumerate(sizes)}
  return fs.Strategy(
    devices=jax.devices()[: replicas * math.prod(sizes)],
    mesh_shape={"replica": replicas, **axes},
    **options,
  )


S = strategy(2, 2, 2)
X = np.arange(32, dtype=np.float32).reshape(8, 4)


def put_batch(s, x=X, *spec):
  """Puts an array on the mesh, split over the replicas."""
  return jax.device_put(x, NamedSharding(s.mesh, P("replica", *spec)))


def shard_shapes(array):
  return {shard.data.shape for shard in array.addressable_shards}


def device_ids(array):
  return sorted(d.id for d in array.sharding.device_set)


# -- split and replicate.


@pytest.mark.parametrize(
  ("s", "partitions"),
  [
    (strategy(1, 2, 2, 2), [(8,), (1, 8), (2, 4), (4, 1, 2, 1), (2, 2, 2)]),
    (S, [(4,), (2, 2), (1, 4)]),
    (strategy(1, 2, 3), [(6, 1), (2, 3), (3, 1, 2)]),
    (strategy(1, 2, 4, 1), [(1, 2, 4), (4, 2), (8, 1)]),
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
      shards = array.addressable_shards[: s.num_logical_devices]
      firsts = [int(np.asarray(shard.data).min()) for shard in shards]
      assert len(set(firsts)) == s.num_logical_devices
      # In row-major order, if all axes have one size.
      if len(set(s.mesh.axis_sizes[1:])) == 1:
        assert firsts == sorted(firsts)


@pytest.mark.parametrize("s", [S, strategy(2, 2, 2, axis_type=EXPLICIT)])
def test_each_replica_splits_its_tensor_in_run(s):
  partitions = [(4,), (2, 2), (2, 1, 1, 1, 2)]
  sides = [[2 * n for n in pieces] for pieces in partitions]
  xs = [np.arange(2 * np.prod(n)).reshape(2, *n) for n in sides]

  def split_and_undo(xs):
    split = [
      s.split_to_logical_devices(x[0] * 3, pieces)
      for x, pieces in zip(xs, partitions, strict=True)
    ]
    return split, [s.replicate_to_logical_devices(x) / 3 for x in split]

  args = [put_batch(s, x) for x in xs]
  once = s.run(split_and_undo, (args,))
  _, last = s.run_steps(lambda n, xs: (n, split_and_undo(xs)), 0.0, [args] * 2)
  for split, undone in (once, last):
    for x, y, z in zip(xs, split, undone, strict=True):
      np.testing.assert_array_equal(y, 3 * x)
      np.testing.assert_array_equal(z, x)
      assert shard_shapes(y.value) == {(1, *[2] * (x.ndim - 1))}
      assert shard_shapes(z.value) == {(1, *x.shape[1:])}


def test_split_keeps_the_split_of_other_dimensions_over_replicas():
  x = np.arange(128, dtype=np.float32).reshape(2, 4, 4, 4)
  split = lambda x: S.split_to_logical_devices(x, [1, 2, 2, 1])
  for array in (split(put_batch(S, x)), jax.jit(split)(put_batch(S, x))):
    assert_trees_equal(array, x)
    assert array.sharding.spec[:3] == ("replica", "m0", "m1")
  # A dimension that is split into pieces is no longer split over replicas.
  rows = lambda x: S.split_to_logical_devices(x, [4, 1])
  for array in (rows(put_batch(S)), jax.jit(rows)(put_batch(S))):
    assert_trees_equal(array, X)
    assert shard_shapes(array) == {(2, 4)}


def test_replicate_gathers_only_within_a_replica():
  spread = put_batch(S, X, ("m0", "m1"))

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
  with jax.set_mesh(S.mesh):
    whole = jax.jit(lambda x: S.replicate_to_logical_devices(x) + 0)(X)
  assert shard_shapes(whole) == {(8, 4)}


def image_gradient(s, pieces):
  """Returns a function of a kernel and of images, which it splits."""

  def loss_fn(kernel, images):
    images = s.split_to_logical_devices(images, pieces)
    out = jax.nn.relu(jax.lax.conv(images, kernel, (1, 1), "SAME"))
    out = s.replicate_to_logical_devices(out.max((2, 3)))
    return (out**2).mean()

  return s.jit(jax.value_and_grad(loss_fn))


def test_split_images_equal_whole_ones_and_exchange_borders_alone():
  draw = lambda *shape: np.random.default_rng(0).normal(size=shape).astype("f4")
  args = draw(4, 2, 3, 3), draw(4, 2, 16, 16)
  wanted = image_gradient(strategy(1), [1, 1, 1, 1])(*args)
  split = image_gradient(strategy(1, 2, 2, 2), [1, 1, 2, 4])
  assert_trees_close(split(*args), wanted, rtol=1e-4)
  text = split.lower(*args).compile().as_text()
  assert "collective-permute" in text
  assert "all-gather" not in text and "all-to-all" not in text


# -- assign and on_logical_device.


@pytest.mark.parametrize("replicas, logical", [(2, 3), (4, 1)])
def test_assign_moves_arrays_to_one_logical_device(replicas, logical):
  s = strategy(replicas, logical)
  for i in range(logical):
    ids = [replica * logical + i for replica in range(replicas)]
    for x, shape in ((X, (8, 4)), (put_batch(s), (8 // replicas, 4))):
      array = s.assign_to_logical_device(x, i)
      assert_trees_equal(array, X)
      assert device_ids(array) == ids
      assert shard_shapes(array) == {shape}
  # JAX computes where the data is.
  assert device_ids(jnp.tanh(array) @ X.T) == ids
  rows = s.run(jax.vmap(s.replicate_to_logical_devices), (X,))
  assert_trees_equal(rows[0], X)


VALUES = {
  "nonfinite": np.array([np.nan, np.inf, -np.inf, 0.0], np.float32),
  "complex64": X * np.complex64(1 - 2j),
  "bool": X > 9,
  "int8": np.array([-128, 127, 3], np.int8),
  "int4": np.array([-8, 7], jnp.int4),
  "empty": np.zeros((0, 3), np.float32),
  "scalar": np.float32(3),
  "keys": jax.random.split(jax.random.key(0), 4),
}


@pytest.mark.parametrize("traced", [False, True])
def test_every_dtype_keeps_its_values(traced):
  def move_twice(values):
    moved = {k: S.assign_to_logical_device(v, 1) for k, v in values.items()}
    return moved, S.on_logical_device(2, lambda v: v, moved)

  moved = (jax.jit(move_twice) if traced else move_twice)(VALUES)
  assert_trees_equal(moved, (jax.tree.map(jnp.asarray, VALUES),) * 2)
  ids = list(range(8)) if traced else [2, 6]
  assert all(device_ids(x) == ids for x in moved[1].values())


W = [np.linspace(-1, 1, 12, dtype="f").reshape(4, 3), np.float32([1, 1.5, 2])]


def two_stages(params, x):
  h = S.on_logical_device(1, lambda w, x: jnp.tanh(x @ w), params[0], x)
  h = S.assign_to_logical_device(h, 2)
  return S.on_logical_device(3, lambda w, h: (h @ w) ** 2, params[1], h)


def one_stage(params, x):
  return (jnp.tanh(x @ params[0]) @ params[1]) ** 2


@pytest.mark.slow
def test_eager_gradients_are_on_the_devices_of_the_parameters():
  params = [S.assign_to_logical_device(w, 1 + 2 * i) for i, w in enumerate(W)]
  args = params, S.assign_to_logical_device(put_batch(S), 1)
  grads = jax.grad(lambda p, x: two_stages(p, x).sum(), (0, 1))(*args)
  ids = [device_ids(g) for g in jax.tree.leaves(grads)]
  assert ids == [[1, 5], [3, 7], [1, 5]]
  wanted = jax.grad(lambda p, x: one_stage(p, x).sum(), (0, 1))(W, X)
  assert_trees_close(grads, wanted)


def test_traced_gradients():
  grads = lambda f, x: jax.vmap(jax.grad(f), (None, 0))(W, x)
  staged = functools.partial(grads, two_stages)
  wanted = grads(one_stage, X / 32)
  assert_trees_close(jax.jit(staged)(put_batch(S, X / 32)), wanted)
  with jax.set_mesh(S.mesh):
    assert_trees_close(staged(X / 32), wanted)


def test_function_runs_on_one_logical_device_of_each_replica():
  calls = collections.Counter()

  def host(replica, x):
    calls[int(replica)] += 1
    return np.asarray(x) * 2

  def fn(x):
    context = fs.get_replica_context()
    replica = context.replica_id_in_sync_group
    twice = jax.pure_callback(host, jax.typeof(x), replica, x)
    return twice, context.all_reduce("sum", x + replica)

  x = np.arange(3, dtype=np.float32)
  twice, total = S.run(lambda x: S.on_logical_device(2, fn, x), (x,))
  np.testing.assert_array_equal(twice, [2 * x] * 2)
  np.testing.assert_array_equal(total, [2 * x + 1] * 2)
  assert calls == {0: 1, 1: 1}


# -- Mistakes.

split = S.split_to_logical_devices
assign = S.assign_to_logical_device
on_device = S.on_logical_device
nested = lambda fn: jax.jit(lambda x: on_device(1, fn, x))
ALONE = "_device.*: .* alone"


def closes(x):
  y = assign(x, 1)
  return on_device(2, lambda x: x + y, x)


def trace_on(mesh):
  with jax.set_mesh(mesh):
    jax.jit(S.replicate_to_logical_devices)(X)


@pytest.mark.parametrize(
  ("call", "facts"),
  [
    (lambda x: split(x, [4]), r"partition.*\(8, 4\).*got 1"),
    (lambda x: split(x, [3, 1]), "devices, 4; .* product 3"),
    (lambda x: split(x, [4, 2.0]), r"dimensions\[1\].*got 2\.0"),
    (lambda x: split(x[:6], [4, 1]), r"=\[4, 1\].*axis 0.*4 times.*\(6, 4\)"),
    (lambda x: split(np.full((4, 4), 2**31), [2, 2]), "tensor.*2147.*int32"),
    (
      lambda x: strategy(1, 8).split_to_logical_devices(x, [2, 4]),
      r"partition.*\[2, 4\] cannot be built .*{'m0': 8}",
    ),
    (lambda x: assign(x, 4), "logical_device_id.*got 4"),
    (lambda x: assign(x, -1), "logical_device_id.*got -1"),
    # In a trace alone: there one program runs on all devices.
    (nested(lambda x: split(x, [2, 2])), f"^split_to.*{ALONE}"),
    (nested(nested(jnp.sin)), f"^on_logical.*{ALONE}"),
    (jax.jit(closes), r"closes over a traced float32\[8,4\]"),
    (lambda x: trace_on(strategy(4, 2).mesh), "traced on the m"),
  ],
)
def test_mistakes(call, facts):
  with pytest.raises(ValueError, match=facts):
    call(X)
