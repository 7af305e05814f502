"""Annotations: where tensors lie and work is done, eagerly and in jax.jit."""

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
EXPLICIT = jax.sharding.AxisType.Explicit


def make(replicas, logical, **options):
  devices = np.array(jax.devices()[: replicas * logical])
  return mesh_lib.make(devices.reshape(replicas, logical), **options)


MESH = make(2, 4)
X = np.arange(32, dtype=np.float32).reshape(8, 4)


def batch(mesh=MESH, x=X):
  return jax.device_put(x, NamedSharding(mesh, P("replica")))


def tensor(pieces):
  """Numbered elements, two to a piece along each dimension."""
  shape = [2 * count for count in pieces]
  return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


def bounds(index, shape):
  return tuple((s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))


def assert_split(mesh, array, value, pieces):
  """The pieces lie on the logical devices, whole in each replica."""
  where = {d: at for at, d in np.ndenumerate(mesh.devices)}
  sizes = mesh.devices.shape[1:]
  tiles = {}
  for shard in array.addressable_shards:
    replica, *place = where[shard.device]
    np.testing.assert_array_equal(shard.data, value[shard.index])
    logical = int(np.ravel_multi_index(place, sizes)) if place else 0
    tiles[replica, logical] = bounds(shard.index, value.shape)
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


def assert_equal(got, want):
  assert got.dtype == want.dtype
  if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
    assert jax.random.key_impl(got) == jax.random.key_impl(want)
    got, want = map(jax.random.key_data, (got, want))
  np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


# split


@pytest.mark.parametrize(
  "replicas, logical",
  [(1, 8), (1, 6), (2, 4), (4, 2), (2, 3), (1, 7), (2, 1)],
)
def test_split_into_every_partition(replicas, logical):
  mesh = make(replicas, logical)
  partitions = [
    p for rank in range(1, 6) for p in factorizations(logical, rank)
  ]
  tensors = [tensor(p) for p in partitions]
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


