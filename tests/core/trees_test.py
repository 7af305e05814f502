"""Paths of leaves, differences between trees, and buffers of arrays."""

import collections
from typing import Any, NamedTuple

from flax import core
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.core import trees


def test_path_strings():
  tree = {"a": [jnp.ones(1), {"b c": jnp.ones(1)}]}
  paths = [p for p, _ in jax.tree_util.tree_leaves_with_path(tree)]
  assert [trees.path_string(p) for p in paths] == ["a/0", "a/1/b c"]
  assert trees.path_string(()) == "<root>"


def test_dtype_of_arrays_and_numbers():
  assert trees.dtype_of(1.5) == jnp.float32
  assert trees.dtype_of(1) == jnp.int32
  assert trees.dtype_of(True) == jnp.bool_
  assert trees.dtype_of(np.ones(1, np.float16)) == jnp.float16
  assert trees.dtype_of(jax.ShapeDtypeStruct((), jnp.bfloat16)) == jnp.bfloat16


@pytest.mark.parametrize(
  "leaf",
  [
    "float32",
    max,
    jnp.float32,
    np.dtype("float32"),
    nn.Dense(3),
    np.array(["text"]),
    np.array([[1], None], object),
    np.datetime64("2020-01-01"),
  ],
)
def test_leaf_that_is_not_an_array_raises(leaf):
  with pytest.raises(TypeError, match=r"params\[a/1\]"):
    trees.check_arrays("params", {"a": [1.0, leaf]})


def test_check_arrays_accepts_arrays_numbers_and_none():
  trees.check_arrays("params", {"a": np.ones(2), "b": 1, "c": None, "d": 2.5})


@pytest.mark.parametrize(
  ("given", "wanted", "message"),
  [
    (
      {"a": {}},
      {"a": {"b": np.ones((2, 3), np.float32)}},
      "a/b: missing, where float32[2, 3] is expected",
    ),
    (
      {"a": np.ones(2), "b": np.ones((), np.int32)},
      {"a": np.ones(2)},
      "b: int32[], where nothing is expected",
    ),
    (
      {"a": np.ones((2, 1))},
      {"a": np.ones(2)},
      "a: shape (2, 1), where (2,) is expected",
    ),
    (
      {"a": np.ones(2, np.float16)},
      {"a": np.ones(2, np.float32)},
      "a: dtype float16, where float32 is expected",
    ),
    (
      np.ones(2),
      np.ones(3),
      "<root>: shape (2,), where (3,) is expected",
    ),
    (
      {"a": None},
      {"a": np.ones(1, np.float32)},
      "a: missing, where float32[1] is expected",
    ),
  ],
)
def test_first_difference(given, wanted, message):
  assert trees.first_difference(given, wanted) == message


def test_first_of_several_differences():
  given = {"a": np.ones(1), "b": np.ones(9), "c": np.ones(9)}
  wanted = {"a": np.ones(1), "b": np.ones(2), "c": np.ones(3)}
  assert trees.first_difference(given, wanted).startswith("b: shape (9,)")


def test_no_difference():
  a = {"x": [np.ones(2, np.float32), 1.0]}
  b = {"x": [jax.ShapeDtypeStruct((2,), jnp.float32), np.float32(3)]}
  assert trees.first_difference(a, b) is None
  assert trees.first_difference({}, {}) is None


def test_difference_without_dtypes_and_with_none():
  half = {"a": np.ones(2, np.float16)}
  single = {"a": np.ones(2, np.float32)}
  assert trees.conform("x", half, single, dtypes=False) == half
  none = {"a": None}
  assert trees.conform("x", none, single, of_gradients=True) == none
  # None matches a leaf, not a subtree.
  nested = {"a": {"b": np.ones(1, np.float32)}}
  with pytest.raises(ValueError, match="a/b: missing"):
    trees.conform("x", none, nested, of_gradients=True)


class Pair(NamedTuple):
  a: Any
  b: Any


@pytest.mark.parametrize(
  ("given", "wanted"),
  [
    ({"a": 1.0, "b": 2.0}, Pair(3.0, 4.0)),
    (Pair(1.0, 2.0), {"a": 3.0, "b": 4.0}),
    ([1.0, 2.0], (3.0, 4.0)),
    ({"b": 2.0, "a": 1.0}, core.freeze({"a": 3.0, "b": 4.0})),
    (collections.OrderedDict(b=2.0, a=1.0), {"a": 3.0, "b": 4.0}),
  ],
)
def test_conform_to_other_containers(given, wanted):
  assert trees.first_difference(given, wanted) is None
  out = trees.conform("grads", given, wanted)
  assert type(out) is type(wanted)
  assert jax.tree.structure(out) == jax.tree.structure(wanted)
  assert jax.tree.leaves(out) == [1.0, 2.0]


