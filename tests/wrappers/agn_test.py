"""AGN beside a reference and the original; with other wrappers and leaves."""

import functools
import json
import pathlib
import warnings

import agn_problem
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quadratic_states
from tree_equality import assert_trees_close
from tree_equality import assert_trees_equal

import flaxshard as fs

FIGURES = pathlib.Path(__file__).parents[1] / "testdata" / "agn.json"
LOCAL_SGD = fs.AGN(3, "mean", commit_delta=True, outer_tx=optax.sgd(1.0))
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
DILOCO = fs.AGN(4, "mean", commit_delta=True, outer_tx=NESTEROV)

SLOW = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:AGN. communication_period")


@pytest.mark.parametrize(
  ("wrapper", "name", "sizes"),
  [
    (fs.AGN(3), "momentum", dict(replicas=8)),
    (fs.AGN(3), "clipped", {}),
    pytest.param(fs.AGN(3, "sum"), "clipped", {}, marks=SLOW),
    # The rates of local steps and of commits have counts of their own.
    (fs.AGN(2, "mean"), "schedule", dict(replicas=2, steps=6)),
    pytest.param(fs.AGN(2), "adam", dict(replicas=1, steps=5), marks=SLOW),
    (fs.AGN(3), "adam", dict(replicas=None, steps=4)),
    # Deltas with the inner optimizer.
    (fs.AGN(3, "sum", commit_delta=True), "sgd", dict(replicas=2, steps=4)),
    # The center is the mean of the local parameters.
    pytest.param(LOCAL_SGD, "adam", dict(steps=6), marks=SLOW),
    (DILOCO, "adam", dict(steps=9)),
    (fs.AGN(3, outer_tx=optax.adam(0.02)), "momentum", {}),
  ],
)
def test_every_step_equals_the_reference(wrapper, name, sizes):
  tx = agn_problem.OPTIMIZERS[name]
  state = agn_problem.compare(wrapper, tx, **sizes)
  if wrapper.outer_tx is not None:
    # The state of `tx` for the center is not used.
    assert_trees_equal(state.opt_state, tx.init(agn_problem.PARAMS))


# Numbers of the original program.

ORIGINALS = {"sgd": optax.sgd, "momentum": optax.sgd, "adam": optax.adam}
HYPER = {"lr": "learning_rate", "beta1": "b1", "beta2": "b2", "epsilon": "eps"}


def original_loss(params, problem):
  if "v0" in problem:
    return sum((p * problem[k]).sum() for k, p in params.items())
  errors = {i: params[f"v{i}"] - problem[f"b{i}"] for i in (0, 1)}
  return sum((0.5 * problem[f"a{i}"] * errors[i] ** 2).sum() for i in (0, 1))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_step_equals_that_of_the_original(workers):
  strategy = agn_problem.strategy_of(workers)
  all_cases = json.loads(FIGURES.read_text())["cases"]
  cases = [c for c in all_cases if c["config"]["num_workers"] == workers]
  states, problems = [], []
  for config in (case["config"] for case in cases):
    name = config["optimizer"]
    hyper = {HYPER.get(k, k): x for k, x in config["hyper"].items()}
    state = quadratic_states.create(
      [fs.AGN(config["period"], share_step_count=name == "adam")],
      ORIGINALS[name](**hyper),
      {k: np.float32(v) for k, v in config["init"].items()},
      strategy=strategy,
    )
    states.append(state)
    rows = config["problem"]
    stacked = {k: np.float32([row[k] for row in rows]) for k in rows[0]}
    problems.append(strategy.shard_batch(stacked))
  one_step = lambda state, x: state.minimize(original_loss, x)[0]
  run = strategy.jit(lambda *both: [*map(one_step, *both)])
  close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
  steps = max(len(case["steps"]) for case in cases) // workers
  for i in range(0, steps * workers, workers):
    states = run(states, problems)
    for case, state in zip(cases, states, strict=True):
      rows = case["steps"][i : i + workers]
      if not rows:  # the figures of this case have ended
        continue
      agn = jax.device_get(state.wrapper_states["agn"])
      for worker, row in enumerate(rows):
        assert row["worker"] == worker
        for name in ("v0", "v1"):
          close(agn.local_params[name][worker], row["local"][name])
          close(agn.grad_accum[name][worker], row["acc"][name])
      # After the commit of the last worker.
      for name in ("v0", "v1"):
        close(state.params[name], row["center"][name])
      assert int(agn.local_step) == int(state.step) == row["local_step"]
      assert int(agn.commits) * workers == row["global_step"]


