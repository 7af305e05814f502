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


def test_frozen_parameters_have_none():
  state = create(tx=fs.freeze(optax.sgd(0.5), ["^b/"]))
  pairs = state.compute_gradients(quadratic)
  assert pairs[0] == (None, "b/c")
  new = state.apply_gradients(grads=pairs)
  np.testing.assert_array_equal(new.params["w"], [0, 0])
  assert float(new.params["b"]["c"]) == 0.5


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


@pytest.mark.parametrize(
  ("pairs", "parts"),
  [
    ([], ["No gradients provided for any parameter: b/c, w"]),
    ([(None, "w"), (None, "b/c")], ["No gradients provided", "b/c, w"]),
    ([(1.0, "b/c"), (2.0, "b/c")], ["pair 1", "'b/c'", "twice"]),
    ([(1.0, "b/d")], ["pair 0", "'b/d'", "Did you mean 'b/c'"]),
    ([(1.0, "w")], ["w", "shape ()", "(2,)"]),
    ([(1.0, make_params()["w"])], ["list of 1", "(gradient, 'Dense_0/bias')"]),
  ],
)
def test_errors(pairs, parts):
  with pytest.raises(ValueError) as e:
    create().apply_gradients(grads=pairs)
  assert all(part in str(e.value) for part in parts)


def test_arguments_of_tensorflow():
  state, pairs = create(), [(1.0, "b/c")]
  for args, kwargs in (((pairs, 0), {}), ((pairs,), {"global_step": 0})):
    with pytest.raises(TypeError, match=r"state\.step.*global_step"):
      state.apply_gradients(*args, **kwargs)
  with pytest.raises(TypeError, match="grads=grads"):
    state.apply_gradients(pairs, grads=pairs)
  with pytest.raises(TypeError, match=r"float32\[2\] in place.*b/c"):
    state.apply_gradients(zip([1.0], [state.params["w"]], strict=True))


def test_rows():
  table = jnp.ones((4, 2))
  state = create(
    params={"table": table, "w": jnp.ones(())},
    tx=fs.sparse_rows(optax.sgd(0.5, momentum=0.5), ["table"]),
  )
  slices = fs.IndexedSlices([2, 2], jnp.ones((2, 2)), (4, 2))
  new = jax.jit(lambda s: s.apply_gradients([(slices, "table")]))(state)
  np.testing.assert_array_equal(new.params["table"][:, 0], [1, 1, 0, 1])
  assert float(new.params["w"]) == 1
  np.testing.assert_array_equal(
    new.get_slot("table", "momentum")[:, 0], [0, 0, 2, 0]
  )
  assert state.get_slot_names() == ["momentum"]


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