def test_a_split_over_replicas_stays_where_the_partition_leaves_it():
  x = np.arange(2 * 4 * 4 * 4).reshape(2, 4, 4, 4).astype(np.float32)

  def split(x):
    return logical_devices.split(MESH, x, [1, 2, 2, 1])

  for array in (split(batch(x=x)), jax.jit(split)(batch(x=x))):
    assert_equal(array, x)
    assert array.sharding.spec[:3] == ("replica", "m0", "m1")
    for shard in array.addressable_shards:
      replica, i, j = np.argwhere(MESH.devices == shard.device)[0]
      at = x[replica : replica + 1, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
      np.testing.assert_array_equal(shard.data, at)
  # The batch is split as asked: then each replica has all of it.
  for array in (
    logical_devices.split(MESH, batch(), [4, 1]),
    jax.jit(lambda x: logical_devices.split(MESH, x, [4, 1]))(batch()),
  ):
    assert_split(MESH, array, X, (4, 1))


def test_split_moves_what_lies_elsewhere():
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


def test_split_under_transformations():
  def square(x):
    return (logical_devices.split(MESH, x, [2, 2]) ** 3).sum()

  b = batch()
  for transform in (lambda f: f, jax.jit, jax.checkpoint):
    grad = transform(jax.grad(square))
    np.testing.assert_allclose(grad(b), 3 * X**2)
    second = transform(jax.grad(lambda x, g=grad: g(x).sum()))
    np.testing.assert_allclose(second(b), 6 * X)

  def rows(x):
    return logical_devices.split(MESH, x, [4]) * 2

  for mapped in (jax.vmap(rows), jax.jit(jax.vmap(rows))):
    array = mapped(b)
    np.testing.assert_array_equal(array, 2 * X)
    assert array.sharding.spec == P("replica", ("m0", "m1"))

  def loop(x):
    return jax.lax.scan(lambda c, _: (rows(c), None), x, None, length=3)[0]

  array = jax.jit(loop)(X[0])
  np.testing.assert_array_equal(array, 8 * X[0])
  assert_split(MESH, array, 8 * X[0], (4,))


@pytest.mark.parametrize(
  "pieces, error, message",
  [
    ([4], ValueError, r"of shape (8, 4): 2, got 1"),
    ([1, 4, 1], ValueError, r"of shape (8, 4): 2, got 3"),
    ([3, 1], ValueError, "dimension 0 of the tensor, of shape (8, 4)"),
    ([1, 3], ValueError, "cannot be divided into 3 pieces"),
    ([2, 4], ValueError, "number of logical devices, 4, got 8"),
    ([1, 1], ValueError, "number of logical devices, 4, got 1"),
    ([0, 4], ValueError, "at least 1 each, got 0"),
    ([-4, -1], ValueError, "at least 1 each, got -4"),
    ([2.0, 2], TypeError, "must be integers, got 2.0"),
    ([True, 4], TypeError, "must be integers, got True"),
    (["2", "2"], TypeError, "must be integers, got '2'"),
    ([None, 4], TypeError, "must be integers, got None"),
    ([2, [2]], TypeError, "must be integers, got [2]"),
    (np.array([2.0, 2.0]), TypeError, "must be integers, got 2.0"),
    (np.array([[2, 2]]), TypeError, "must be integers, got [2, 2]"),
    (np.array(4), TypeError, "must be a list of integers"),
    ("22", TypeError, "must be a list of integers"),
    (b"\x02\x02", TypeError, "must be a list of integers"),
    (4, TypeError, "must be a list of integers"),
    (None, TypeError, "must be a list of integers"),
    ({2, 4}, TypeError, "must be a list of integers"),
    ({2: 0, 1: 0}, TypeError, "must be a list of integers"),
  ],
)
def test_partitions_that_cannot_be(pieces, error, message):
  def split(x):
    return logical_devices.split(MESH, x, pieces)

  for call in (split, jax.jit(split)):
    with pytest.raises(error) as e:
      call(X)
    assert str(e.value).startswith(f"partition_dimensions={pieces!r}")
    assert message in str(e.value)


def test_partitions_are_any_sequence_of_integers():
  for pieces in ([2, 2], (2, 2), np.array([2, 2]), [np.int8(2), np.int64(2)]):
    array = logical_devices.split(MESH, X, pieces)
    assert array.sharding.spec == P("m0", "m1")


def test_named_axes_split_as_far_as_they_can():
  mesh = make(1, 8, logical_axes={"model": 2, "data": 4})
  x = tensor((1, 2, 4, 1))
  array = logical_devices.split(mesh, x, [1, 2, 4, 1])
  assert array.sharding.spec == P(None, "model", "data", None)
  assert_split(make(1, 8), array, x, (1, 2, 4, 1))
  with pytest.raises(ValueError, match=r"\[1, 2, 2, 2\] cannot be made of"):
    logical_devices.split(mesh, tensor((1, 2, 2, 2)), (1, 2, 2, 2))


# replicate


def test_replicate_gathers_from_logical_devices_alone():
  spread = jax.device_put(X, NamedSharding(MESH, P("replica", ("m0", "m1"))))

  def undone(x):
    x = logical_devices.split(MESH, x, [1, 4]) * 2
    return logical_devices.replicate(MESH, x) / 2

  for array in (
    logical_devices.replicate(MESH, spread),
    jax.jit(undone)(spread),
    jax.vmap(lambda x: logical_devices.replicate(MESH, x))(spread),
  ):
    assert_equal(array, X)
    assert array.sharding.spec[0] == "replica"
    assert shard_shapes(array) == {(4, 4)}
  text = jax.jit(undone).lower(spread).compile().as_text()
  # Of a replica's quarters, not of the other replica's half.
  assert "all-gather" in text and "f32[8," not in text.split("ENTRY")[1]
  whole = jax.jit(lambda x: logical_devices.replicate(MESH, x) + 0)(X)
  assert shard_shapes(whole) == {(8, 4)}


def test_replicate_is_differentiable():
  def cube(x):
    return (logical_devices.replicate(MESH, x) ** 3).sum()

  for grad in (jax.grad(cube), jax.jit(jax.grad(cube))):
    np.testing.assert_allclose(grad(batch()), 3 * X**2)


# assign, eagerly


@pytest.mark.parametrize("replicas, logical", [(2, 4), (1, 8), (2, 3), (4, 1)])
def test_assign_puts_arrays_on_one_logical_device(replicas, logical):
  mesh = make(replicas, logical)
  for i in range(logical):
    mine = [replica * logical + i for replica in range(replicas)]
    for x, shape in ((X, (8, 4)), (batch(mesh), (8 // replicas, 4))):
      array = logical_devices.assign(mesh, x, i)
      assert_equal(array, X)
      assert device_ids(array) == mine
      assert shard_shapes(array) == {shape}
    later = jnp.tanh(array) @ X.T
    assert device_ids(later) == mine  # computation follows data
    assert device_ids(logical_devices.assign(mesh, later, 0))[0] == 0


def test_results_of_an_eager_call_stay_on_the_device():
  out = logical_devices.on_device(
    MESH, 2, lambda x, k: {"y": x * k, "z": (jnp.ones(3), True, None)}, X, 2.0
  )
  assert {tuple(device_ids(x)) for x in jax.tree.leaves(out)} == {(2, 6)}
  np.testing.assert_array_equal(out["y"], 2 * X)
  assert out["z"][2] is None
  made = []
  logical_devices.on_device(MESH, 3, lambda: made.append(jnp.zeros(2)))
  assert device_ids(made[0]) == [3]  # on the first replica's


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
  "grad": lambda f: jax.grad(lambda p, x: f(p, x).sum()),
  "grad of grad": grad_of_grad,
  "vjp": lambda f: lambda p, x: jax.vjp(f, p, x)[1](np.ones(8, np.float32)),
  "jvp": lambda f: lambda p, x: jax.jvp(f, (p, x), (p, x)),
  "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda p, x: f(p, x).sum())),
  "vmap": lambda f: jax.vmap(f, (None, 0)),
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


def assert_close(got, want):
  jax.tree.map(
    lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6),
    got,
    want,
  )


def transformed(f):
  """All of them in one program."""
  return jax.jit(
    lambda params, x: {k: t(f)(params, x) for k, t in TRANSFORMS.items()}
  )


@functools.cache
def of_one_stage():
  return transformed(one_stage)(W, X / 32)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_stages_under_transformations(name):
  staged = TRANSFORMS[name](lambda p, x: two_stages(MESH, p, x))
  params = [jnp.asarray(w) for w in W]
  assert_close(staged(params, batch(x=X / 32)), of_one_stage()[name])


def test_stages_under_transformations_in_jit():
  staged = transformed(lambda p, x: two_stages(MESH, p, x))
  assert_close(staged(W, batch(x=X / 32)), of_one_stage())


def test_gradients_land_where_the_parameters_are():
  params = [logical_devices.assign(MESH, w, 1 + 2 * i) for i, w in enumerate(W)]
  b = logical_devices.assign(MESH, batch(), 1)
  grads, gx = jax.grad(lambda p, x: two_stages(MESH, p, x).sum(), (0, 1))(
    params, b
  )
  assert [device_ids(g) for g in (*grads, gx)] == [[1, 5], [3, 7], [1, 5]]
  want = jax.grad(lambda p: one_stage(p, X).sum())(W)
  assert_close(grads, want)


# assign, traced


def keys(impl):
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
  "threefry": keys("threefry2x32"),
  "rbg": keys("rbg"),
}


@pytest.mark.parametrize("traced", [False, True])
def test_every_dtype_comes_through(traced):
  def through(values):
    moved = {k: logical_devices.assign(MESH, v, 1) for k, v in values.items()}
    return logical_devices.on_device(MESH, 2, lambda v: [v, {"v": v}], moved)

  values = {k: jnp.asarray(v) for k, v in VALUES.items()}
  first, second = (jax.jit(through) if traced else through)(values)
  for name, value in values.items():
    assert_equal(first[name], value)
    assert_equal(second["v"][name], value)
    want = [2, 6] if not traced else list(range(8))
    assert device_ids(first[name]) == want


def computations(text):
  """Returns the computations of compiled text by name, the entry as ENTRY."""
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


def outside_of_conditionals(text):
  """Returns the compiled text that runs on every device."""
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


def test_work_is_in_one_branch_and_its_result_reduced():
  def product(w, x):
    return logical_devices.on_device(
      MESH, 2, lambda w, x: jnp.tanh(x @ w), w, x
    )

  def grads(w, x):
    return jax.grad(lambda w: product(w, x).sum())(w)

  w = np.ones((4, 16), np.float32)
  for fn, dots in ((product, 1), (grads, 2)):
    text = jax.jit(fn).lower(w, batch()).compile().as_text()
    assert text.count(" dot(") == dots
    everywhere = outside_of_conditionals(text)
    assert " dot(" not in everywhere
    assert everywhere.count(" conditional(") == dots
    assert " all-reduce(" in everywhere
  # And it is found where there is no conditional.
  text = jax.jit(lambda w, x: x @ w).lower(w, X).compile().as_text()
  assert " dot(" in outside_of_conditionals(text)


def test_one_device_calls_back():
  calls = collections.Counter()
  mesh = make(1, 8)

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


def test_what_a_traced_function_may_do():
  def loops(x, k):
    total, steps = jax.lax.scan(
      lambda c, row: (jnp.tanh(c + row), c), jnp.zeros(4), x
    )
    count = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1,), (0,))
    return total.sum() * k + steps.sum() + count[0]

  @jax.jit
  def calls(x):
    none = logical_devices.on_device(MESH, 0, lambda x: None, x)
    made = logical_devices.on_device(
      MESH, 1, lambda: (jnp.arange(3), 2.0, True)
    )
    closed = logical_devices.on_device(MESH, 2, lambda y: x + y, 1.0)
    looped = jax.value_and_grad(
      lambda x: logical_devices.on_device(MESH, 3, loops, x, 2)
    )(x)
    noise = logical_devices.on_device(
      MESH, 3, jax.random.normal, jax.random.key(1)
    )
    return none, made, closed, looped, noise

  none, made, closed, looped, noise = calls(X / 8)
  assert none is None
  np.testing.assert_array_equal(made[0], [0, 1, 2])
  assert float(made[1]) == 2.0 and made[2].dtype == bool and bool(made[2])
  np.testing.assert_array_equal(closed, X / 8 + 1)
  want = jax.value_and_grad(lambda x: loops(x, 2))(jnp.asarray(X / 8))
  assert_close(looped, want)
  np.testing.assert_allclose(noise, jax.random.normal(jax.random.key(1)), 1e-6)


