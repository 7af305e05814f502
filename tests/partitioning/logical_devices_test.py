"""Annotations of tensors for logical devices, eagerly and in jax.jit."""

import collections
import functools
import itertools
import math
import re

from factors import factorizations
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxshard.partitioning import logical_devices
from flaxshard.partitioning import mesh as mesh_lib

P = jax.sharding.PartitionSpec
NamedSharding = jax.sharding.NamedSharding
AUTO = jax.sharding.AxisType.Auto


@functools.cache
def create_mesh(replicas, logical, axis_type=AUTO):
  devices = np.array(jax.devices()[: replicas * logical])
  grid = devices.reshape(replicas, logical)
  return mesh_lib.from_grid(grid, axis_type=axis_type)


MESH = create_mesh(2, 4)
X = np.arange(32, dtype=np.float32).reshape(8, 4)


def put_batch(mesh=MESH, x=X):
  """Puts an array on the mesh, split over the replicas."""
  return jax.device_put(x, NamedSharding(mesh, P("replica")))


def numbered_tensor(pieces):
  """Returns numbered elements, two for each piece along each dimension."""
  shape = [2 * count for count in pieces]
  return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


def assert_split(mesh, array, value, pieces):
  """The pieces are on the logical devices; every replica has all of them."""
  positions = {device: at for at, device in np.ndenumerate(mesh.devices)}
  sizes = mesh.devices.shape[1:]
  tiles = {}
  for shard in array.addressable_shards:
    replica, *place = positions[shard.device]
    np.testing.assert_array_equal(shard.data, value[shard.index])
    logical = int(np.ravel_multi_index(place, sizes)) if place else 0
    tiles[replica, logical] = tuple(
      s.indices(n)[:2] for s, n in zip(shard.index, value.shape, strict=True)
    )
  row_major = [
    tuple(
      (at * n // count, (at + 1) * n // count)
      for at, n, count in zip(tile, value.shape, pieces, strict=True)
    )
    for tile in np.ndindex(*pieces)
  ]
  for replica in range(len(mesh.devices)):
    found = [tiles[replica, i] for i in range(len(row_major))]
    assert sorted(found) == sorted(row_major), pieces
    if len(set(sizes)) <= 1:
      assert found == row_major, pieces


def shard_shapes(array):
  return {shard.data.shape for shard in array.addressable_shards}


def device_ids(array):
  return sorted(d.id for d in array.sharding.device_set)


def assert_equal(actual, expected):
  assert actual.dtype == expected.dtype
  if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
    assert jax.random.key_impl(actual) == jax.random.key_impl(expected)
    actual, expected = map(jax.random.key_data, (actual, expected))
  np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def assert_close(actual, expected):
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6),
    actual,
    expected,
  )


# split


@pytest.mark.parametrize(
  "replicas, logical",
  [(1, 8), (1, 6), (2, 4)],
)
def test_every_partition_splits_as_asked(replicas, logical):
  mesh = create_mesh(replicas, logical)
  partitions = [p for rank in (1, 2, 4) for p in factorizations(logical, rank)]
  tensors = [numbered_tensor(p) for p in partitions]
  for pieces, x in zip(partitions, tensors, strict=True):
    assert_split(mesh, logical_devices.split(mesh, x, pieces), x, pieces)

  @jax.jit
  def plus_one(tensors):
    return [
      logical_devices.split(mesh, x, list(pieces)) + 1
      for pieces, x in zip(partitions, tensors, strict=True)
    ]

  for pieces, x, y in zip(partitions, tensors, plus_one(tensors), strict=True):
    assert_split(mesh, y, x + 1, pieces)


