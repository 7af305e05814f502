"""A small regression, for the tests of strategies and replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import flaxshard as fs

_rng = np.random.default_rng(0)
X = _rng.normal(size=(3, 16, 8)).astype(np.float32)
Y = _rng.normal(size=(3, 16)).astype(np.float32)
PARAMS = {
  "w1": _rng.normal(size=(8, 8)).astype(np.float32),
  "w2": _rng.normal(size=(8,)).astype(np.float32),
}


# Shared by the tests: a new optimizer is another static field, which compiles
# the step again.
ADAM = optax.adam(1e-2)


def create(strategy=None, wrappers=(), tx=ADAM, **collections):
  """Creates a state, replicated on the mesh of a strategy if there is one."""
  # To create a state on a mesh compiles a program: avoid it where a copy will
  # do. AGN's per-replica state has to be created there.
  per_replica = any(w.reduces != "before" for w in wrappers)
  state = fs.TrainState.create(
    apply_fn=None,
    params=dict(PARAMS),
    tx=tx,
    wrappers=wrappers,
    strategy=strategy if per_replica else None,
    **collections,
  )
  if strategy is None or per_replica:
    return state
  return jax.device_put(state, jax.NamedSharding(strategy.mesh, jax.P()))


def loss_fn(params, batch):
  predicted = jnp.tanh(batch["x"] @ params["w1"]) @ params["w2"]
  return ((predicted - batch["y"]) ** 2).mean()


def train_step(state, batch):
  return state.minimize(loss_fn, batch)


def batch(i, bad=None):
  """Returns the i-th global batch; the example `bad` is not finite."""
  x = X[i].copy()
  if bad is not None:
    x[bad, 0] = np.nan
  return {"x": x, "y": Y[i]}


def sharded(strategy, i, bad=None):
  return strategy.shard_batch(batch(i, bad))


def split(state, mesh, spec):
  """Shards every matrix of a state."""
  sharding = jax.sharding.NamedSharding(mesh, spec)
  move = lambda x: jax.device_put(x, sharding) if x.ndim == 2 else x
  return state.replace(
    params=jax.tree.map(move, state.params),
    opt_state=jax.tree.map(move, state.opt_state),
  )
