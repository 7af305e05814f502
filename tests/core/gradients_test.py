"""Gradient trees: containers, the finite test, exact casts to 16 bits."""

import collections
import itertools
from typing import Any, NamedTuple

from flax import core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quadratic_states

import flaxshard as fs

BAD = [np.inf, -np.inf, np.nan]
SGD = optax.sgd(1.0)
# A power of 2, by which no division rounds.
SCALE = fs.LossScale(fs.DynamicLossScale(initial_scale=1024.0))


def create(params, wrappers=(SCALE,), **kwargs):
  return quadratic_states.create(wrappers, SGD, params, **kwargs)


@jax.jit
def is_applied(state, grads):
  """Returns whether `LossScale` finds all gradients finite."""
  return state.apply_gradients(grads=grads).step == 1


# -- Containers and buffers.


class Pair(NamedTuple):
  a: Any
  b: Any


@pytest.mark.parametrize(
  ("grads", "params"),
  [
    ({"a": 1.0, "b": 2.0}, Pair(3.0, 4.0)),
    (Pair(1.0, 2.0), {"a": 3.0, "b": 4.0}),
    ([1.0, 2.0], (3.0, 4.0)),
    ({"b": 2.0, "a": 1.0}, core.freeze({"a": 3.0, "b": 4.0})),
    (collections.OrderedDict(b=2.0, a=1.0), {"a": 3.0, "b": 4.0}),
  ],
)
def test_gradients_in_other_containers_go_by_path(grads, params):
  new = create(params).apply_gradients(grads=grads).params
  assert jax.tree.structure(new) == jax.tree.structure(params)
  assert jax.tree.leaves(new) == [2.0, 2.0]


def test_numpy_arrays_are_not_donated():
  # On CPU JAX may read a NumPy array in place; giving its memory to XLA would
  # let a training step write into the caller's array.
  raw = np.zeros(1 << 16, np.float32)
  state = create({"a": raw, "b": raw})
  step = jax.jit(lambda s, g: s.apply_gradients(grads=g), donate_argnums=0)
  new = step(state, {"a": jnp.ones(1 << 16), "b": None}).params
  assert (raw == 0).all()
  assert (np.asarray(new["a"]) == -1).all() and not new["b"].any()


# -- Whether all gradients are finite.


def test_every_corner_of_a_large_matrix_is_checked():
  # On CPU large float32 leaves are checked by a product with zeros.
  x = np.ones((130, 257), np.float32)
  state = create(x)
  corners = [(0, 0), (0, -1), (-1, 0), (-1, -1), (64, 100)]
  for where, value in itertools.product(corners, BAD):
    y = x.copy()
    y[where] = value
    assert not is_applied(state, y), (where, value)
  # Neither 0 * x nor a sum may overflow.
  largest = np.full(x.shape, np.finfo(np.float32).max, np.float32)
  largest[::2] *= -1
  largest[1] = 1e-42
  assert is_applied(state, x) and is_applied(state, largest)


def test_flag_is_reduced_inside_shard_map():
  mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (4, 2)), ("x", "y"))
  ones = np.ones((4, 2), np.float32)
  state = create({"a": ones, "b": ones})
  split = {"a": jax.P("x", "y"), "b": jax.P()}
  specs = jax.tree.map(lambda _: jax.P(), state).replace(params=split)
  # JAX raises unless `step`, say, is equal on all devices.
  apply = jax.jit(
    jax.shard_map(
      lambda state, grads: state.apply_gradients(grads=grads),
      mesh=mesh,
      in_specs=(specs, split),
      out_specs=specs,
    )
  )
  bad = ones.copy()
  bad[2, 1] = np.inf
  for a, b in ((ones, ones), (bad, ones), (ones, bad)):
    new = apply(state, {"a": a, "b": b})
    assert new.step == (a is b)
    np.testing.assert_array_equal(new.params["a"], ones - (a is b))


