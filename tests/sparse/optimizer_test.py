"""Updates of the rows of tables, with semantics "lazy"."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.core import indexed_slices

ROWS, COLUMNS = 12, 3
IDS = [5, 2, 5, 11]


def create_params(dtype=jnp.float32):
  rng = np.random.default_rng(0)
  return {
    "embed": {"table": jnp.asarray(rng.normal(size=(ROWS, COLUMNS)), dtype)},
    "bias": jnp.asarray(rng.normal(size=COLUMNS), dtype),
  }


def create_grads(ids, seed=1, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  values = jnp.asarray(rng.normal(size=(len(ids), COLUMNS)), dtype)
  return {
    "embed": {"table": fs.IndexedSlices(ids, values, (ROWS, COLUMNS))},
    "bias": jnp.asarray(rng.normal(size=COLUMNS), dtype),
  }


def create(tx, sparse=("table",), dtype=jnp.float32, **kwargs):
  return fs.TrainState.create(
    apply_fn=None, params=create_params(dtype), tx=tx, sparse=sparse, **kwargs
  )


def keep_unused_rows(used, new, old):
  return jnp.where(used, new, old) if new.shape == (ROWS, COLUMNS) else new


def lazy_reference(tx, batches):
  """Applies `tx` to whole arrays, and keeps what was in the other rows."""
  params = create_params()
  state = tx.init(params)
  for grads in batches:
    slices = grads["embed"]["table"]
    used = np.isin(np.arange(ROWS), slices.indices)[:, None]
    dense = {**grads, "embed": {"table": slices.to_dense()}}
    updates, new_state = tx.update(dense, state, params)
    new_params = optax.apply_updates(params, updates)
    keep = functools.partial(keep_unused_rows, used)
    params = jax.tree.map(keep, new_params, params)
    state = jax.tree.map(keep, new_state, state)
  return params, state


def assert_close(new, wanted, rtol=1e-6):
  assert jax.tree.structure(new) == jax.tree.structure(wanted)
  for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(wanted), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-7)


BATCHES = [create_grads(ids, i) for i, ids in enumerate([IDS, [0, 2], [5, 5]])]


@pytest.mark.parametrize(
  "how", [pytest.param("eager", marks=pytest.mark.slow), "donate"]
)
def test_lazy_adam_updates_the_rows_of_the_gradient_alone(how):
  tx = optax.adam(optax.exponential_decay(0.1, 1, 0.5))
  step = lambda state, grads: state.apply_gradients(grads=grads)
  if how != "eager":
    step = jax.jit(step, donate_argnums=0)
  state = create(tx)
  for grads in BATCHES:
    state = step(state, grads)
  params, opt_state = lazy_reference(tx, BATCHES)
  assert_close(state.params, params)
  assert_close(state.opt_state, opt_state)
  assert int(state.step) == 3


def test_create_train_state_with_an_embedding():
  model = nn.Sequential([nn.Embed(ROWS, COLUMNS), nn.Dense(2)])
  ids = jnp.array([1, 4])
  state = fs.create_train_state(
    model, jax.random.key(0), ids, optax.sgd(1.0), sparse=["embedding"]
  )
  assert state.tx.patterns == ("embedding",)
  before = state.params["layers_0"]["embedding"]
  grads = jax.tree.map(jnp.zeros_like, state.params)
  grads["layers_0"]["embedding"] = fs.IndexedSlices(
    ids, jnp.ones((2, COLUMNS)), before.shape
  )
  after = state.apply_gradients(grads=grads).params["layers_0"]["embedding"]
  np.testing.assert_allclose(
    before - after, grads["layers_0"]["embedding"].to_dense(), atol=1e-6
  )


@pytest.mark.slow
def test_negative_and_too_large_row_numbers_are_dropped():
  state = create(optax.adam(0.1))
  grads = create_grads([-1, ROWS, ROWS + 7])
  new = state.apply_gradients(grads=grads)
  assert_close(new.params["embed"], state.params["embed"], rtol=0)
  assert_close(
    new.opt_state[0].mu["embed"], state.opt_state[0].mu["embed"], rtol=0
  )


def test_whole_gradient_of_a_table_is_an_ordinary_update():
  tx = optax.adam(0.1)
  dense = fs.TrainState.create(apply_fn=None, params=create_params(), tx=tx)
  grads = jax.tree.map(jnp.ones_like, dense.params)
  new = create(tx).apply_gradients(grads=grads)
  assert_close(new.params, dense.apply_gradients(grads=grads).params, rtol=0)


def test_table_without_gradient_stays():
  state = create(optax.adamw(0.1, weight_decay=0.5))
  grads = {"embed": {"table": None}, "bias": jnp.ones(COLUMNS)}
  new = state.apply_gradients(grads=grads)
  assert_close(new.params["embed"], state.params["embed"], rtol=0)
  assert not np.array_equal(new.params["bias"], state.params["bias"])


def test_rows_for_an_optimizer_of_whole_arrays_become_dense():
  state = create(optax.adam(0.1), sparse=())
  with pytest.warns(UserWarning, match=r"embed/table.*sparse=\["):
    new = state.apply_gradients(grads=BATCHES[0])
  dense = state.apply_gradients(grads=indexed_slices.to_dense(BATCHES[0]))
  assert_close(new.params, dense.params, rtol=0)


@pytest.mark.parametrize(
  ("dtype", "grad_dtype", "semantics"),
  [
    ("bfloat16", "own", "lazy"),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        ("float16", "float32", "lazy"),
        ("float8_e4m3fn", "own", "lazy"),
        ("float8_e4m3fn", "float32", "lazy"),
        ("float8_e4m3fn", "float32", "tf"),
        ("float8_e4m3fn", "float32", "catch_up"),
      )
    ),
  ],
)
def test_narrow_parameters_are_updated_as_whole_arrays_are(
  dtype, grad_dtype, semantics
):
  tx = optax.sgd(0.5, momentum=0.5)
  if semantics == "tf":
    tx = optax.adam(0.5, eps=0.5)
  elif semantics == "catch_up":
    tx = optax.adamw(0.5, eps=0.5, weight_decay=0.5)
  ids = [7, 3, 0]
  grads = create_grads(ids, dtype=dtype if grad_dtype == "own" else jnp.float32)
  grads["bias"] = None
  whole = (
    jnp.zeros((ROWS, COLUMNS), jnp.float32)
    .at[jnp.array(ids)]
    .add(grads["embed"]["table"].values.astype(jnp.float32))
  )
  state = create(tx, dtype=dtype, sparse_semantics=semantics)
  new = state.apply_gradients(grads=grads).settle()
  assert new.params["embed"]["table"].dtype == dtype
  dense = {**grads, "embed": {"table": whole}}
  plain = create(tx, sparse=(), dtype=dtype).apply_gradients(grads=dense)
  np.testing.assert_array_equal(
    new.params["embed"]["table"], plain.params["embed"]["table"]
  )