# What cannot be


@pytest.mark.parametrize("index", [-1, 4, 100, -(2**70)])
@pytest.mark.parametrize("traced", [False, True])
def test_no_such_logical_device(index, traced):
  for where, call in {
    "assign_to_logical_device": lambda x: logical_devices.assign(
      MESH, x, index
    ),
    "on_logical_device": lambda x: logical_devices.on_device(
      MESH, index, jnp.sin, x
    ),
  }.items():
    with pytest.raises(ValueError, match=f"{where}: logical_device_id={index}"):
      (jax.jit(call) if traced else call)(X)
  with pytest.raises(ValueError, match="allowed: 0 to 3"):
    logical_devices.assign(MESH, X, index)


@pytest.mark.parametrize("index", [1.0, True, "1", None, [1], np.array(1)])
def test_logical_device_ids_are_integers(index):
  with pytest.raises(TypeError, match="logical_device_id must be an integer"):
    logical_devices.assign(MESH, X, index)
  assert device_ids(logical_devices.assign(MESH, X, np.int64(1))) == [1, 5]


@pytest.mark.parametrize(
  "value",
  [
    "abc",
    None,
    [1.0, 2.0],
    (X, X),
    {"a": X},
    object(),
    np.array(["a"]),
    np.array([None]),
    jax.ShapeDtypeStruct((4, 4), jnp.float32),
  ],
  ids=lambda value: type(value).__name__,
)
def test_tensors_are_arrays(value):
  for call in (
    lambda: logical_devices.split(MESH, value, [2, 2]),
    lambda: logical_devices.replicate(MESH, value),
    lambda: logical_devices.assign(MESH, value, 1),
  ):
    with pytest.raises(TypeError, match=r"_device.*: tensor must be an array"):
      call()