def test_paths_with_slashes_in_keys_are_distinct():
  wanted = {"a/b": np.zeros(1), "a": {"b": np.zeros(1)}}
  given = {"a": {"b": np.ones(1)}, "a/b": np.full(1, 2.0)}
  out = trees.conform("grads", given, wanted)
  assert float(out["a"]["b"][0]) == 1.0
  assert float(out["a/b"][0]) == 2.0
  one = {"a": {"b": np.ones(1)}}
  assert "missing" in trees.first_difference(one, wanted)
  assert "missing" in trees.first_difference({"a/b": np.ones(1)}, wanted)
  assert "where nothing" in trees.first_difference(wanted, one)
  # An integer key and its string are the same path.
  assert trees.first_difference({1: np.ones(1)}, {"1": np.ones(1)}) is None


def test_conform_keeps_none_and_names_the_path_of_errors():
  wanted = {"a": np.ones(1), "b": {"c": np.ones(2)}}
  out = trees.conform(
    "grads", {"a": None, "b": {"c": np.ones(2)}}, wanted, of_gradients=True
  )
  assert out["a"] is None
  np.testing.assert_array_equal(out["b"]["c"], [1.0, 1.0])
  with pytest.raises(TypeError, match=r"grads\[b/c\].*'x'"):
    trees.conform("grads", {"a": np.ones(1), "b": {"c": "x"}}, wanted)
  with pytest.raises(ValueError, match=r"grads .* b/c: shape"):
    trees.conform("grads", {"a": np.ones(1), "b": {"c": np.ones(3)}}, wanted)


def test_unshare_buffers_drops_weak_types():
  out = trees.unshare_buffers({"a": 1.5, "b": 2, "c": jnp.asarray(3.0) * 2})
  assert [x.weak_type for x in jax.tree.leaves(out)] == [False] * 3
  assert [x.dtype.name for x in jax.tree.leaves(out)] == [
    "float32",
    "int32",
    "float32",
  ]
  assert [float(x) for x in jax.tree.leaves(out)] == [1.5, 2.0, 6.0]


def pointers(tree):
  return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


def test_unshare_buffers_copies_repeated_arrays():
  x = jnp.arange(3.0)
  out = trees.unshare_buffers({"a": x, "b": x, "c": [x]})
  assert out["a"] is x  # the first leaf is not copied
  assert len(set(pointers(out))) == 3
  for leaf in jax.tree.leaves(out):
    np.testing.assert_array_equal(leaf, [0.0, 1.0, 2.0])


def test_unshare_buffers_finds_two_arrays_on_the_same_memory():
  # device_put may return a second Array for the same memory.
  x = jnp.arange(4.0)
  out = trees.unshare_buffers({"a": x, "b": jax.device_put(x, x.sharding)})
  assert len(set(pointers(out))) == 2


def test_unshare_buffers_keeps_keys_and_shardings():
  key = jax.random.key(7)
  mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  x = jax.device_put(jnp.arange(8.0), sharding)
  out = trees.unshare_buffers({"k": key, "l": key, "x": x, "y": x})
  assert out["x"].sharding == out["y"].sharding == sharding
  np.testing.assert_array_equal(out["y"], np.arange(8.0))
  for name in ("k", "l"):
    assert jax.random.key_data(out[name]).tolist() == [0, 7]


def test_numpy_arrays_are_not_donated():
  # On CPU JAX may read a NumPy array in place; giving its memory to XLA would
  # let a training step write into the caller's array.
  raw = np.zeros(1 << 16, np.float32)
  out = trees.unshare_buffers({"a": raw, "b": raw})
  step = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
  out = step(out)
  assert (raw == 0).all()
  assert (np.asarray(out["a"]) == 1).all()
  assert (np.asarray(out["b"]) == 1).all()


def test_unshare_buffers_accepts_constant_keys_under_jit():
  key = jax.random.key(0)
  owned = jax.jit(lambda: trees.unshare_buffers({"a": key, "b": key}))()
  assert owned["a"] == key and owned["b"] == key


def test_conform_takes_rows_for_arrays_of_gradients_only():
  slices = fs.IndexedSlices([1], jnp.ones((1, 2)), (3, 2))
  wanted = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}
  given = {"a": slices, "b": None}
  assert trees.conform("x", given, wanted, of_gradients=True)["a"] is slices
  with pytest.raises(ValueError, match="a"):
    trees.conform("x", {**wanted, "a": slices}, wanted)
  other = {**wanted, "a": jnp.ones((4, 2))}
  with pytest.raises(ValueError, match=r"a: shape \(3, 2\).*\(4, 2\)"):
    trees.conform("x", given, other, of_gradients=True)


def test_conform_names_rows_whose_numbers_are_no_integers():
  slices = fs.IndexedSlices([1], jnp.ones((1, 2)), (3, 2))
  given = jax.tree.map(lambda x: x * 0.5, {"a": slices})
  with pytest.raises(TypeError, match=r"x\[a\].*integers.*float32"):
    trees.conform("x", given, {"a": jnp.ones((3, 2))}, of_gradients=True)
