"""Gradient trees: which leaves are gradients, and whether all are finite."""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.core import gradients
from flaxshard.core import trees

OWG = "_overwrite_with_gradient"
BAD = [np.inf, -np.inf, np.nan]

# Shared by the tests, so that each shape is compiled once.
all_finite = jax.jit(gradients.all_finite)


def mixed_tree():
  return {
    "params": {
      "float": jnp.array([1.0, -2.0]),
      "half": jnp.array([3.0], jnp.float16),
      "int": jnp.array([4], jnp.int32),
      "bool": jnp.array([True]),
      "float0": np.zeros((2,), jax.dtypes.float0),
      "none": None,
    },
    OWG: {"scale": jnp.array([5.0])},
  }


def test_has_gradient_only_for_inexact_leaves_that_are_no_statistics():
  found = {
    trees.path_string(path)
    for path, leaf in jax.tree_util.tree_leaves_with_path(
      mixed_tree(), is_leaf=lambda x: x is None
    )
    if gradients.has_gradient(path, leaf)
  }
  assert found == {"params/float", "params/half"}


def test_bare_array_is_a_tree():
  assert gradients.has_gradient((), jnp.ones(2))
  assert not gradients.has_gradient((), None)
  assert not gradients.is_statistic(())


def test_is_statistic_only_at_the_root():
  # Flax looks for the collection at the root: a module may use the name below.
  tree = {"layer": {OWG: jnp.ones(1)}}
  ((path, leaf),) = jax.tree_util.tree_leaves_with_path(tree)
  assert not gradients.is_statistic(path)
  assert gradients.has_gradient(path, leaf)


def test_map_gradients_keeps_other_leaves():
  tree = mixed_tree()
  doubled = gradients.map_gradients(lambda g: g * 2, tree)
  np.testing.assert_array_equal(doubled["params"]["float"], [2.0, -4.0])
  assert doubled["params"]["half"].dtype == jnp.float16
  assert float(doubled["params"]["half"][0]) == 6.0
  for name in ("int", "bool", "float0", "none"):
    assert doubled["params"][name] is tree["params"][name]
  assert doubled[OWG]["scale"] is tree[OWG]["scale"]


def test_map_gradients_takes_python_numbers_and_numpy():
  out = gradients.map_gradients(lambda g: g + 1, {"a": 1.5, "b": np.ones(2)})
  assert float(out["a"]) == 2.5
  np.testing.assert_array_equal(out["b"], [2.0, 2.0])


