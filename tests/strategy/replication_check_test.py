"""Which programs give every replica the same state: no false alarms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from regression import create
from regression import loss_fn
from regression import sharded

import flaxshard as fs
from flaxshard.strategy import replication_check
from flaxshard.strategy.replication_check import Replication

P = jax.sharding.PartitionSpec

STRATEGY = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
REPLICATED, DIFFERS, UNKNOWN = Replication

mean = lambda tree: jax.lax.pmean(tree, "replica")
replica_id = lambda: jax.lax.axis_index("replica")


def found(fn):
  """What holds for the results of `fn(shared, own)`."""
  sharded = jax.shard_map(
    lambda x, y: jax.tree.leaves(fn(x, y)),
    mesh=STRATEGY.mesh,
    in_specs=(P(), P("replica")),
    out_specs=P(),
    axis_names={"replica"},
    check_vma=False,
  )
  jaxpr = jax.make_jaxpr(sharded)(jnp.ones(4), jnp.ones(16))
  return replication_check.outputs(jaxpr, [REPLICATED, DIFFERS])


@jax.custom_vjp
def custom_vjp(x):
  return 2 * x


custom_vjp.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


@jax.custom_jvp
def custom_jvp(x):
  return 2 * x


custom_jvp.defjvp(lambda x, t: (2 * x[0], 2 * t[0]))


def ring(x):
  total = x
  for _ in range(3):
    x = jax.lax.ppermute(x, "replica", [(i, (i + 1) % 4) for i in range(4)])
    total += x
  return total


def scatter_and_gather(x):
  part = jax.lax.psum_scatter(x, "replica", tiled=True)
  return jax.lax.all_gather(part, "replica", tiled=True)


def counted(x, goes_on):
  return jax.lax.while_loop(goes_on, lambda c: (c[0] + 1, c[1]), (0, x))[0]


def shifted(values):
  """A loop in which it takes three rounds until something differs."""
  first = (jnp.zeros(()),) * 3
  shift = lambda c, x: ((c[1], c[2], x), None)
  return jax.lax.scan(shift, first, values)[0]


AGREEING = {
  "shared": lambda x, y: jnp.sort(x) * 2 + jnp.arange(4),
  "constants": lambda x, y: jnp.ones(3) + np.arange(3),
  "pmean": lambda x, y: x + mean(y),
  "pmean of a tree": lambda x, y: mean({"a": y, "b": [y * x]}),
  "psum": lambda x, y: jax.lax.psum(y, ("replica",)),
  "pmax": lambda x, y: jax.lax.pmax(y, "replica"),
  "all_gather": lambda x, y: jax.lax.all_gather(y, "replica").sum(0),
  "first": lambda x, y: jax.lax.psum(
    jnp.where(replica_id() == 0, y, 0), "replica"
  ),
  "scan": lambda x, y: jax.lax.scan(
    lambda c, row: (c + mean(row * y).sum(), None), 0.0, x
  )[0],
  "fori_loop": lambda x, y: jax.lax.fori_loop(
    0, 3, lambda i, c: c + mean(y), x
  ),
  "while": lambda x, y: counted(mean(y), lambda c: c[0] < c[1].sum()),
  "cond": lambda x, y: jax.lax.cond(
    mean(y).sum() > 0, lambda: x, lambda: mean(y)
  ),
  "switch": lambda x, y: jax.lax.switch(
    x[0].astype(int), [lambda: x, lambda: mean(y), lambda: -x]
  ),
  "remat": lambda x, y: mean(
    jax.grad(jax.checkpoint(lambda x: jnp.sin(x * y).sum()))(x)
  ),
  "jit": lambda x, y: jax.jit(lambda y: mean(jax.jit(jnp.sin)(y)))(y),
  "custom_vjp": lambda x, y: custom_vjp(mean(custom_jvp(y))),
  "vmap": lambda x, y: jax.vmap(lambda row: mean(row * y))(x),
  "linalg": lambda x, y: jnp.linalg.solve(
    jnp.eye(4) + jnp.outer(x, x), mean(y)
  ),
  "svd": lambda x, y: jnp.linalg.svd(jnp.outer(mean(y), x)),
  "random": lambda x, y: jax.random.normal(jax.random.key(0), (4,)) + x,
  "associative_scan": lambda x, y: jax.lax.associative_scan(jnp.add, mean(y)),
  "barrier": lambda x, y: jax.lax.optimization_barrier((x, mean(y))),
  "platform": lambda x, y: jax.lax.platform_dependent(
    mean(y), cpu=jnp.sin, default=jnp.cos
  ),
  "logical device": lambda x, y: mean(
    STRATEGY.on_logical_device(1, jnp.sin, y)
  ),
  "root": lambda x, y: jax.lax.custom_root(
    lambda r: r * r - x.sum(),
    1.0,
    lambda f, r: jax.lax.fori_loop(0, 9, lambda _, r: r - f(r) / (2 * r), r),
    lambda g, y: y / g(1.0),
  ),
  "callback of what agrees": lambda x, y: jax.pure_callback(np.sin, x, x),
}

DIFFERING = {
  "own": lambda x, y: y,
  "mixed": lambda x, y: x + y,
  "axis_index": lambda x, y: replica_id(),
  "random": lambda x, y: jax.random.normal(
    jax.random.fold_in(jax.random.key(0), replica_id()), (4,)
  ),
  "over logical devices": lambda x, y: jax.lax.psum(y, ()),
  "after a mean": lambda x, y: mean(y) * y,
  "scan": lambda x, y: jax.lax.scan(
    lambda c, row: (c + (row * y).sum(), None), 0.0, x
  )[0],
  "scan over own": lambda x, y: shifted(y)[0],
  "stacked by a scan": lambda x, y: jax.lax.scan(
    lambda c, row: (c, row * y.sum()), 0.0, x
  )[1],
  "while": lambda x, y: jax.lax.fori_loop(0, 3, lambda i, c: c * y, x),
  "as often as own": lambda x, y: counted(y, lambda c: c[0] < c[1].sum()),
  "cond": lambda x, y: jax.lax.cond(x[0] > 0, lambda: x, lambda: y),
  "cond on own": lambda x, y: jax.lax.cond(y[0] > 0, lambda: x, lambda: -x),
  "remat": lambda x, y: jax.grad(
    jax.checkpoint(lambda x: jnp.sin(x * y).sum())
  )(x),
  # What is averaged in the loss is not averaged in its gradient.
  "gradient of a mean": lambda x, y: jax.grad(
    lambda x: mean(jnp.sin(x * y).sum())
  )(x),
  "jit": lambda x, y: jax.jit(lambda y: jax.jit(jnp.sin)(y))(y),
  "custom_vjp": lambda x, y: custom_vjp(custom_jvp(y)),
  "vmap": lambda x, y: jax.vmap(lambda row: row * y)(x),
  "logical device": lambda x, y: STRATEGY.on_logical_device(1, jnp.sin, y),
}

UNKNOWING = {
  "ring": lambda x, y: ring(y),
  "scatter_and_gather": lambda x, y: jax.lax.psum_scatter(
    y, "replica", tiled=True
  ),
  "groups": lambda x, y: jax.lax.psum(
    y, "replica", axis_index_groups=[[0, 1], [2, 3]]
  ),
  "callback": lambda x, y: y + jax.pure_callback(np.sin, y, y),
}


@pytest.mark.parametrize("name", AGREEING)
def test_agrees(name):
  assert set(found(AGREEING[name])) == {REPLICATED}


@pytest.mark.parametrize("name", DIFFERING)
def test_differs(name):
  assert set(found(DIFFERING[name])) == {DIFFERS}


@pytest.mark.parametrize("name", UNKNOWING)
def test_what_is_not_known_is_no_error(name):
  assert set(found(UNKNOWING[name])) == {UNKNOWN}


def test_a_reduction_of_what_is_not_known_agrees():
  assert set(found(lambda x, y: scatter_and_gather(y))) == {REPLICATED}


def test_outputs_are_told_apart():
  assert found(lambda x, y: (x, y, mean(y), shifted(y)[2])) == [
    REPLICATED,
    DIFFERS,
    REPLICATED,
    DIFFERS,
  ]
  two = lambda c, row: ((c[0] + row, c[1] * 2), (row, c[1]))
  out = lambda x, y: jax.lax.scan(two, (0.0, 1.0), y)
  assert found(out) == [DIFFERS, REPLICATED, DIFFERS, REPLICATED]


def test_an_output_that_is_an_input():
  assert found(lambda x, y: (y, x, y)) == [DIFFERS, REPLICATED, DIFFERS]


def by_hand(state, grads):
  new = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, grads)
  return state.replace(params=new)


def local_step(state, batch):
  return by_hand(state, jax.grad(loss_fn)(state.params, batch))


def test_a_state_that_would_differ_is_an_error():
  args = create(STRATEGY), sharded(STRATEGY, 0)
  with pytest.raises(
    ValueError,
    match=r"same from every replica.*own data: params/w1, params/w2\. ",
  ):
    STRATEGY.run(local_step, args=args)

  averaged = lambda s, b: by_hand(s, mean(jax.grad(loss_fn)(s.params, b)))
  state = STRATEGY.run(averaged, args=args)
  wanted = (
    args[0].params["w2"]
    - 0.1 * (jax.grad(loss_fn)(args[0].params, jax.device_get(args[1]))["w2"])
  )
  np.testing.assert_allclose(state.params["w2"], wanted, rtol=1e-5, atol=1e-6)


def test_only_the_leaves_that_differ_are_named():
  step = lambda s, b: {"state": s.replace(step=b["x"].sum().astype(int))}
  with pytest.raises(ValueError, match=r"own data: state/step\. "):
    STRATEGY.run(step, args=(create(STRATEGY), sharded(STRATEGY, 0)))


def test_skipping_the_reduction_of_local_gradients_is_an_error():
  def step(state, batch):
    _, grads = state.value_and_grad(loss_fn, batch)
    return state.apply_gradients(grads=grads, skip_gradients_aggregation=True)

  args = create(STRATEGY), sharded(STRATEGY, 0)
  with pytest.raises(ValueError, match=r"params/w1, .*opt_state/0/nu/w2\. "):
    STRATEGY.run(step, args=args)


def test_every_shape_is_checked():
  # With the second batch it is another program, of the same structure.
  def step(state, x):
    if x.shape[0] == 2:
      state = state.replace(step=state.step + x.sum().astype(int))
    return state

  state, run = create(STRATEGY, tx=optax.sgd(0.1)), STRATEGY.jit(step)
  run(state, STRATEGY.shard_batch(np.ones(4)))
  with pytest.raises(ValueError, match="own data: step"):
    run(state, STRATEGY.shard_batch(np.ones(8)))


def test_one_replica_agrees_with_itself():
  one = fs.Strategy(devices=jax.devices()[:1])

  def step(state, batch):
    key = jax.random.fold_in(jax.random.key(0), replica_id())
    noise = jax.random.normal(key, batch["x"].shape)
    return state.minimize(loss_fn, {**batch, "x": batch["x"] + noise})

  state, _ = one.run(step, args=(create(one), sharded(one, 0)))
  assert int(state.step) == 1
