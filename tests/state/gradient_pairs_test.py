"""`compute_gradients` and `apply_gradients` on (gradient, path) pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quadratic_states import create
from quadratic_states import make_params
from quadratic_states import quadratic
from tree_equality import assert_trees_equal

import flaxshard as fs

WRAPPERS = [
  pytest.param((), id="bare"),
  pytest.param((fs.LossScale("dynamic"),), id="loss_scale"),
  pytest.param((fs.AGN(2),), id="agn"),
  pytest.param((fs.Accumulate(2),), id="accumulate"),
]


@pytest.mark.parametrize("wrappers", WRAPPERS)
def test_equals_minimize(wrappers):
  state = wanted = create(wrappers, tx=optax.adam(0.1))
  for _ in range(2):
    pairs = state.compute_gradients(quadratic, 2.0)
    assert [path for _, path in pairs] == ["b/c", "w"]
    state = state.apply_gradients(pairs)
    wanted, _ = wanted.minimize(quadratic, 2.0)
  assert_trees_equal(state, wanted)


def test_aux_and_var_list():
  state = create()
  pairs, aux = state.compute_gradients(
    lambda p: (quadratic(p), 7), has_aux=True, var_list=["w"]
  )
  assert aux == 7
  [(gradient, path)] = pairs
  assert path == "w"
  np.testing.assert_array_equal(gradient, 2 * make_params()["w"])


@pytest.mark.parametrize("wrappers", WRAPPERS)
def test_parameters_without_a_pair_stay(wrappers):
  state = create(wrappers, tx=optax.adam(0.1))
  # Two steps: AGN and Accumulate update at the second.
  for pairs in ([(jnp.ones(()), "b/c")], [(jnp.ones(()), "b/c"), (None, "w")]):
    state = state.apply_gradients(iter(pairs))
  np.testing.assert_array_equal(state.params["w"], make_params()["w"])
  np.testing.assert_array_equal(state.get_slot("w", "m"), [0, 0])
  assert float(state.params["b"]["c"]) < 0.5
  assert float(state.get_slot("b/c", "m")) > 0


def test_zip():
  paths = ["b/c", "w"]
  step = jax.jit(lambda s, g: s.apply_gradients(zip(g, paths, strict=True)))
  new = step(create(tx=optax.sgd(1.0)), [1.0, jnp.array([1.0, -2.0])])
  assert float(new.params["b"]["c"]) == -0.5
  np.testing.assert_array_equal(new.params["w"], [0, 0])


def test_list_of_layers_is_a_tree():
  params = [(jnp.ones(2), jnp.ones(())), (jnp.ones(2), jnp.ones(()))]
  state = create(params=params, tx=optax.sgd(1.0))
  new = state.apply_gradients(grads=params)
  assert float(sum(p.sum() for p in jax.tree.leaves(new.params))) == 0
  new = state.apply_gradients([(jnp.ones(2), "1/0")])
  assert [float(p.sum()) for p in jax.tree.leaves(new.params)] == [2, 1, 0, 1]


W = make_params()["w"]


@pytest.mark.parametrize(
  ("args", "kwargs", "error", "facts"),
  [
    ((), {"grads": []}, ValueError, ["No gradients", "b/c, w"]),
    (([(None, "w"), (None, "b/c")],), {}, ValueError, ["No gradients"]),
    (([(1.0, "b/c"), (2.0, "b/c")],), {}, ValueError, ["pair 1", "twice"]),
    (([(1.0, "b/d")],), {}, ValueError, ["pair 0", "'b/d'", "b/c"]),
    (([(1.0, "w")],), {}, ValueError, ["w", "shape ()", "(2,)"]),
    (([(1.0, W)],), {}, TypeError, ["grads=grads"]),
    ((make_params(),), {}, TypeError, ["grads=grads"]),
    (([(1.0, "b/c")], 0), {}, TypeError, ["grads=grads"]),
    (([(1.0, "b/c")],), {"global_step": 0}, TypeError, ["global_step"]),
  ],
)
def test_mistakes(args, kwargs, error, facts):
  with pytest.raises(error) as e:
    create().apply_gradients(*args, **kwargs)
  assert all(fact in str(e.value) for fact in facts)


def test_computed_rows():
  params = {"table": jnp.ones((4, 2)), "w": jnp.ones(2)}
  state = create(
    params=params, tx=fs.sparse_rows(optax.sgd(1.0, momentum=0.5), ["table"])
  )
  loss_fn = lambda p, ids: (p["table"][ids] * p["w"]).sum()

  @jax.jit
  def step(state, ids):
    pairs = state.compute_gradients(
      loss_fn, ids, var_list=["table"], gate_gradients="graph"
    )
    [(slices, path)] = pairs
    assert fs.is_indexed_slices(slices) and path == "table"
    return state.apply_gradients(pairs)

  new = step(state, jnp.array([1, 3, 3]))
  np.testing.assert_array_equal(new.params["table"][:, 0], [1, 0, 1, -1])
  np.testing.assert_array_equal(new.params["w"], [1, 1])
  np.testing.assert_array_equal(
    new.get_slot("table", "momentum")[:, 0], [0, 1, 0, 2]
  )