@pytest.mark.parametrize("traced", [False, True])
def test_functions_take_and_return_arrays(traced):
  def call(fn, *args):
    def on_device(x):
      return logical_devices.on_device(MESH, 1, fn, x, *args)

    return (jax.jit(on_device) if traced else on_device)(X)

  with pytest.raises(TypeError, match="fn must be callable, got 3"):
    call(3)
  with pytest.raises(TypeError, match=r"args\[1/k\] must be an array, got 'a'"):
    call(lambda x, k: x, {"k": "a"})
  with pytest.raises(TypeError, match=r"fn returns\[k\] must be an array"):
    call(lambda x: {"k": "a"})


def test_no_annotations_within_a_branch():
  inner = {
    "split_to_logical_devices": lambda x: logical_devices.split(
      MESH, x, [2, 2]
    ),
    "replicate_to_logical_devices": lambda x: logical_devices.replicate(
      MESH, x
    ),
    "assign_to_logical_device": lambda x: logical_devices.assign(MESH, x, 1),
    "on_logical_device": lambda x: logical_devices.on_device(
      MESH, 1, jnp.sin, x
    ),
  }
  for where, fn in inner.items():
    with pytest.raises(ValueError, match=f"{where}: .* alone"):
      jax.jit(lambda x, fn=fn: logical_devices.on_device(MESH, 1, fn, x))(X)
  # Eagerly it is one move after the other, and the result comes back.
  array = logical_devices.on_device(MESH, 2, inner["on_logical_device"], X)
  assert device_ids(array) == [2, 6]