def test_split_keeps_the_split_of_other_dimensions_over_replicas():
  x = np.arange(2 * 4 * 4 * 4).reshape(2, 4, 4, 4).astype(np.float32)

  def split(x):
    return logical_devices.split(MESH, x, [1, 2, 2, 1])

  for array in (split(put_batch(x=x)), jax.jit(split)(put_batch(x=x))):
    assert_equal(array, x)
    assert array.sharding.spec[:3] == ("replica", "m0", "m1")
    for shard in array.addressable_shards:
      replica, i, j = np.argwhere(MESH.devices == shard.device)[0]
      at = x[replica : replica + 1, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
      np.testing.assert_array_equal(shard.data, at)
  # A dimension that is split into pieces is no longer split over replicas.
  for array in (
    logical_devices.split(MESH, put_batch(), [4, 1]),
    jax.jit(lambda x: logical_devices.split(MESH, x, [4, 1]))(put_batch()),
  ):
    assert_split(MESH, array, X, (4, 1))


def test_split_moves_arrays_from_other_devices():
  other = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  for x in (
    jax.device_put(X, jax.devices()[3]),
    jax.device_put(X, NamedSharding(other, P("data"))),
    jax.device_put(X, NamedSharding(MESH, P("m0", ("replica", "m1")))),
    nnx.Param(jnp.asarray(X)),
  ):
    array = logical_devices.split(MESH, x, (2, 2))
    assert shard_shapes(array) <= {(4, 2), (4, 1)}
    assert_equal(array, X)


@pytest.mark.parametrize(
  "pieces, error, facts",
  [
    ([4], ValueError, ("(8, 4)", "got 1")),
    ([3, 1], ValueError, ("logical devices, 4", "got 3")),
    ([2, 4], ValueError, ("logical devices, 4", "got 8")),
    ([4, 2.0], TypeError, ("[1]", "integer", "got 2.0")),
  ],
)
def test_invalid_partition_raises(pieces, error, facts):
  def split(x):
    return logical_devices.split(MESH, x, pieces)

  for call in (split, jax.jit(split)):
    with pytest.raises(error) as e:
      call(X)
    for fact in ("partition_dimensions", *facts):
      assert fact in str(e.value)


def test_indivisible_partition_raises():
  with pytest.raises(ValueError, match="partition_dimensions=") as e:
    logical_devices.split(MESH, X[:6], [4, 1])
  for fact in ("[4, 1]", "dimension 0", "(6, 4)", "by 4"):
    assert fact in str(e.value)


# replicate


def test_replicate_gathers_only_within_a_replica():
  spread = jax.device_put(X, NamedSharding(MESH, P("replica", ("m0", "m1"))))

  def split_and_replicate(x):
    x = logical_devices.split(MESH, x, [1, 4]) * 2
    return logical_devices.replicate(MESH, x) / 2

  for array in (
    logical_devices.replicate(MESH, spread),
    jax.jit(split_and_replicate)(spread),
    jax.vmap(lambda x: logical_devices.replicate(MESH, x))(spread),
  ):
    assert_equal(array, X)
    assert array.sharding.spec[0] == "replica"
    assert shard_shapes(array) == {(4, 4)}
  text = jax.jit(split_and_replicate).lower(spread).compile().as_text()
  # It gathers the quarters of a replica, not the half of the other replica.
  assert "all-gather" in text and "f32[8," not in text.split("ENTRY")[1]
  whole = jax.jit(lambda x: logical_devices.replicate(MESH, x) + 0)(X)
  assert shard_shapes(whole) == {(8, 4)}


# assign, eagerly


@pytest.mark.parametrize("replicas, logical", [(2, 3), (4, 1)])
def test_assign_moves_arrays_to_one_logical_device(replicas, logical):
  mesh = create_mesh(replicas, logical)
  for i in range(logical):
    ids = [replica * logical + i for replica in range(replicas)]
    for x, shape in ((X, (8, 4)), (put_batch(mesh), (8 // replicas, 4))):
      array = logical_devices.assign(mesh, x, i)
      assert_equal(array, X)
      assert device_ids(array) == ids
      assert shard_shapes(array) == {shape}
  # JAX computes where the data is.
  later = jnp.tanh(array) @ X.T
  assert device_ids(later) == ids
  assert device_ids(logical_devices.assign(mesh, later, 0))[0] == 0


def test_results_of_an_eager_call_are_on_the_device():
  out = logical_devices.on_device(
    MESH, 2, lambda x, k: {"y": x * k, "z": (jnp.ones(3), True, None)}, X, 2.0
  )
  assert {tuple(device_ids(x)) for x in jax.tree.leaves(out)} == {(2, 6)}
  np.testing.assert_array_equal(out["y"], 2 * X)
  assert out["z"][2] is None
  created = []
  logical_devices.on_device(MESH, 3, lambda: created.append(jnp.zeros(2)))
  assert device_ids(created[0]) == [3]  # that of the first replica


def two_stages(mesh, params, x):
  h = logical_devices.on_device(
    mesh, 1, lambda w, x: jnp.tanh(x @ w), params[0], x
  )
  h = logical_devices.assign(mesh, h, 2)
  return logical_devices.on_device(
    mesh, 3, lambda w, h: (h @ w) ** 2, params[1], h
  )


def one_stage(params, x):
  return (jnp.tanh(x @ params[0]) @ params[1]) ** 2


W = [
  np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3),
  np.linspace(1, 2, 3, dtype=np.float32),
]


def grad_of_grad(f):
  def norm(params, x):
    grads = jax.grad(lambda p: f(p, x).sum())(params)
    return sum((g**2).sum() for g in grads)

  return jax.grad(norm)


TRANSFORMS = {
  "grad of grad": grad_of_grad,
  "jvp": lambda f: lambda p, x: jax.jvp(f, (p, x), (p, x)),
  "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda p, x: f(p, x).sum())),
  "vmap of grad": lambda f: jax.vmap(jax.grad(f), (None, 0)),
  "scan": lambda f: (
    lambda p, x: jax.lax.scan(
      lambda c, row: (c + f(p, row), c), jnp.float32(0), x
    )
  ),
  "cond": lambda f: (
    lambda p, x: jax.lax.cond(jnp.sum(x) > 0, f, lambda p, x: x[:, 0], p, x)
  ),
}


def apply_transforms(f):
  """Returns one compiled function that applies all transforms of `f`."""
  return jax.jit(
    lambda params, x: {k: t(f)(params, x) for k, t in TRANSFORMS.items()}
  )


@pytest.fixture(scope="module")
def expected_results():
  return apply_transforms(one_stage)(W, X / 32)


@pytest.mark.slow
def test_traced_stages_under_transformations(expected_results):
  staged = apply_transforms(lambda p, x: two_stages(MESH, p, x))
  assert_close(staged(W, put_batch(x=X / 32)), expected_results)


@pytest.mark.slow
def test_eager_gradients_are_on_the_devices_of_the_parameters():
  params = [logical_devices.assign(MESH, w, 1 + 2 * i) for i, w in enumerate(W)]
  batch = logical_devices.assign(MESH, put_batch(), 1)
  grads, batch_grad = jax.grad(
    lambda p, x: two_stages(MESH, p, x).sum(), (0, 1)
  )(params, batch)
  ids = [device_ids(g) for g in (*grads, batch_grad)]
  assert ids == [[1, 5], [3, 7], [1, 5]]
  assert_close(grads, jax.grad(lambda p: one_stage(p, X).sum())(W))


# assign, traced


def split_keys(impl):
  return jax.random.split(jax.random.key(0, impl=impl), 4)


VALUES = {
  "float32": X,
  "nonfinite": np.array([np.nan, np.inf, -np.inf, 0.0], np.float32),
  "float16": X.astype(np.float16),
  "bfloat16": jnp.asarray(X, jnp.bfloat16),
  "float8_e4m3fn": jnp.asarray(X, jnp.float8_e4m3fn),
  "complex64": X * np.complex64(1 - 2j),
  "bool": X > 9,
  "int8": np.array([-128, 127, 3], np.int8),
  "uint8": np.array([255, 0], np.uint8),
  "int32": np.array([2**31 - 1, -(2**31)], np.int32),
  "uint32": np.array([2**32 - 1], np.uint32),
  "int4": jnp.array([-8, 7], jnp.int4),
  "empty": np.zeros((0, 3), np.float32),
  "scalar": np.float32(3),
  "threefry": split_keys("threefry2x32"),
  "rbg": split_keys("rbg"),
}


@pytest.mark.parametrize("traced", [False, True])
def test_every_dtype_keeps_its_values(traced):
  def move_twice(values):
    moved = {k: logical_devices.assign(MESH, v, 1) for k, v in values.items()}
    return logical_devices.on_device(MESH, 2, lambda v: [v, {"v": v}], moved)

  values = {k: jnp.asarray(v) for k, v in VALUES.items()}
  first, second = (jax.jit(move_twice) if traced else move_twice)(values)
  for name, value in values.items():
    assert_equal(first[name], value)
    assert_equal(second["v"][name], value)
    ids = [2, 6] if not traced else list(range(8))
    assert device_ids(first[name]) == ids


def computations(text):
  """Returns the computations of compiled text by name; the entry is ENTRY."""
  found = {}
  name = None
  for line in text.splitlines():
    head = re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line)
    if head:
      name = "ENTRY" if head[1] else head[2]
      found[name] = []
    elif name:
      found[name].append(line)
  return {name: "\n".join(lines) for name, lines in found.items()}


def text_outside_conditionals(text):
  """Returns the compiled text that every device runs."""
  bodies = computations(text)
  seen, todo = set(), ["ENTRY"]
  while todo:
    name = todo.pop()
    if name in seen:
      continue
    seen.add(name)
    body = re.sub(r"branch_computations=\{.*?\}", "", bodies[name])
    todo += [n for n in re.findall(r"%([\w.-]+)", body) if n in bodies]
  return "\n".join(bodies[name] for name in seen)


def test_traced_work_is_in_one_branch_and_its_result_is_reduced():
  def product(w, x):
    return logical_devices.on_device(
      MESH, 2, lambda w, x: jnp.tanh(x @ w), w, x
    )

  def grads(w, x):
    return jax.grad(lambda w: product(w, x).sum())(w)

  w = np.ones((4, 16), np.float32)
  for fn, dots in ((product, 1), (grads, 2)):
    text = jax.jit(fn).lower(w, put_batch()).compile().as_text()
    assert text.count(" dot(") == dots
    everywhere = text_outside_conditionals(text)
    assert " dot(" not in everywhere
    assert everywhere.count(" conditional(") == dots
    assert " all-reduce(" in everywhere
  # The parser does find a product that is outside of a conditional.
  text = jax.jit(lambda w, x: x @ w).lower(w, X).compile().as_text()
  assert " dot(" in text_outside_conditionals(text)


def test_only_one_device_runs_a_traced_function():
  calls = collections.Counter()
  mesh = create_mesh(1, 8)

  @jax.jit
  def both(x):
    def fn(x, name):
      jax.debug.callback(lambda: calls.update([name]))
      return x * 2

    y = logical_devices.on_device(mesh, 3, lambda x: fn(x, "first"), x)
    return logical_devices.on_device(mesh, 5, lambda x: fn(x, "second"), y)

  np.testing.assert_array_equal(both(X), 4 * X)
  jax.effects_barrier()
  assert calls == {"first": 1, "second": 1}


# Errors


ANNOTATIONS = {
  "split_to_logical_devices": lambda x: logical_devices.split(MESH, x, [2, 2]),
  "replicate_to_logical_devices": lambda x: logical_devices.replicate(MESH, x),
  "assign_to_logical_device": lambda x: logical_devices.assign(MESH, x, 1),
  "on_logical_device": lambda x: logical_devices.on_device(MESH, 1, jnp.sin, x),
}


@pytest.mark.parametrize("index, error", [(4, ValueError), (1.0, TypeError)])
def test_invalid_logical_device_id_raises(index, error):
  def assign(x):
    return logical_devices.assign(MESH, x, index)

  def call_on_device(x):
    return logical_devices.on_device(MESH, index, jnp.sin, x)

  for call in (assign, call_on_device, jax.jit(assign)):
    with pytest.raises(error, match="logical_device_id") as e:
      call(X)
    assert f"got {index}" in str(e.value)


def test_annotation_within_a_traced_branch_raises():
  for name, annotate in ANNOTATIONS.items():
    with pytest.raises(ValueError, match=f"^{name}: .* alone"):
      jax.jit(lambda x, fn=annotate: logical_devices.on_device(MESH, 1, fn, x))(
        X
      )
  # Eagerly it is one move after the other, and the result returns.
  annotate = ANNOTATIONS["on_logical_device"]
  array = logical_devices.on_device(MESH, 2, annotate, X)
  assert device_ids(array) == [2, 6]


def test_trace_on_another_mesh_raises():
  other_axes = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  for name, annotate in ANNOTATIONS.items():
    for mesh in (other_axes, create_mesh(4, 2)):
      with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=f"^{name} is traced on the mesh") as e,
      ):
        jax.jit(annotate)(X)
      assert str(dict(MESH.shape)) in str(e.value)
    with jax.set_mesh(MESH):
      array = jax.jit(annotate)(X)
    np.testing.assert_allclose(array, annotate(X), rtol=1e-6)


