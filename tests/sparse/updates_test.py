"""Updates of the rows of tables: optimizers, semantics, states and mistakes."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib
import pytest
from tree_equality import assert_trees_close
from tree_equality import assert_trees_equal

import flaxshard as fs

SHAPE = ROWS, COLUMNS = 12, 3
# Row 7 is never used; row 5 occurs twice in one step. With padding, so that
# all steps are one program.
STEPS = [[5, 2, 5, 11], [0, 2, -1, 12], [2, 12, 13, -1], [5, 0, 9, -1]]
STEPS += [[-1, 12, 11, 2]]
PARAMS = {
  "table": np.linspace(-1, 1, ROWS * COLUMNS, dtype="f").reshape(SHAPE),
  "bias": np.array([0.5, -0.25, 0.125], np.float32),
}
DECAY = optax.linear_schedule(0.1, 0.0, 10)
MASK = {"table": True, "bias": False}
SGD, ADAM = optax.sgd(0.1, 0.9), optax.adam(0.1)


def create_grads(ids, seed=0, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  values = rng.normal(size=(len(ids), COLUMNS)).astype(dtype)
  return {
    "table": fs.IndexedSlices(ids, values, SHAPE),
    "bias": rng.normal(size=COLUMNS).astype(dtype),
  }


BATCHES = [create_grads(ids, i) for i, ids in enumerate(STEPS)]


def create(tx, semantics="lazy", sparse=("table",), params=None, **kwargs):
  params = PARAMS if params is None else params
  if sparse:
    kwargs |= {"sparse": sparse, "sparse_semantics": semantics}
  return fs.TrainState.create(apply_fn=None, params=params, tx=tx, **kwargs)


@jax.jit
def step(state, grads):
  return state.apply_gradients(grads=grads)


def apply(state, batches=None):
  """Returns parameters and slots after each step."""
  results = []
  for grads in BATCHES if batches is None else batches:
    state = step(state, grads)
    results.append((state.params, state.opt_state))
  return results


@functools.cache
def run_dense(name, keeps_unused):
  """Applies whole gradients; may undo what happens to the other rows."""
  tx = optax.with_extra_args_support(OPTIMIZERS[name][0])
  params, state = PARAMS, tx.init(PARAMS)

  @jax.jit
  def step(grads, state, params, used):
    updates, new_state = tx.update(fs.sparse.to_dense(grads), state, params)
    new = optax.apply_updates(params, updates), new_state
    if not keeps_unused:
      return new
    keep = lambda n, o: jnp.where(used, n, o) if n.shape == SHAPE else n
    return jax.tree.map(keep, new, (params, state))

  results = []
  for grads, ids in zip(BATCHES, STEPS, strict=True):
    used = np.isin(np.arange(ROWS), ids)[:, None]
    params, state = step(grads, state, params, used)
    results.append((params, state))
  return results


def chain_with(transform):
  return optax.chain(transform, ADAM)


# What each does with "tf", of rows that a step does not use: "rows" leaves them
# as they are, "whole" updates them without a warning, as TensorFlow does, and
# the name of a state is in the warning that all rows are updated.
OPTIMIZERS = {
  "momentum": (SGD, "rows"),
  "adam": (ADAM, "whole"),
  "adam_bfloat16": (optax.adam(0.1, mu_dtype="bfloat16"), "whole"),
  "adamw_schedule": (optax.adamw(DECAY, weight_decay=0.5), "whole"),
  "nadam": (optax.nadam(0.1), "whole"),
  "radam": (optax.radam(0.1), "whole"),
  "adamax": (optax.adamax(0.1), "whole"),
  "rmsprop": (optax.rmsprop(0.1, centered=True, momentum=0.9), "rows"),
  "adagrad": (optax.adagrad(0.1), "rows"),
  "adadelta": (optax.adadelta(0.1), "rows"),
  "norm": (optax.chain(optax.normalize_by_update_norm(), SGD), "rows"),
  "clip_by_global_norm": (chain_with(optax.clip_by_global_norm(0.1)), "whole"),
  "zero_nans": (chain_with(optax.zero_nans()), "whole"),
  "decay_mask": (optax.adamw(0.1, weight_decay=0.5, mask=MASK), "whole"),
  "groups": (
    optax.multi_transform({"a": SGD, "b": ADAM}, {"table": "a", "bias": "b"}),
    "rows",
  ),
  "freeze": (fs.freeze(ADAM, ["bias"]), "whole"),
  "scaled": (fs.scale_learning_rates(optax.adagrad(0.1), [("t", 2)]), "rows"),
  "inject_hyperparams": (optax.inject_hyperparams(optax.adam)(DECAY), "whole"),
  "apply_if_finite": (optax.apply_if_finite(optax.adagrad(0.1), 3), "rows"),
  "ftrl": (fs.optimizers.ftrl(0.1), "rows"),
  "lion": (optax.lion(0.1), "ScaleByLionState"),
  "rprop": (optax.rprop(0.1), "ScaleByRpropState"),
  "amsgrad": (optax.amsgrad(0.1), "ScaleByAmsgradState"),
  "adabelief": (optax.adabelief(0.1), "ScaleByBeliefState"),
  "adan": (optax.adan(0.1), "ScaleByAdanState"),
  "ema": (optax.chain(optax.sgd(0.1), optax.ema(0.9)), "EmaState"),
}
NAMES = [
  pytest.param(name, marks=[] if name in ("adam", "lion") else pytest.mark.slow)
  for name in OPTIMIZERS
]
# They update all rows, with a warning that names the state, or says that rows
# are mixed.
WARMUP = optax.linear_schedule(0.0, 0.1, 10)
MIX = "depends on other rows"
WHOLE = {
  "FactoredState": optax.adafactor(0.1),
  "AddNoiseState": optax.noisy_sgd(0.1, key=0),
  "MultiStepsState": optax.MultiSteps(ADAM, 2),
  "ScaleByNovogradState": optax.novograd(0.1),
  "ScheduleFreeState": contrib.schedule_free_adamw(0.1),
  "MuonState": contrib.muon(0.1),
  f"lamb {MIX}": optax.lamb(WARMUP),
  f"lars {MIX}": optax.lars(0.1),
  f"adaptive_grad_clip {MIX}": chain_with(optax.adaptive_grad_clip(0.01)),
  f"clip_by_block_rms {MIX}": chain_with(optax.clip_by_block_rms(0.1)),
}


@pytest.mark.parametrize("semantics", ["lazy", "tf"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_equal_those_of_whole_gradients(name, semantics):
  """With "lazy", or an optimizer of "rows", in the rows that a step uses."""
  tx, kind = OPTIMIZERS[name]
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    state = create(tx, semantics)
  messages = [str(w.message) for w in caught]
  if semantics == "lazy" or kind in ("rows", "whole"):
    assert not messages
  else:
    assert len(messages) == 1 and kind in messages[0] and "table" in messages[0]
  wanted = run_dense(name, semantics == "lazy" or kind == "rows")
  for new, want in zip(apply(state), wanted, strict=True):
    if (name, semantics) == ("adam", "tf"):
      assert_trees_equal(new, want)
    assert_trees_close(new, want, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_other_optimizers_get_whole_gradients_and_a_warning(name):
  reason = MIX if MIX in name else name
  with pytest.warns(UserWarning, match=rf"sparse=.*{reason}.*table") as caught:
    state = jax.jit(create, static_argnums=0)(WHOLE[name])
  assert len(caught) == 1
  dense = create(WHOLE[name], sparse=())
  new = apply(state, BATCHES[:2])[-1]
  want = apply(dense, map(fs.sparse.to_dense, BATCHES[:2]))[-1]
  assert_trees_close(new[0], want[0], rtol=2e-5)


def test_extra_arguments_reach_an_optimizer_of_rows():
  def update(updates, state, params=None, *, grad, **extra):
    return jax.tree.map(lambda u, g: u + 2 * g, updates, grad), state

  add_grad = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), update
  )
  # It needs the value of the loss.
  plateau = contrib.reduce_on_plateau()
  state = create(optax.chain(add_grad, optax.sgd(1.0), plateau))
  loss_fn = lambda p: p["table"][jnp.array([1, 1])].sum()
  new, _ = jax.jit(lambda s: s.minimize(loss_fn))(state)
  change = np.array(state.params["table"] - new.params["table"])
  np.testing.assert_allclose(change[1], 6, rtol=1e-6)
  assert not change[[0, *range(2, ROWS)]].any()


def test_gradients_of_a_table_that_are_no_rows():
  tx = optax.adamw(0.1, weight_decay=0.5)
  # The optimizer is tried without a warning also where nothing is compiled.
  with jax.disable_jit():
    state, dense = create(tx), create(tx, sparse=())
  # A step that is compiled for one state serves another one.
  assert jax.tree.structure(state) == jax.tree.structure(create(tx))
  # An array is an ordinary update.
  grads = jax.tree.map(np.ones_like, PARAMS)
  new, want = step(state, grads), step(dense, grads)
  assert_trees_equal(new.params, want.params)
  # A table without a gradient, or with padding alone, stays.
  for none in (None, create_grads([-1, ROWS, ROWS + 7])["table"]):
    new = step(state, grads | {"table": none})
    assert_trees_equal(new.params["table"], state.params["table"])
    assert not np.any(new.opt_state[0].mu["table"])
    assert not np.array_equal(new.params["bias"], state.params["bias"])
  # Rows for an optimizer of whole arrays become one.
  with pytest.warns(UserWarning, match=r"table.*sparse=\["):
    new = step(dense, BATCHES[0])
  want = step(dense, jax.jit(fs.sparse.to_dense)(BATCHES[0]))
  assert_trees_equal(new.params, want.params)


@pytest.mark.parametrize(
  ("dtype", "grad_dtype"),
  [("bfloat16", "bfloat16"), ("float16", "float32")],
)
def test_narrow_parameters_are_updated_as_whole_arrays_are(dtype, grad_dtype):
  tx = optax.sgd(0.5, momentum=0.5)
  params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
  grads = create_grads([7, 3, 0], dtype=grad_dtype) | {"bias": None}

  dense = {**grads, "table": jax.jit(fs.sparse.to_dense)(grads["table"])}
  new = step(create(tx, params=params), grads)
  plain = step(create(tx, sparse=(), params=params), dense)
  assert new.params["table"].dtype == dtype
  assert_trees_equal(new.params["table"], plain.params["table"])


ROWS_OF_T = fs.sparse_rows(optax.sgd(1.0), ["t"])
INTEGERS = {"i": np.zeros(SHAPE, np.int32)}


@pytest.mark.parametrize(
  ("call", "facts"),
  [
    (lambda: create(ADAM, sparse=["tabel"]), r"sparse\[0\]='tabel'.*table"),
    (lambda: create(ADAM, sparse=["bias"]), r"'bias'.*bias, float32\[3\]"),
    (lambda: create(ADAM, sparse=["i"], params=INTEGERS), r"\[0\]='i'.*int32"),
    (lambda: create(ADAM, "lasy"), "sparse_semantics.*'lasy'.*'lazy'"),
    (
      lambda: create(ADAM, sparse=(), sparse_semantics="tf"),
      "sparse_semantics='tf' needs sparse",
    ),
    (lambda: create(ROWS_OF_T), "sparse_rows"),
    (lambda: fs.freeze(ROWS_OF_T, ["bias"]), "sparse_rows last"),
    (lambda: fs.scale_learning_rates(ROWS_OF_T, [("b", 2.0)]), "_rows last"),
  ],
)
def test_mistakes(call, facts):
  with pytest.raises(ValueError, match=facts):
    call()


def test_a_step_has_no_temporary_array_of_the_size_of_a_table():
  shape = jax.ShapeDtypeStruct((1_000_000, 16), jnp.float32)
  state = create(
    optax.adamw(DECAY),
    params={"table": shape},
    wrappers=[fs.LossScale("dynamic")],
  )

  def loss_fn(params, ids):
    return (params["table"][ids] * params["table"][ids + 1]).sum()

  step = jax.jit(
    lambda state, ids: state.minimize(loss_fn, ids), donate_argnums=0
  )
  ids = jax.ShapeDtypeStruct((512,), jnp.int32)
  memory = step.lower(state, ids).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 2**20
