"""A quadratic problem for AGN, and its steps beside `agn_reference`."""

import functools

import agn_reference
import jax
import numpy as np
import optax
import quadratic_states

import flaxshard as fs

RNG = np.random.default_rng(0)
# Sizes that eight divides, does not divide, and sizes below eight.
PARAMS = {
  "w": RNG.normal(size=(5, 16)).astype(np.float32),
  "b": RNG.normal(size=3).astype(np.float32),
  "s": np.float32(0.5),
  "t": RNG.normal(size=(2, 3, 9)).astype(np.float32),
}
SCALES = {k: RNG.uniform(0.5, 2.0, p.shape) for k, p in PARAMS.items()}
TARGETS = {
  k: RNG.normal(size=(8, *p.shape)).astype(np.float32)
  for k, p in PARAMS.items()
}

# By bytes: "b" has 12, "s" 4, "t" 216 and "w" 320.
FRAGMENTS = {
  1: {"b": 0, "s": 0, "t": 0, "w": 0},
  2: {"b": 1, "s": 1, "t": 1, "w": 0},
  3: {"b": 2, "s": 2, "t": 1, "w": 0},
}

OPTIMIZERS = {
  "sgd": optax.sgd(0.1),
  "momentum": optax.sgd(0.05, momentum=0.9, nesterov=True),
  "adam": optax.adam(0.05),
  # Another rate for each count.
  "schedule": optax.adam(optax.exponential_decay(0.4, 1, 0.6)),
  "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
}


@functools.cache
def strategy_of(replicas):
  return fs.Strategy(devices=jax.devices()[:replicas])


def create(strategy, wrapper, tx):
  return quadratic_states.create([wrapper], tx, PARAMS, strategy=strategy)


def loss_fn(params, targets):
  return sum(
    (0.5 * SCALES[k].astype(np.float32) * (p - targets[k]) ** 2).sum()
    for k, p in params.items()
  )


def step(state, targets):
  return state.minimize(loss_fn, targets)[0]


def grad_fn(i, params):
  return {k: SCALES[k] * (p - TARGETS[k][i]) for k, p in params.items()}


def targets_of_replica(i):
  return {k: t[i] for k, t in TARGETS.items()}


@functools.cache
def targets_of(strategy):
  replicas = strategy.num_replicas_in_sync
  return fs.PerReplica({k: t[:replicas] for k, t in TARGETS.items()})


def assert_close(state, wanted):
  agn = state.wrapper_states["agn"]
  stack = lambda trees: {k: np.stack([t[k] for t in trees]) for k in PARAMS}
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5),
    (state.params, agn.local_params, agn.grad_accum),
    (wanted.center, stack(wanted.local), stack(wanted.accum)),
  )
  assert int(agn.local_step) == int(state.step) == wanted.step
  assert int(agn.commits) == wanted.commits


def reference(wrapper, tx, replicas):
  """Returns the reference, with the fragments of a store as its groups."""
  period = wrapper.communication_period
  count = getattr(wrapper.transport, "fragments", 1)
  groups = [
    (
      tuple(name for name in PARAMS if FRAGMENTS[count][name] == f),
      (f + 1 - count) * (period // count) % period,
    )
    for f in range(count)
  ]
  return agn_reference.AGN(PARAMS, tx, wrapper, replicas, groups)


def compare(wrapper, tx, *, replicas=3, steps=7):
  """Compares every step; without a strategy if `replicas` is None."""
  if replicas is None:
    strategy, targets = None, targets_of_replica(0)
    run = jax.jit(step, donate_argnums=0)
  else:
    strategy = strategy_of(replicas)
    targets = targets_of(strategy)
    run = strategy.jit(step, donate_argnums=0)
  state = create(strategy, wrapper, tx)
  wanted = reference(wrapper, tx, replicas or 1)
  for _ in range(steps):
    state = run(state, targets)
    wanted.take(grad_fn)
    assert_close(state, wanted)
  return state
