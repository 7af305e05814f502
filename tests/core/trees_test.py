"""Paths of leaves, differences between trees, and buffers of arrays."""

import collections
from typing import Any, NamedTuple

from flax import core
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
