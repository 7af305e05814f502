"""Each optimizer of optax updates rows as its semantics says, or is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib
import pytest

import flaxshard as fs
from flaxshard.core import indexed_slices
from flaxshard.core import tf_optimizers

# tensorflow_parity_test.py has a short case of each semantics.
pytestmark = pytest.mark.slow

SHAPE = ROWS, COLUMNS = 12, 3
# Row 7 is never used; row 5 occurs twice in one step.
STEPS = [[5, 2, 5, 11], [0, 2], [2], [5, 0, 9], [11, 2]]
PARAMS = {
  "table": jnp.linspace(-1.0, 1.0, ROWS * COLUMNS).reshape(SHAPE),
  "bias": jnp.array([0.5, -0.25, 0.125]),
}


@functools.cache
def create_grads(step):
  rng = np.random.default_rng(step)
  ids = STEPS[step]
  values = jnp.asarray(rng.normal(size=(len(ids), COLUMNS)), jnp.float32)
  return {
    "table": fs.IndexedSlices(ids, values, SHAPE),
    "bias": jnp.asarray(rng.normal(size=COLUMNS), jnp.float32),
  }


def run_sparse(tx, semantics):
  tx = fs.sparse_rows(tx, ["table"], semantics)
  params, state = PARAMS, tx.init(PARAMS)

  @jax.jit
  def step(grads, state, params):
    updates, state = tx.update(grads, state, params, value=1.0)
    return optax.apply_updates(params, updates), state

  states = []
  for i in range(len(STEPS)):
    params, state = step(create_grads(i), state, params)
    states.append((params, state))
  return tx, states


def used_rows(step):
  return np.isin(np.arange(ROWS), STEPS[step])[:, None]


@functools.cache
def run_dense(name, keeps_unused=False):
  """Applies whole gradients; may undo what happens to the other rows."""
  tx = optax.with_extra_args_support(OPTIMIZERS[name][0])
  params, state = PARAMS, tx.init(PARAMS)

  @jax.jit
  def step(grads, state, params, used):
    updates, new_state = tx.update(grads, state, params, value=1.0)
    new = optax.apply_updates(params, updates), new_state
    if not keeps_unused:
      return new
    keep = lambda n, o: jnp.where(used, n, o) if n.shape == SHAPE else n
    return jax.tree.map(keep, new, (params, state))

  states = []
  for i in range(len(STEPS)):
    grads = indexed_slices.to_dense(create_grads(i))
    params, state = step(grads, state, params, used_rows(i))
    states.append((params, state))
  return states


def assert_close(new, wanted, rtol=2e-5):
  assert jax.tree.structure(new) == jax.tree.structure(wanted)
  for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(wanted), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6)


def chain_with(transform):
  return optax.chain(transform, optax.adam(0.1))


def clip_custom():
  """Limits the norm of each row by 1, then that of each parameter."""

  def clip(g):
    g = g / jnp.maximum(1, jnp.linalg.norm(g, axis=-1, keepdims=True))
    return g / jnp.maximum(1, jnp.sqrt(jnp.vdot(g, g)))

  return optax.stateless(lambda updates, _: jax.tree.map(clip, updates))


DECAY = optax.linear_schedule(0.1, 0.0, 10)
# What each does with "tf" and "catch_up"; with "lazy" all of them work. True:
# it works. A string: it is refused, and the message names this function.
OPTIMIZERS = {
  "momentum": (optax.sgd(0.1, 0.9), True, True),
  "adam": (optax.adam(0.1), True, True),
  "adam_bfloat16": (optax.adam(0.1, mu_dtype="bfloat16"), True, True),
  "adamw": (optax.adamw(0.1, weight_decay=0.5), True, True),
  "adamw_schedule": (optax.adamw(DECAY, weight_decay=0.5), True, True),
  "nadam": (optax.nadam(0.1), True, True),
  "radam": (optax.radam(0.1), True, True),
  "rmsprop_all": (optax.rmsprop(0.1, centered=True, momentum=0.9), True, True),
  "adagrad": (optax.adagrad(0.1), True, True),
  "adadelta": (optax.adadelta(0.1), True, True),
  "polyak_norm": (
    optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    True,
    True,
  ),
  "clip_by_global_norm": (
    chain_with(optax.clip_by_global_norm(0.1)),
    True,
    True,
  ),
  "zero_nans": (chain_with(optax.zero_nans()), True, True),
  "multi_transform": (
    optax.multi_transform(
      {"a": optax.adam(0.1), "b": optax.sgd(0.1, 0.9)},
      {"table": "a", "bias": "b"},
    ),
    True,
    True,
  ),
  "clip_custom": (chain_with(clip_custom()), True, True),
  "freeze": (fs.freeze(optax.adam(0.1), ["bias"]), True, True),
  "reduce_on_plateau": (
    optax.chain(optax.adam(0.1), contrib.reduce_on_plateau()),
    True,
    True,
  ),
  "normalize": (optax.chain(contrib.normalize(), optax.sgd(0.1)), True, True),
  "ftrl": (tf_optimizers.ftrl(0.1), True, "ftrl"),
  "lion": (optax.lion(0.1), "ScaleByLionState", True),
  "optimistic": (
    optax.optimistic_gradient_descent(0.1),
    "ScaleByOptimisticGradientState",
    True,
  ),
  "rprop": (optax.rprop(0.1), "ScaleByRpropState", True),
  "adamax": (optax.adamax(0.1), True, "scale_by_adamax"),
  "inject_hyperparams": (
    optax.inject_hyperparams(optax.adam)(learning_rate=DECAY),
    True,
    "ScaleByAdamState",
  ),
  "apply_if_finite": (
    optax.apply_if_finite(optax.adam(0.1), 3),
    "apply_if_finite",
    "apply_if_finite",
  ),
  "amsgrad": (optax.amsgrad(0.1), "ScaleByAmsgradState", "scale_by_amsgrad"),
  "adabelief": (optax.adabelief(0.1), "ScaleByBeliefState", "scale_by_belief"),
  "adan": (optax.adan(0.1), "ScaleByAdanState", "ScaleByAdanState"),
  "novograd": (optax.novograd(0.1), "ScaleByNovogradState", "Novograd"),
  "yogi": (optax.yogi(0.1), True, True),
  "ema": (optax.chain(optax.adam(0.1), optax.ema(0.9)), "EmaState", "scale_by"),
  "cocob": (contrib.cocob(), "COCOBState", "scale_by_cocob"),
  "schedule_free": (
    contrib.schedule_free_adamw(0.1),
    "ScaleByRms",
    "parameter is not just",
  ),
}
FAST = ("adam",)
NAMES = [
  pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
  for name in OPTIMIZERS
]
# Refused with all semantics.
MIXING = {
  "adaptive_grad_clip": chain_with(optax.adaptive_grad_clip(0.1)),
  "add_noise": optax.noisy_sgd(0.1, key=0),
  # Adafactor.
  "clip_by_block_rms": optax.adafactor(0.1),
  "mechanize": contrib.mechanize(optax.adam(0.1)),
  "momo": contrib.momo(0.1),
  "prodigy": contrib.prodigy(0.1),
  "scale_by_dog": contrib.dog(),
  "scale_by_muon": contrib.muon(0.1),
  "scale_by_trust_ratio": optax.lamb(0.1),
}


@pytest.mark.parametrize("name", NAMES)
def test_lazy_equals_whole_gradients_in_the_rows_that_a_step_uses(name):
  tx, *_ = OPTIMIZERS[name]
  _, states = run_sparse(tx, "lazy")
  for new, wanted in zip(
    states, run_dense(name, keeps_unused=True), strict=True
  ):
    assert_close(new, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_tf_equals_whole_gradients_with_adam_else_lazy(name):
  tx, works, _ = OPTIMIZERS[name]
  if works is not True:
    with pytest.raises(ValueError, match=rf"table cannot be.*{works}"):
      fs.sparse_rows(tx, ["table"], "tf").init(PARAMS)
    return
  leaves = jax.tree.leaves(
    tx.init(PARAMS), is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState)
  )
  is_adam = any(isinstance(x, optax.ScaleByAdamState) for x in leaves)
  _, states = run_sparse(tx, "tf")
  wanted = run_dense(name, keeps_unused=not is_adam)
  for new, dense in zip(states, wanted, strict=True):
    assert_close(new, dense)


@pytest.mark.parametrize("name", NAMES)
def test_catch_up_has_the_slots_of_whole_gradients(name):
  tx, _, works = OPTIMIZERS[name]
  if works is not True:
    with pytest.raises(ValueError, match=rf"table cannot be.*{works}"):
      fs.sparse_rows(tx, ["table"], "catch_up").init(PARAMS)
    return
  sparse, states = run_sparse(tx, "catch_up")
  wanted = run_dense(name)
  # With bfloat16, one product with a power is rounded less than many.
  rtol = 0.02 if name == "adam_bfloat16" else 2e-5
  for i, ((_, new), (_, dense)) in enumerate(zip(states, wanted, strict=True)):
    for x, y in zip(
      jax.tree.leaves(new.inner), jax.tree.leaves(dense), strict=True
    ):
      used = used_rows(i) if x.shape == SHAPE else True
      assert x.dtype == y.dtype
      np.testing.assert_allclose(
        np.where(used, x, 0), np.where(used, y, 0), rtol=rtol, atol=1e-6
      )
  _, settled = sparse.settle(*states[-1])
  assert_close(settled.inner, wanted[-1][1], rtol)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXING)
def test_optimizer_that_mixes_rows_raises(name):
  tx = fs.sparse_rows(MIXING[name], ["table"])
  with pytest.raises(ValueError, match=rf"table cannot be updated.*{name}"):
    tx.init(PARAMS)


@pytest.mark.parametrize("rate", [1e-3, optax.linear_schedule(0.5, 0.0, 40)])
def test_catch_up_multiplies_parameters_by_the_weight_decay_of_missed_steps(
  rate,
):
  tx = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(rate))
  state = fs.TrainState.create(
    apply_fn=None,
    params={"table": PARAMS["table"]},
    tx=tx,
    sparse=["table"],
    sparse_semantics="catch_up",
  )
  step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
  wanted = np.asarray(PARAMS["table"], np.float64)
  for i in range(30):
    slices = create_grads(i % len(STEPS))["table"].deduplicated(4)
    state = step(state, {"table": slices})
    r = rate if isinstance(rate, float) else 0.5 * (1 - i / 40)
    wanted = (1 - 0.5 * r) * wanted - r * np.asarray(slices.to_dense())
  # Row 7 is never used.
  np.testing.assert_array_equal(state.params["table"][7], PARAMS["table"][7])
  settled = state.settle()
  np.testing.assert_allclose(settled.params["table"], wanted, rtol=1e-5)
  assert_close(state.eval_params, settled.params, rtol=0)
  assert_close(settled.settle(), settled, rtol=0)


@pytest.mark.parametrize("rate", [1e-3, optax.linear_schedule(1e-3, 2e-3, 10)])
def test_weight_decay_of_many_steps_is_not_rounded(rate):
  tx = optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(rate))
  params = {"table": jnp.ones((2, 1))}
  tx = fs.sparse_rows(tx, ["table"], "catch_up")
  slices = fs.IndexedSlices([0], jnp.zeros((1, 1)), (2, 1))
  _, state = tx.update({"table": slices}, tx.init(params), params)
  # The first rate, 100,000 times.
  state = state._replace(
    step_count=100_000 * state.step_count,
    log_decay=jax.tree.map(lambda x: 100_000 * x, state.log_decay),
  )
  new, _ = tx.settle(params, state)
  np.testing.assert_allclose(new["table"][1], (1 - 1e-6) ** 100_000, rtol=1e-5)


def add_grad():
  """Adds the extra argument `grad` to the updates."""

  def update(updates, state, params=None, *, grad, **extra):
    return jax.tree.map(jnp.add, updates, grad), state

  return optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), update
  )


@pytest.mark.parametrize(
  "semantics",
  [
    "tf",
    pytest.param("lazy", marks=pytest.mark.slow),
    pytest.param("catch_up", marks=pytest.mark.slow),
  ],
)
def test_extra_argument_grad_has_rows_of_its_own(semantics):
  tx = optax.chain(add_grad(), optax.adam(0.1))
  sparse = fs.sparse_rows(tx, ["table"], semantics)
  args = [create_grads(1), sparse.init(PARAMS), PARAMS, create_grads(3)]
  update = jax.jit(lambda g, s, p, grad: sparse.update(g, s, p, grad=grad))
  new = optax.apply_updates(PARAMS, update(*args)[0])
  grads, grad = indexed_slices.to_dense((args[0], args[3]))
  updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS, grad=grad)
  assert_close(new, optax.apply_updates(PARAMS, updates))
  # Where one is a whole array, so is the other.
  new = optax.apply_updates(
    PARAMS, sparse.update(grads, *args[1:3], grad=args[3])[0]
  )
  assert_close(new, optax.apply_updates(PARAMS, updates))
