"""A regression of a few weights, for the tests of strategies."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import flaxshard as fs

P = jax.sharding.PartitionSpec

_rng = np.random.default_rng(0)
X = _rng.normal(size=(3, 16, 8)).astype(np.float32)
Y = _rng.normal(size=(3, 16)).astype(np.float32)
PARAMS = {
  "w1": _rng.normal(size=(8, 8)).astype(np.float32),
  "w2": _rng.normal(size=(8,)).astype(np.float32),
}


# One for all: an optimizer is a part of what a program is compiled for.
ADAM = optax.adam(1e-2)


def create(strategy=None, wrappers=(), tx=ADAM, **collections):
  """A state, mirrored on the mesh of a strategy if there is one."""
  # A strategy compiles what is born on its mesh: only where that is needed.
  own = any(getattr(w, "reduces_gradients", False) for w in wrappers)
  state = fs.TrainState.create(
    apply_fn=None,
    params=jax.tree.map(jnp.array, PARAMS),
    tx=tx,
    wrappers=wrappers,
    strategy=strategy if own else None,
    **collections,
  )
  if strategy is None or own:
    return state
  return jax.device_put(state, jax.sharding.NamedSharding(strategy.mesh, P()))


def loss_fn(params, batch):
  predicted = jnp.tanh(batch["x"] @ params["w1"]) @ params["w2"]
  return ((predicted - batch["y"]) ** 2).mean()


def train_step(state, batch):
  return state.minimize(loss_fn, batch)


def batch(i, bad=None):
  """The i-th global batch; the example `bad` is not finite."""
  x = X[i].copy()
  if bad is not None:
    x[bad, 0] = np.nan
  return {"x": x, "y": Y[i]}


def sharded(strategy, i, bad=None):
  return strategy.shard_batch(batch(i, bad))


def split(state, mesh, spec):
  """Splits every matrix of a state."""
  sharding = jax.sharding.NamedSharding(mesh, spec)
  move = lambda x: jax.device_put(x, sharding) if x.ndim == 2 else x
  return state.replace(
    params=jax.tree.map(move, state.params),
    opt_state=jax.tree.map(move, state.opt_state),
  )


def assert_close(a, b, rtol=1e-5, atol=2e-6):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(
      np.asarray(x), np.asarray(y), rtol=rtol, atol=atol
    ),
    a,
    b,
  )


_compiled = [0]


def _count(event, duration, **_):
  del duration
  _compiled[0] += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count)


@contextlib.contextmanager
def compilations(number):
  """Says how many programs XLA has to compile in a block."""
  before = _compiled[0]
  yield
  assert _compiled[0] - before == number