def test_no_annotations_on_another_mesh():
  other = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  turned = make(4, 2)
  for call in (
    lambda x: logical_devices.split(MESH, x, [2, 2]),
    lambda x: logical_devices.replicate(MESH, x),
    lambda x: logical_devices.assign(MESH, x, 1),
    lambda x: logical_devices.on_device(MESH, 3, jnp.sin, x),
  ):
    for mesh in (other, turned):
      with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match="is traced on the mesh") as e,
      ):
        jax.jit(call)(X)
      assert str(dict(MESH.shape)) in str(e.value)
    with jax.set_mesh(MESH):
      array = jax.jit(call)(X)
    np.testing.assert_allclose(array, call(X), rtol=1e-6)


def test_values_on_the_mesh_are_handed_in():
  @jax.jit
  def closes(x):
    y = logical_devices.assign(MESH, x, 1)
    return logical_devices.on_device(MESH, 2, lambda x: x + y, x)

  with pytest.raises(ValueError, match=r"closes over a traced float32\[8,4\]"):
    closes(X)


# Explicit axes


def test_explicit_axes_are_split_by_their_types():
  mesh = make(2, 4, axis_type=EXPLICIT)

  def split(x):
    return logical_devices.split(mesh, x, [1, 4]) * 2

  def undone(x):
    return logical_devices.replicate(mesh, split(x)) / 2

  b = batch(mesh)
  for array in (split(b), jax.jit(split)(b)):
    np.testing.assert_array_equal(array, 2 * X)
    assert array.sharding.spec == P("replica", ("m0", "m1"))
  for array in (undone(b), jax.jit(undone)(b)):
    np.testing.assert_array_equal(array, X)
    assert array.sharding.spec == P("replica", None)


def test_explicit_axes_take_no_branches_in_jit():
  mesh = make(2, 4, axis_type=EXPLICIT)
  with pytest.raises(ValueError, match=r"axis_type=AxisType\.Auto, got"):
    jax.jit(lambda x: logical_devices.assign(mesh, x, 1))(X)
  array = logical_devices.on_device(mesh, 1, lambda x: x @ x.T, batch(mesh))
  np.testing.assert_array_equal(array, X @ X.T)
  assert device_ids(array) == [1, 5]


def test_one_logical_device_has_it_all():
  mesh = make(8, 1)
  calls = {
    "split": lambda x: logical_devices.split(mesh, x, [1, 1]),
    "replicate": lambda x: logical_devices.replicate(mesh, x),
    "assign": lambda x: logical_devices.assign(mesh, x, 0),
    "on_device": lambda x: logical_devices.on_device(mesh, 0, lambda: x * 1),
  }
  for call in itertools.chain(calls.values(), map(jax.jit, calls.values())):
    array = call(batch(mesh))
    assert_equal(array, X)
    assert array.sharding.spec[0] == "replica"