# With other wrappers and collections.

FOUR = agn_problem.strategy_of(4)
PARAMS = {"w": np.arange(6, dtype=np.float32) / 4, "b": np.float32(0.5)}
SGD = optax.sgd(0.25)
SCALE = fs.DynamicLossScale(8.0, growth_interval=2)
# Powers of two, so that sums are exact in any order.
XS = np.array([0.5, 1.0, 2.0, 4.0], np.float32)
GOOD = np.ones(4, np.float32)
BAD = np.array([1, 1, np.inf, 1], np.float32)


def loss_fn(params, x, factor=1.0):
  return (params["w"].sum() * x + params["b"] * x) * factor


RUN = FOUR.jit(lambda state, x, f: state.minimize(loss_fn, x[0], f[0])[0])


def run(state, factors=GOOD):
  return RUN(state, FOUR.shard_batch(XS), FOUR.shard_batch(factors))


def create(wrappers, params=PARAMS, tx=SGD, strategy=FOUR, **collections):
  return quadratic_states.create(
    wrappers, tx, params, strategy=strategy, **collections
  )


def apply_step(state, grads):
  return state.apply_gradients(grads=grads)


def apply(state, grads, strategy=FOUR):
  return strategy.run(apply_step, args=(state, grads))


def agn(state):
  return state.wrapper_states["agn"]


@pytest.mark.parametrize(("period", "warns"), [(2, True), (3, False)])
def test_too_frequent_sequential_commits_warn(period, warns):
  # The least period of 4 replicas is 0.64 * 4 = 2.56.
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    # An optimizer of its own, so that the step is traced.
    run(create([fs.AGN(period)], tx=optax.sgd(0.1)))
  found = [f"communication_period={period}" in str(w.message) for w in caught]
  assert found == [True, True] * warns


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
      before, state = state, run(state, BAD)
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


def test_groups_of_cross_shard_commit_to_one_center():
  groups = ((0, 1), (2, 3))
  state = create([fs.CrossShard("mean", groups), fs.AGN(2, commit="mean")])
  for _ in range(3):
    state = run(state)
  local = np.asarray(agn(state).local_params["b"])
  assert local[0] == local[1] != local[2] == local[3]
  wanted = PARAMS["b"] - 0.25 * XS.mean()
  for device in state.params["b"].addressable_shards:
    np.testing.assert_allclose(device.data, wanted)


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
  step, batch = FOUR.jit(average_step), FOUR.shard_batch(x)
  own, committed = np.zeros((4, 3)), np.zeros(3)
  for i in range(1, 8):
    state, seen = step(state, batch)
    own = 0.5 * own + 0.5 * x.reshape(4, 2, 3).mean(1)
    if i % 3 == 0:
      committed = own.mean(0)
      own = np.broadcast_to(committed, (4, 3))
    stored = agn(state).collections["batch_stats"]["mean"]
    np.testing.assert_allclose(seen.value, own, rtol=1e-5)
    np.testing.assert_allclose(stored, own, rtol=1e-5)
    np.testing.assert_allclose(
      state.batch_stats["mean"], committed, rtol=1e-5, atol=1e-7
    )
  assert stored.sharding.spec == jax.P("replica")


def test_collections_of_one_replica_outside_of_run():
  x = np.ones((4, 3), np.float32) * np.arange(3)
  stats = {"mean": np.zeros(3, np.float32)}
  state = create([fs.AGN(3)], strategy=None, batch_stats=stats)
  for _ in range(2):
    state, mean = jax.jit(average_step)(state, x)
  np.testing.assert_allclose(mean, 0.75 * np.arange(3))
  # `run` goes on with those of the last batch, also of one without an update.
  one = fs.Strategy(devices=jax.devices()[:1])
  wrappers = [fs.Accumulate(2, per_replica=True), fs.AGN(3)]
  state = create(wrappers, strategy=one, batch_stats=stats)
  for step in (jax.jit(average_step), one.jit(average_step)):
    state, mean = step(state, x)
  np.testing.assert_allclose(mean.value, [0.75 * np.arange(3)])