def test_closing_over_a_traced_array_on_the_mesh_raises():
  @jax.jit
  def closes(x):
    y = logical_devices.assign(MESH, x, 1)
    return logical_devices.on_device(MESH, 2, lambda x: x + y, x)

  with pytest.raises(ValueError, match=r"closes over a traced float32\[8,4\]"):
    closes(X)


def test_single_logical_device_has_the_whole_tensor():
  mesh = create_mesh(8, 1)
  calls = {
    "split": lambda x: logical_devices.split(mesh, x, [1, 1]),
    "replicate": lambda x: logical_devices.replicate(mesh, x),
    "assign": lambda x: logical_devices.assign(mesh, x, 0),
    "on_device": lambda x: logical_devices.on_device(mesh, 0, lambda: x * 1),
  }
  for call in itertools.chain(calls.values(), map(jax.jit, calls.values())):
    array = call(put_batch(mesh))
    assert_equal(array, X)
    assert array.sharding.spec[0] == "replica"


@pytest.mark.parametrize(
  "call",
  [
    lambda x: logical_devices.assign(MESH, x, 0),
    lambda x: logical_devices.replicate(MESH, x),
    lambda x: logical_devices.split(MESH, x, [4]),
  ],
)
def test_integers_that_do_not_fit_raise(call):
  with pytest.raises(ValueError, match=r"tensor .* do not fit int32"):
    call(np.full(4, 2**31))
