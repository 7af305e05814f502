"""Optimizers whose update takes more than gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quadratic_states
from tree_equality import assert_trees_close

import flaxshard as fs

PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.array(0.5)}
DYNAMIC, AGN = fs.LossScale("dynamic"), fs.AGN(2, commit="mean")


def create(tx, wrappers=(), **kwargs):
  return quadratic_states.create(wrappers, tx, PARAMS, **kwargs)


def quadratic(params, scale=1.0):
  return sum((scale * (p - 0.25) ** 2).sum() for p in jax.tree.leaves(params))


def optax_steps(tx, params, steps):
  """Returns the parameters that optax alone computes."""
  opt_state = tx.init(params)

  @jax.jit
  def step(params, opt_state):
    value, grads = jax.value_and_grad(quadratic)(params)
    extra = dict(value=value, grad=grads, value_fn=quadratic)
    updates, opt_state = optax.with_extra_args_support(tx).update(
      grads, opt_state, params, **extra
    )
    return optax.apply_updates(params, updates), opt_state

  for _ in range(steps):
    params, opt_state = step(params, opt_state)
  return params


def minimize(state):
  """Passes what the optimizer uses."""
  return state.minimize(quadratic)[0]


def apply_with_extra_arguments(state):
  value, grads = state.value_and_grad(quadratic)
  return state.apply_gradients(
    grads=grads, value=value, grad=grads, value_fn=quadratic
  )


PLATEAU = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
EXTRA = {
  # Compiles faster than the default line search, and takes the same arguments.
  "lbfgs": optax.lbfgs(
    memory_size=1, linesearch=optax.scale_by_backtracking_linesearch(3)
  ),
  "polyak_sgd": optax.polyak_sgd(),
  "reduce_on_plateau": PLATEAU,
}


@pytest.mark.parametrize(
  ("wrappers", "step"),
  [((), apply_with_extra_arguments), ((DYNAMIC,), minimize)],
  ids=["apply_gradients", "minimize"],
)
@pytest.mark.parametrize("tx", EXTRA.values(), ids=EXTRA)
def test_extra_arguments_are_those_of_optax(tx, wrappers, step):
  state, step = create(tx, wrappers), jax.jit(step)
  for _ in range(3):
    state = step(state)
  assert_trees_close(state.params, optax_steps(tx, PARAMS, 3), atol=1e-5)
  assert state.tx is tx


@pytest.mark.parametrize("wrapper", [DYNAMIC, AGN])
def test_value_is_averaged_over_replicas(wrapper):
  strategy = fs.Strategy()
  scales = jnp.arange(8.0)

  def step(state, scale):
    for _ in range(2):  # an AGN commit
      state, _ = state.minimize(quadratic, scale.mean())
    return state

  state = create(PLATEAU, [wrapper], strategy=strategy)
  # `run` raises if the replicas would get different states.
  state = strategy.run(step, args=(state, strategy.shard_batch(scales)))
  best = lambda opt_state: optax.tree.get(opt_state, "best_value")
  if "agn" in state.wrapper_states:
    # Its local steps take the loss of their replica.
    local = best(state.wrapper_states["agn"].local_opt_state)
    assert len(np.unique(local)) > scales.size // 2
  else:
    first = float(quadratic(PARAMS, scales.mean()))
    assert 0 < float(best(state.opt_state)) < first


@pytest.mark.parametrize("wrappers", [(), (DYNAMIC,), (AGN,)])
def test_a_state_that_grows_at_the_first_update(wrappers):
  norm = optax.tree.norm
  tx = optax.chain(optax.monitor({"norm": norm}), optax.sgd(0.25))
  state, step = create(tx, wrappers), jax.jit(minimize)
  structure = jax.tree.structure(state)
  for _ in range(2):
    state = step(state)
  assert jax.tree.structure(state) == structure
  opt_state = state.opt_state
  if "agn" in state.wrapper_states:
    opt_state = state.wrapper_states["agn"].local_opt_state
  wanted = norm(jax.grad(quadratic)(optax_steps(tx, PARAMS, 1)))
  got = jnp.ravel(optax.tree.get(opt_state, "norm"))
  assert_trees_close(got, wanted[None], atol=1e-6)
