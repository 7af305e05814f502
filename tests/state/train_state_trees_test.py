"""TrainState: gradients and collections of unexpected kinds."""

import collections
from typing import Any, NamedTuple

import compilations
from flax import core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs


class Pair(NamedTuple):
  w: Any
  b: Any


def create(wrappers=(), tx=None, params=None, **collections):
  return fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.array([1.0, -2.0])} if params is None else params,
    tx=tx or optax.sgd(0.5),
    wrappers=wrappers,
    **collections,
  )


# Gradients.

W, B = np.array([1.0, -2.0], np.float32), np.array([4.0], np.float32)


@pytest.mark.parametrize(
  ("params", "grads"),
  [
    # core/trees_test.py compares the other pairs of containers.
    (Pair(W, B), {"w": W, "b": B}),
    (
      collections.OrderedDict(w=W, b=B),
      collections.OrderedDict(b=B, w=W),
    ),
    ({"o": {"w": W}, "l": [B]}, core.freeze({"l": (B,), "o": {"w": W}})),
  ],
)
def test_gradients_in_other_containers(params, grads):
  state = create((fs.LossScale("dynamic"),), tx=optax.adam(0.5), params=params)
  step = jax.jit(lambda s, g: s.apply_gradients(grads=g))
  # Of this loss the gradients equal the parameters.
  wanted = step(state, state.params)
  got = step(state, grads)
  assert jax.tree.structure(got) == jax.tree.structure(state)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)
  for new, old in zip(
    jax.tree.leaves(got.params), jax.tree.leaves(state.params), strict=True
  ):
    # The first step of Adam goes against the sign of each gradient.
    np.testing.assert_allclose(new, old - 0.5 * np.sign(old), rtol=1e-4)


def test_different_paths_with_the_same_string():
  params = {"a/b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}}
  state = create([fs.LossScale("dynamic")], params=params)
  grads = {"a": {"b": jnp.ones(1)}, "a/b": jnp.full(1, 2.0)}
  new = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
  assert float(new.params["a"]["b"][0]) == -0.5
  assert float(new.params["a/b"][0]) == -1.0
  for short in ({"a": {"b": jnp.ones(1)}}, {"a/b": jnp.ones(1)}):
    with pytest.raises(ValueError, match="a/b"):
      state.apply_gradients(grads=short)
  # One of them without a gradient is that one alone.
  new = state.apply_gradients(grads={"a": {"b": None}, "a/b": jnp.ones(1)})
  assert float(new.params["a"]["b"][0]) == 0.0
  assert float(new.params["a/b"][0]) == -0.5


# Collections.


def test_collections_in_other_containers_under_a_dynamic_scale():
  stats = core.freeze({"m": {"mean": jnp.zeros(2)}})
  state = create([fs.LossScale("dynamic")], batch_stats=stats)
  step = jax.jit(
    lambda s, g: s.apply_gradients(
      grads={"w": g}, batch_stats={"m": {"mean": jnp.full(2, 7.0)}}
    )
  )
  good = step(state, jnp.ones(2))
  bad = step(good.replace(batch_stats=stats), jnp.array([jnp.nan, 0.0]))
  for new, mean in ((good, 7.0), (bad, 0.0)):
    assert isinstance(new.batch_stats, core.FrozenDict)
    np.testing.assert_array_equal(new.batch_stats["m"]["mean"], [mean] * 2)
    assert jax.tree.structure(new) == jax.tree.structure(state)
  assert int(bad.step) == 1


def test_weakly_typed_collections_do_not_recompile():
  state = create(
    [fs.LossScale("dynamic")], tx=optax.adam(0.5), ema=jnp.zeros(())
  )
  weak = jnp.asarray(2.0)
  assert weak.weak_type

  @jax.jit
  def step(state):
    return state.apply_gradients(
      grads={"w": jnp.ones(2)}, ema=jnp.asarray(2.0) * 1.5
    )

  # Outside of jit, and a Python number.
  states = [
    state.apply_gradients(grads={"w": jnp.ones(2)}, ema=value)
    for value in (weak, 2.0)
  ]
  state = step(state)
  assert float(state.ema) == 3.0
  with compilations.count() as compiled:
    for new in (state, *states):
      assert not any(x.weak_type for x in jax.tree.leaves(new))
      step(new)
  assert compiled.total == 0