def test_rows_count_without_padding():
  state = create({"t": jnp.ones((5, 2))}, sparse=["t"])
  rows = lambda ids, values: {
    "t": fs.IndexedSlices(ids, np.outer(values, [1.0, 1.0]), (5, 2))
  }
  assert is_applied(state, rows([1, 5, -1], [1.0, np.nan, np.inf]))
  for bad in BAD:
    assert not is_applied(state, rows([1, 3, 5], [1.0, bad, 0.0]))
  # Rows of integers are no gradient, as arrays of them.
  integers = fs.IndexedSlices([1], np.ones((1, 2), int), (5, 2))
  with pytest.raises(ValueError, match="No gradients"):
    state.apply_gradients(grads={"t": integers})


def test_nonfinite_leaves_in_tree_order():
  grads = {
    "Dense_0": {"bias": jnp.ones(2), "kernel": jnp.full((2, 2), jnp.inf)},
    "Dense_1": [jnp.ones(1), jnp.array([1.0, jnp.nan])],
    "count": jnp.array(3),
    "none": None,
    "scalar": -np.inf,
  }
  assert fs.nonfinite_leaves(grads) == ["Dense_0/kernel", "Dense_1/1", "scalar"]


# -- Gradients in 16 bits, where that is exact, and nowhere else.


def half(w, dtype="float16"):
  return (w.astype(dtype) ** 2).sum().astype("float32")


LOSSES = {
  "float16": (half, "float16"),
  "bfloat16": (lambda w: half(w, "bfloat16"), "bfloat16"),
  "float32": (lambda w: (w**2).sum(), "float32"),
  "moved": (lambda w: half(w.reshape(3, 2).T), "float16"),
  "in jit": (jax.jit(half), "float16"),
  "in remat": (jax.checkpoint(half), "float16"),
  # A sum of two 16-bit gradients is computed in float32.
  "used twice": (lambda w: half(w) + half(2 * w), "float32"),
  # XLA would collect float32 gradients and cast them after the loop.
  "in scan": (lambda w: jax.lax.map(half, w).sum(), "float32"),
  "also in float32": (lambda w: half(w) + w.sum(), "float32"),
  "unused": (lambda w: jnp.float32(0), "float32"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_narrow_only_if_its_last_operation_widens_it(name):
  loss, dtype = LOSSES[name]
  w = jnp.linspace(0.1, 3, 6).reshape(2, 3)
  minimize = lambda state: state.minimize(loss)
  traced = jax.jit(minimize).trace(create(w))
  (cond,) = [e for e in traced.jaxpr.eqns if e.primitive.name == "cond"]
  entered = [x.aval.dtype.name for x in cond.invars if x.aval.shape == w.shape]
  assert sorted(entered) == sorted(["float32", dtype])  # with the parameters
  new, value = traced.lower().compile()(create(w))
  wanted, grad = jax.jit(jax.value_and_grad(loss))(w)
  np.testing.assert_array_equal(value, wanted)
  np.testing.assert_array_equal(new.params, w - grad)


def test_aux_may_hold_anything_and_the_function_is_called_once():
  calls = []

  def step(state, x):
    stored = {}

    def loss_fn(params):
      calls.append(1)
      stored["twice"] = 2 * x
      # The product with x in float32 is differentiated after the cast.
      return half(params["w"] * x), {"n": 3, "x": x, "host": np.ones(2)}

    (loss, aux), grads = state.value_and_grad(loss_fn, has_aux=True)
    assert aux["n"] == 3 and aux["x"].shape == aux["host"].shape == (2,)
    assert grads["i"] is None
    return loss, grads["w"], aux["x"], stored["twice"]

  state = create({"w": jnp.ones(2), "i": jnp.ones(2, int)})
  with jax.checking_leaks():
    loss, grad, *given = jax.jit(step)(state, jnp.arange(2.0))
  assert float(loss) == 1 and grad.tolist() == [0, 2] and len(calls) == 1
  assert [x.tolist() for x in given] == [[0, 1], [0, 2]]