# Leaves without a gradient, and unusual trees.


@pytest.mark.parametrize(
  ("commit", "delta"), [("sequential", True), ("mean", False)]
)
def test_leaves_without_a_gradient(commit, delta):
  # "a" has a gradient in both steps of a period, "b" in the first one alone,
  # the others in none; a skipped step counts for none.
  params = dict.fromkeys(("a", "b", "never", "frozen"), np.ones(2, np.float32))
  params |= {"count": np.arange(2, dtype=np.int32), "flag": np.ones(2, bool)}
  labels = lambda params: {k: "f" if k == "frozen" else "t" for k in params}
  decay = optax.chain(optax.add_decayed_weights(0.5), SGD)
  tx = optax.multi_transform({"t": decay, "f": optax.set_to_zero()}, labels)
  wrapper = fs.AGN(2, commit=commit, commit_delta=delta)
  state = create([wrapper, fs.LossScale(SCALE)], params, tx)
  grads = {k: np.ones(2, np.float32) for k in params} | {"never": None}
  state = apply(state, grads)
  local = 1 - 0.25 * 1.5
  np.testing.assert_array_equal(agn(state).local_params["b"], local)
  infinite = dict.fromkeys(params, np.full(2, np.inf, np.float32))
  before, state = state, apply(state, infinite)
  assert_trees_equal(agn(state), agn(before))
  state = apply(state, {**grads, "b": None})
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
  for tree in (state.params, agn(state).local_params):
    for key in ("never", "frozen", "count", "flag"):
      wanted = np.broadcast_to(params[key], tree[key].shape)
      np.testing.assert_array_equal(tree[key], wanted)
      assert tree[key].dtype == params[key].dtype


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_are_accumulated_in_float32(dtype):
  params = {"w": np.ones(16, dtype)}
  state = create([fs.AGN(64)], params, optax.sgd(2.0**-6))
  for _ in range(3):
    state = apply(state, {"w": np.full(16, 1 + 2.0**-6, dtype)})
  own = agn(state)
  assert own.local_params["w"].dtype == state.params["w"].dtype == dtype
  # In bfloat16 the sum of three would have been rounded.
  assert own.grad_accum["w"].dtype == jnp.float32
  gradient = np.array(1 + 2.0**-6, dtype).astype(np.float32)
  np.testing.assert_array_equal(own.grad_accum["w"], 3 * gradient)


def test_an_update_that_depends_on_the_size_of_arrays():
  # Above 12 elements in total, below on each device.
  large = lambda params: jax.tree.map(lambda p: p.size > 12, params)
  tx = optax.chain(optax.add_decayed_weights(1.0, mask=large), optax.sgd(0.5))
  strategy = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  sharding = jax.sharding.NamedSharding(strategy.mesh, jax.P(None, "model"))
  w = jax.device_put(np.ones((8, 8), np.float32), sharding)
  state = create([fs.AGN(1)], {"w": w}, tx, strategy)
  state = apply(state, {"w": np.zeros((8, 8), "f")}, strategy)
  np.testing.assert_allclose(state.params["w"], 0.5**4)


def test_trees_with_empty_leaves_and_containers():
  params = {
    "w": np.ones(4, np.float32),
    "none": None,
    "empty": np.ones((3, 0), np.float32),
    "tuple": (np.ones(1, np.float32), {}),
  }
  state = create([fs.AGN(1)], params, optax.adam(0.25))
  new = apply(state, jax.tree.map(np.ones_like, params))
  assert jax.tree.structure(new.params) == jax.tree.structure(params)
  for leaf in (new.params["w"], new.params["tuple"][0]):
    np.testing.assert_allclose(leaf, 1 - 0.25 * 4, atol=1e-4)