def test_normalize_marks_leaves_without_a_gradient_with_none():
  tree = mixed_tree() | {"numpy": np.ones(2)}
  out = gradients.normalize(tree)
  assert isinstance(out["numpy"], jax.Array)
  for name in ("int", "bool", "float0", "none"):
    assert out["params"][name] is None
  assert out["params"]["float"] is tree["params"]["float"]
  assert out[OWG]["scale"] is tree[OWG]["scale"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_one_nonfinite_value_in_any_dtype(dtype):
  good = {"a": jnp.ones(3, dtype), "b": jnp.ones((2, 2), dtype)}
  assert bool(all_finite(good))
  for value in BAD:
    bad = {"a": good["a"], "b": good["b"].at[1, 0].set(value)}
    assert not bool(all_finite(bad)), value


def test_both_parts_of_complex_gradients_are_checked():
  z = jnp.ones(3, jnp.complex64)
  assert bool(all_finite(z))
  assert not bool(all_finite(z.at[1].set(complex(0.0, np.inf))))
  assert not bool(all_finite(z.at[1].set(complex(np.nan, 0.0))))


def test_every_corner_of_a_large_matrix_is_checked():
  # On CPU large float32 leaves are checked by a product with zeros.
  x = np.ones((130, 257), np.float32)
  corners = [(0, 0), (0, -1), (-1, 0), (-1, -1), (64, 100)]
  for where, value in itertools.product(corners, BAD):
    y = x.copy()
    y[where] = value
    assert not bool(all_finite(y)), (where, value)
  assert bool(all_finite(x))


def test_largest_values_and_subnormals_are_finite():
  # Neither 0 * x nor the sum may overflow.
  x = np.full((130, 257), np.finfo(np.float32).max, np.float32)
  x[::2] *= -1
  x[1] = 1e-42
  assert bool(all_finite(x))


def test_large_array_of_three_dimensions():
  x = np.ones((3, 80, 90), np.float32)
  assert bool(all_finite(x))
  x[2, 79, 89] = np.nan
  assert not bool(all_finite(x))


def test_leaves_without_gradient_are_not_checked():
  tree = {"params": {"w": jnp.ones(2), "n": None}, OWG: {"s": jnp.inf}}
  assert bool(gradients.all_finite(tree))


def test_empty_tree_is_finite():
  assert bool(gradients.all_finite({}))
  assert bool(gradients.all_finite({"a": None}))


@pytest.mark.parametrize(
  ("spec", "shape"),
  [
    (P("x"), (8, 8)),
    (P("x"), (128, 256)),
    (P(None, "x"), (128, 256)),
    (P(), (8, 8)),
  ],
)
def test_all_shards_of_an_array_are_checked(spec, shape):
  mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  sharding = NamedSharding(mesh, spec)
  good = np.ones(shape, np.float32)
  bad = good.copy()
  bad[5, 3] = np.nan  # lies in one shard only
  assert bool(all_finite(jax.device_put(good, sharding)))
  flag = all_finite(jax.device_put(bad, sharding))
  assert [bool(s.data) for s in flag.addressable_shards] == [False] * len(
    flag.addressable_shards
  )


def test_flag_is_reduced_inside_shard_map():
  mesh = jax.make_mesh(
    (4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )

  @jax.jit
  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(P("x", "y"), P()), out_specs=P("x", "y")
  )
  def flags(a, b):
    flag = gradients.all_finite({"a": a, "b": b})
    # An agreed flag varies over no axis: a cond may hold collectives then.
    assert not jax.typeof(flag).manual_axis_type.varying
    return jnp.full((1, 1), flag)

  ones = np.ones((4, 2), np.float32)
  bad = ones.copy()
  bad[2, 1] = np.inf
  assert np.asarray(flags(ones, ones)).all()
  assert not np.asarray(flags(bad, ones)).any()
  assert not np.asarray(flags(ones, bad)).any()


def test_nonfinite_leaves_in_tree_order():
  grads = {
    "Dense_0": {"bias": jnp.ones(2), "kernel": jnp.full((2, 2), jnp.inf)},
    "Dense_1": [jnp.ones(1), jnp.array([1.0, jnp.nan])],
    "count": jnp.array(3),
    "none": None,
    "scalar": -np.inf,
  }
  assert fs.nonfinite_leaves(grads) == ["Dense_0/kernel", "Dense_1/1", "scalar"]


def test_nonfinite_leaves_of_finite_trees_and_bare_arrays():
  assert fs.nonfinite_leaves({"a": jnp.ones(2)}) == []
  assert fs.nonfinite_leaves({}) == []
  assert fs.nonfinite_leaves(jnp.array([jnp.nan])) == ["<root>"]


def test_nonfinite_leaves_ignores_leaves_without_gradient():
  tree = {"params": {"w": jnp.ones(1)}, OWG: {"s": jnp.array([jnp.inf])}}
  assert fs.nonfinite_leaves(tree) == []


def test_nonfinite_leaves_of_a_sharded_array():
  mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  x = np.ones(8, np.float32)
  x[6] = np.nan
  x = jax.device_put(x, NamedSharding(mesh, P("x")))
  assert fs.nonfinite_leaves({"w": x}) == ["w"]


def test_nonfinite_leaves_of_traced_arrays_raises():
  with pytest.raises(TypeError, match=r"grads\[a/b\] is traced.*jax\.jit"):
    jax.jit(lambda g: fs.nonfinite_leaves(g))({"a": {"b": jnp.ones(2)}})


# -- IndexedSlices among the gradients.


def rows(indices, values, dtype=jnp.float32):
  values = jnp.asarray(values, dtype)[:, None] * jnp.ones((1, 2), dtype)
  return fs.IndexedSlices(indices, values, (5, 2))


def test_normalize_keeps_rows_of_floats_only():
  slices = rows([1, 3], [1.0, 2.0])
  integers = rows([1, 3], [1, 2], jnp.int32)
  new = gradients.normalize({"a": slices, "b": integers, "c": np.float32(1)})
  assert new["a"] is slices and new["b"] is None and new["c"] == 1


def test_map_gradients_applies_to_rows_and_not_to_row_numbers():
  tree = {"a": rows([1, 3], [1.0, 2.0]), "b": jnp.ones(2)}
  new = gradients.map_gradients(lambda g: g * 2, tree)
  assert new["a"].indices.tolist() == [1, 3]
  assert new["a"].values[:, 0].tolist() == [2, 4]
  assert new["b"].tolist() == [2, 2]


@pytest.mark.slow
def test_deduplicate_sums_float16_rows_in_float32():
  # In float16, 2048 + 1 is 2048.
  slices = rows([1, 1, 1], [2048.0, 1.0, 1.0], jnp.float16)
  (new,) = gradients.deduplicate([slices])
  assert new.dtype == jnp.float16 and new.is_unique
  assert new.to_dense()[:, 0].tolist() == [0, 2050, 0, 0, 0]


@pytest.mark.parametrize("bad", BAD)
def test_all_finite_of_rows(bad):
  assert all_finite({"a": rows([1, 3], [1.0, 2.0])})
  assert not all_finite({"a": rows([1, 3], [1.0, bad]), "b": jnp.ones(2)})


def test_all_finite_ignores_rows_that_are_padding():
  assert all_finite(rows([1, 5, -1], [1.0, np.nan, np.inf]))


def test_all_finite_of_a_sum_that_overflows():
  # As the gradient of the whole table would: each row alone is finite.
  assert not all_finite(rows([1, 1], [3e38, 3e38]))
  assert all_finite(rows([1, 2], [3e38, 3e38]))
  assert all_finite(rows([1, 1], [3e38, -3e38]))


def test_nonfinite_leaves_names_the_parameter_of_rows():
  tree = {"embed": {"embedding": rows([1, 1], [3e38, 3e38])}, "b": jnp.ones(2)}
  assert fs.nonfinite_leaves(tree) == ["embed/embedding"]
  with pytest.raises(TypeError, match="embed"):
    jax.jit(fs.nonfinite_leaves)({"embed": tree["embed"]})
