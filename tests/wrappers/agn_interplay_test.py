"""AGN with other wrappers and collections, and with unusual gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quadratic_states
from tree_equality import assert_trees_close
from tree_equality import assert_trees_equal

import flaxshard as fs

P = jax.sharding.PartitionSpec
FOUR = fs.Strategy(devices=jax.devices()[:4])
PARAMS = {"w": np.arange(6, dtype=np.float32) / 4, "b": np.float32(0.5)}
# Powers of two, so that sums are exact in any order.
XS = np.array([0.5, 1.0, 2.0, 4.0], np.float32)
ONES = np.ones(4, np.float32)
SGD = optax.sgd(0.25)


def loss_fn(params, x, bad=1.0):
  return (params["w"].sum() * x + params["b"] * x) * bad


def step(state, x, bad):
  return state.minimize(loss_fn, x[0], bad[0])[0]


RUN = FOUR.jit(step)


def create(wrappers, params=PARAMS, tx=SGD, strategy=FOUR, **collections):
  return quadratic_states.create(
    wrappers, tx, params, strategy=strategy, **collections
  )


def run(state, bad=ONES):
  return RUN(state, FOUR.shard_batch(XS), FOUR.shard_batch(bad))


def apply_step(state, grads):
  return state.apply_gradients(grads=grads)


def apply(state, grads, strategy=FOUR):
  return strategy.run(apply_step, args=(state, grads))


def agn(state):
  return state.wrapper_states["agn"]


BAD = np.array([1, 1, np.inf, 1], np.float32)
SCALE = fs.DynamicLossScale(8.0, growth_interval=2)


@pytest.mark.parametrize(
  ("scale_first", "commit"), [(True, "sequential"), (False, "mean")]
)
def test_a_skipped_step_changes_nothing_but_the_loss_scale(scale_first, commit):
  wrappers = [fs.LossScale(SCALE), fs.AGN(3, commit=commit)]
  state = create(wrappers if scale_first else wrappers[::-1])
  plain = create([fs.AGN(3, commit=commit)])
  for i in range(4):
    # One replica overflows at the end of a period: no replica takes the step,
    # and the next one commits.
    if i == 2:
      before = state
      state = run(state, BAD)
      assert_trees_equal(
        (before.params, agn(before), before.step),
        (state.params, agn(state), state.step),
      )
      scale = state.wrapper_states["loss_scale"]
      assert (float(scale.scale), int(scale.skipped_steps)) == (8.0, 1)
    state, plain = run(state), run(plain)
    assert_trees_close(
      (state.params, state.opt_state, agn(state), state.step),
      (plain.params, plain.opt_state, agn(plain), plain.step),
      rtol=1e-6,
    )
  # A commit, which updates the center too, counts as one good step.
  scale = state.wrapper_states["loss_scale"]
  assert (float(scale.scale), int(scale.good_steps)) == (16.0, 0)
  assert int(agn(state).commits) == 1


def test_a_skipped_step_adds_nothing():
  decay = optax.chain(optax.add_decayed_weights(0.5), SGD)
  wrappers = [fs.AGN(2), fs.LossScale(SCALE)]
  state = create(wrappers, tx=decay, strategy=None)
  jitted = jax.jit(apply_step)
  grads = {"w": jnp.ones(6), "b": None}
  before = jitted(state, grads)
  infinite = {"w": jnp.full(6, jnp.inf), "b": jnp.float32(jnp.inf)}
  state = jitted(before, infinite)
  np.testing.assert_array_equal(agn(state).grad_accum["w"], np.ones((1, 6)))
  assert_trees_equal(agn(state), agn(before))
  # No applied step of the period had a gradient of b: it does not decay.
  state = jitted(state, grads)
  assert int(agn(state).commits) == 1
  np.testing.assert_array_equal(state.params["b"], PARAMS["b"])
  wanted = PARAMS["w"] - 0.25 * (1 + 0.5 * PARAMS["w"])
  np.testing.assert_allclose(state.params["w"], wanted, rtol=1e-6)


@pytest.mark.parametrize(
  ("dtype", "commit"), [(jnp.bfloat16, "sequential"), (jnp.float16, "mean")]
)
def test_gradients_are_accumulated_in_float32(dtype, commit):
  params = {"w": jnp.ones(16, dtype)}
  state = create([fs.AGN(64, commit=commit)], params, optax.sgd(2.0**-6))

  def tiny_step(state, x):
    loss_fn = lambda p: (p["w"].astype(jnp.float32) * x[0]).sum()
    return state.minimize(loss_fn)[0]

  run = FOUR.jit(tiny_step)
  x = FOUR.shard_batch(np.full(4, 1 + 2.0**-6, np.float32))
  for _ in range(3):
    state = run(state, x)
  own = agn(state)
  assert own.grad_accum["w"].dtype == jnp.float32
  assert own.local_params["w"].dtype == state.params["w"].dtype == dtype
  # In bfloat16 the sum of three would have been rounded.
  gradient = np.float32(jnp.asarray(1 + 2.0**-6, dtype))
  np.testing.assert_array_equal(own.grad_accum["w"], 3 * gradient)


def average_step(state, x):
  """Keeps a moving average of the batches, as BatchNorm does."""
  mean = 0.5 * state.batch_stats["mean"] + 0.5 * x.mean(0)
  _, grads = state.value_and_grad(loss_fn, x.mean())
  state = state.apply_gradients(grads=grads, batch_stats={"mean": mean})
  return state, state.batch_stats["mean"]


def test_collections_are_per_replica_and_averaged_by_a_commit():
  x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
  x += np.arange(8)[:, None]
  wrappers = [fs.LossScale("dynamic"), fs.AGN(3)]
  state = create(wrappers, batch_stats={"mean": np.zeros(3, np.float32)})
  step = FOUR.jit(average_step)
  batch = FOUR.shard_batch(x)
  means = x.reshape(4, 2, 3).mean(1)
  own, committed = np.zeros((4, 3)), np.zeros(3)
  for i in range(1, 8):
    state, seen = step(state, batch)
    own = 0.5 * own + 0.5 * means
    if i % 3 == 0:
      own = np.broadcast_to(own.mean(0), (4, 3))
      committed = own[0]
    np.testing.assert_allclose(seen.value, own, rtol=1e-5)
    np.testing.assert_allclose(
      state.batch_stats["mean"], committed, rtol=1e-5, atol=1e-7
    )
    stored = agn(state).collections["batch_stats"]["mean"]
    np.testing.assert_allclose(stored, own, rtol=1e-5)
    assert stored.sharding.spec == P("replica")


def test_collections_of_one_replica_outside_of_run():
  x = np.ones((4, 3), np.float32) * np.arange(3)
  stats = {"mean": np.zeros(3, np.float32)}
  state = create([fs.AGN(3)], strategy=None, batch_stats=stats)
  for _ in range(2):
    state, mean = jax.jit(average_step)(state, x)
  np.testing.assert_allclose(mean, 0.75 * np.arange(3))


def test_a_per_replica_collection_raises():
  stats = FOUR.distribute_values_from_function(lambda c: {"mean": np.zeros(3)})
  with pytest.raises(TypeError, match=r"'batch_stats'.*PerReplica"):
    create([fs.AGN(4)], batch_stats=stats)


def test_groups_of_cross_shard_commit_to_one_center():
  groups = ((0, 1), (2, 3))
  state = create([fs.CrossShard("mean", groups), fs.AGN(2, commit="mean")])
  for _ in range(3):
    state = run(state)
  local = np.asarray(agn(state).local_params["b"])
  assert local[0] == local[1] != local[2] == local[3]
  wanted = PARAMS["b"] - 0.25 * XS.mean()
  np.testing.assert_allclose(state.params["b"], wanted)
  for device in state.params["b"].addressable_shards:
    np.testing.assert_allclose(device.data, wanted)


def test_gradients_by_hand_are_not_reduced_before_a_commit():
  state, other = create([fs.AGN(3)]), create([fs.AGN(3)])

  def by_hand(state, x, skip):
    params = agn(state).local_params  # those of this replica
    grads = jax.grad(loss_fn)(params, x[0])
    return state.apply_gradients(grads=grads, skip_gradients_aggregation=skip)

  x = FOUR.shard_batch(XS)
  reduce = FOUR.jit(lambda s, x: by_hand(s, x, False))
  for _ in range(3):
    state = run(state)
    other = reduce(other, x)
  assert_trees_equal(agn(state), agn(other))
  skipping = FOUR.run(lambda s, x: by_hand(s, x, True), args=(other, x))
  assert_trees_equal(agn(run(other)), agn(skipping))


# Leaves without a gradient, and unusual trees.


@pytest.mark.parametrize("commit", ["sequential", "mean"])
def test_leaves_without_a_gradient_stay(commit):
  params = {
    "w": np.ones(6, np.float32),
    "count": np.arange(5, dtype=np.int32),
    "frozen": np.ones(3, np.float32),
    "stopped": np.ones(3, np.float32),
  }
  frozen = lambda params: {k: "f" if k == "frozen" else "t" for k in params}
  tx = optax.multi_transform(
    {"t": optax.sgd(0.25, momentum=0.5), "f": optax.set_to_zero()}, frozen
  )
  state = create([fs.AGN(3, commit=commit)], params, tx)

  def step(state):
    _, grads = state.value_and_grad(
      lambda p: p["w"].sum() + p["frozen"].sum() + p["stopped"].sum()
    )
    return state.apply_gradients(grads={**grads, "stopped": None})

  run = FOUR.jit(step)
  for _ in range(3):
    state = run(state)
  for tree in (state.params, agn(state).local_params):
    for key in ("count", "frozen", "stopped"):
      wanted = np.broadcast_to(params[key], tree[key].shape)
      np.testing.assert_array_equal(tree[key], wanted)
    assert not np.array_equal(tree["w"], np.ones(tree["w"].shape))
  assert agn(state).grad_accum["count"] is None
  assert agn(state).local_params["count"].dtype == params["count"].dtype


@pytest.mark.parametrize(
  ("commit", "delta"), [("sequential", True), ("mean", False)]
)
def test_a_leaf_without_a_gradient_at_the_commit(commit, delta):
  # Both leaves have a gradient in the first step, one in the second step, at
  # whose end the replicas commit.
  tx = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.25))
  wrapper = fs.AGN(2, commit=commit, commit_delta=delta)
  ones = np.ones(2, np.float32)
  params = {"a": ones, "b": ones, "never": ones}
  state = create([wrapper], params, tx)
  state = apply(state, {"a": ones, "b": ones, "never": None})
  local = 1 - 0.25 * 1.5
  np.testing.assert_array_equal(agn(state).local_params["b"], local)
  state = apply(state, {"a": ones, "b": None, "never": None})
  commits = np.repeat((1 - local) if delta else 0.5, 4)
  if commit == "mean":
    commits = commits[:1]
  b, new_local = 1.0, []
  for g in commits:
    b -= 0.25 * (g + 0.5 * b)
    new_local.append(b)
  np.testing.assert_allclose(state.params["b"], b)
  np.testing.assert_allclose(
    agn(state).local_params["b"][:, 0], np.resize(new_local, 4)
  )
  np.testing.assert_array_equal(agn(state).grad_accum["b"], 0)
  # A leaf that never has a gradient does not decay.
  np.testing.assert_array_equal(state.params["never"], 1)
  np.testing.assert_array_equal(agn(state).local_params["never"], 1)


def test_an_update_that_depends_on_the_size_of_arrays():
  # Above 12 elements in total, below on each device.
  large = lambda params: jax.tree.map(lambda p: p.size > 12, params)
  tx = optax.chain(optax.add_decayed_weights(1.0, mask=large), optax.sgd(0.5))
  strategy = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  sharding = jax.sharding.NamedSharding(strategy.mesh, P(None, "model"))
  w = jax.device_put(np.ones((8, 8), np.float32), sharding)
  state = create([fs.AGN(1)], {"w": w}, tx, strategy)
  state = apply(state, {"w": jnp.zeros((8, 8))}, strategy)
  np.testing.assert_allclose(state.params["w"], 0.5**4)


def test_trees_with_empty_leaves_and_containers():
  params = {
    "w": np.ones(4, np.float32),
    "none": None,
    "empty": np.ones((3, 0), np.float32),
    "tuple": (np.ones(1, np.float32), {}),
  }
  state = create([fs.AGN(1)], params, optax.adam(0.25))
  grads = jax.tree.map(jnp.ones_like, params)
  new = apply(state, grads)
  assert jax.tree.structure(new.params) == jax.tree.structure(params)
  for leaf in (new.params["w"], new.params["tuple"][0]):
    np.testing.assert_allclose(leaf, 1 - 0.25 * 4, atol=1e-4)
