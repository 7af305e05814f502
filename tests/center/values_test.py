"""AGN with a center in a store: values."""

import functools

import agn_problem
from center_workers import agn
from center_workers import new_directory
from center_workers import Workers
import jax
import numpy as np
import optax
import pytest
from quadratic_states import create
from tree_equality import assert_trees_close
from tree_equality import assert_trees_equal

import flaxshard as fs

FOUR = fs.Strategy(devices=jax.devices()[:4])
SPLIT = fs.Strategy(
  mesh_shape={"replica": 2, "model": 2}, devices=jax.devices()[:4]
)
PARAMS = {
  "w": np.arange(8, dtype=np.float32).reshape(2, 4) / 4,
  "b": np.float32(0.5),
}
XS = np.array([0.5, 1.0, 2.0, 4.0], np.float32)
SGD = optax.sgd(1.0)
MOMENTUM = optax.sgd(0.25, momentum=0.5)
STREAMING = agn(
  4, "mean", True, optax.adam(0.05), fragments=2, delay=1, blend=0.5
)

SLOW = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:AGN. communication_period")


def loss_fn(params, x):
  return (params["w"] * x.mean()).sum() + params["b"] * x.mean()


def train_step(state, x):
  return state.minimize(loss_fn, x)[0]


STEP = jax.jit(train_step)


def start(*wrappers, tx=MOMENTUM, params=PARAMS, **fields):
  return create(wrappers, tx, params, **fields)


def own(state):
  return state.wrapper_states["agn"]


def train_alone(state, step, steps, x):
  with Workers([state], step) as group:
    for _ in range(steps):
      group.step([x])
    return group.states[0]


@pytest.mark.parametrize(
  ("name", "wrapper", "workers"),
  [
    pytest.param("momentum", agn(3, "sum"), 3, marks=SLOW),
    ("adam", agn(3, "mean", fragments=3), 3),
    pytest.param("adam", agn(4, "sequential", fragments=2), 3, marks=SLOW),
    ("clipped", agn(4, "mean", fragments=2), 3),
    ("momentum", agn(4, "mean", fragments=3, delay=3, blend=0.25), 3),
    ("momentum", agn(3, "sequential", delay=1, blend=0.5), 1),
    pytest.param("sgd", agn(3, "mean", True, fragments=3), 3, marks=SLOW),
    ("sgd", agn(3, "sequential"), 3),
    ("adam", STREAMING, 2),
  ],
)
def test_every_step_equals_the_reference(name, wrapper, workers):
  tx = agn_problem.OPTIMIZERS[name]
  wanted = agn_problem.reference(wrapper, tx, workers)
  targets = [agn_problem.targets_of_replica(i) for i in range(workers)]
  close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
  state = agn_problem.create(None, wrapper, tx)
  in_turn = wrapper.commit == "sequential"
  step = jax.jit(agn_problem.step)
  with Workers([state] * workers, step, in_turn=in_turn) as group:
    for _ in range(9):
      group.step(targets)
      wanted.take(agn_problem.grad_fn)
      in_flight = {k for _, new in wanted.sent for k in new[0]}
      for k in agn_problem.PARAMS:
        # In turn, the last worker knows the newest center.
        if k not in in_flight:
          close(group.states[-1].params[k], wanted.center[k])
        for i, state in enumerate(group.states):
          close(own(state).local_params[k], wanted.local[i][k])
          close(own(state).grad_accum[k], wanted.accum[i][k])


# Commits.


@pytest.mark.parametrize(
  ("dtype", "largest"), [("bfloat16", 128), ("int8", 127), ("int4", 7)]
)
def test_what_encoding_cuts_off_is_not_lost(dtype, largest):
  xs = np.random.default_rng(0).normal(size=(2, 300)).astype(np.float32)
  params = {"w": np.zeros(300, np.float32), "b": np.float32(0)}
  state = start(agn(2, "sum", commit_dtype=dtype), tx=SGD, params=params)
  step = jax.jit(lambda s, x: s.minimize(lambda p: p["w"] @ x + p["b"])[0])
  with Workers([state] * 2, step) as group:
    for _ in range(16):
      group.step(xs)
      assert_trees_equal(group.states[0].params, group.states[1].params)
    # What reads the whole center, and no changes, finds the same bits.
    whole = group.settle()[0]
    assert_trees_equal(whole.params, group.states[0].params)
  error = np.abs(whole.params["w"] + 8 * xs.sum(0)).max()
  # Half a scale of both commits and of the change, after any number of them.
  assert 0 < error < 1.1 * np.abs(xs).max(1).sum() / largest
  np.testing.assert_array_equal(whole.params["b"], -16)


NOISE = optax.add_noise(0.5, 0.5, jax.random.key(0, impl="rbg"))
COMPLEX = {"z": np.array([1 + 1j, 2 - 1j], np.complex64)}


@pytest.mark.parametrize(
  ("params", "tx", "loss_fn"),
  [
    (COMPLEX, SGD, lambda p: (p["z"] * (1 + 2j)).real.sum() ** 2),
    # An optimizer with a key, of any kind, draws the same numbers.
    (PARAMS, optax.chain(NOISE, SGD), lambda p: loss_fn(p, XS)),
  ],
  ids=["complex", "key"],
)
def test_a_lone_worker_equals_a_compiled_replica(params, tx, loss_fn):
  step = jax.jit(lambda state, _: state.minimize(loss_fn)[0])
  wrapper = agn(commit_dtype="int8" if params is COMPLEX else None)
  found = train_alone(start(wrapper, tx=tx, params=params), step, 4, None)
  one = fs.Strategy(devices=jax.devices()[:1])
  state = start(fs.AGN(2, "mean"), tx=tx, params=params, strategy=one)
  for _ in range(4):
    state = one.run(step, args=(state, None))
  assert_trees_close(found.params, state.params, rtol=1e-6, atol=0)


# Within one process.


@pytest.mark.parametrize("view", ["run", "global", "split"])
def test_replicas_of_a_process_take_one_step_together(view):
  strategy = SPLIT if view == "split" else FOUR
  params, spec = PARAMS, jax.P(None, "model") if view == "split" else jax.P()
  if view == "split":
    sharding = jax.sharding.NamedSharding(SPLIT.mesh, spec)
    params = {**PARAMS, "w": jax.device_put(PARAMS["w"], sharding)}
  state = start(agn(), params=params, strategy=strategy)
  shardings = jax.tree.map(lambda x: x.sharding, state)
  step = STEP if view == "global" else strategy.jit(train_step)
  state = train_alone(state, step, 5, strategy.shard_batch(XS))
  alone = train_alone(start(agn()), STEP, 5, XS)
  assert_trees_equal((state.params, own(state)), (alone.params, own(alone)))
  assert own(state).grad_accum["w"].sharding.spec == spec
  assert jax.tree.map(lambda x: x.sharding, state) == shardings
  # The mean over the batch: 1.875 a step, in two periods.
  first = PARAMS["b"] - 0.25 * 1.875
  second = first - 0.25 * (1.875 + 0.5 * 1.875)
  assert float(state.params["b"]) == second


@pytest.mark.parametrize("kwargs", [{}, {"commit_dtype": "int8", "delay": 1}])
def test_the_state_may_be_donated_and_the_step_compiles_once(kwargs):
  wrapper = agn(outer_tx=MOMENTUM, **kwargs)
  step = jax.jit(train_step, donate_argnums=0)
  state = jax.jit(lambda x: x)(start(wrapper))
  with Workers([state], step) as group:
    for _ in range(5):
      group.step([XS])
    compiled = step._cache_size()
    group.states = group.settle()
    for _ in range(3):
      group.step([XS])
  assert step._cache_size() == compiled
  kept = train_alone(start(wrapper), STEP, 8, XS)
  assert_trees_equal(group.states[0].params, kept.params)


# Beside other wrappers.


@pytest.mark.parametrize("scale_first", [True, False])
def test_a_skipped_step_is_no_local_step(scale_first):
  scale = fs.LossScale(fs.DynamicLossScale(8.0, growth_interval=2))
  wrappers = [scale, agn()] if scale_first else [agn(), scale]
  good, bad = np.float32(1), np.float32(np.inf)
  with Workers([start(*wrappers)] * 2, STEP) as group:
    group.step([good, good])
    before = group.states
    group.step([bad, bad])
    for old, new in zip(before, group.states, strict=True):
      assert_trees_equal((old.params, own(old)), (new.params, own(new)))
      assert float(new.wrapper_states["loss_scale"].scale) == 4.0
    group.step([good, good])
    for state in group.states:
      assert float(state.params["b"]) == 0.25
      assert int(own(state).commits) == 1


@pytest.mark.parametrize("per_replica", [False, True])
def test_accumulate_outside(per_replica):
  accumulate = fs.Accumulate(2, per_replica=per_replica)
  new, directory = start(accumulate, agn(), strategy=FOUR), new_directory()
  with Workers([new], FOUR.jit(train_step), directory) as group:
    for i in range(1, 8):
      group.step([FOUR.shard_batch(XS)])
      found = own(group.states[0])
      assert (int(found.local_step), int(found.commits)) == (i // 2, i // 4)
    state = group.settle()[0]
  np.testing.assert_array_equal(found.grad_accum["b"], 1.875)
  # The clock counts batches: those of a checkpoint, and those of the others.
  for given, clock in [(state, 7), (new, 4)]:
    with fs.Worker(directory, 0, 1) as worker:
      worker.start(given)
      assert (worker.clock, worker.missed_steps) == (clock, 4 * (given is new))


# Collections.


def stats_step(state, x):
  stats = {"mean": 0.5 * state.stats["mean"] + 0.5 * x.mean()}
  _, grads = state.value_and_grad(loss_fn, x)
  return state.apply_gradients(grads=grads, stats=stats)


@pytest.mark.parametrize(
  ("view", "commit"),
  [("run", "sum"), ("run", "sequential"), ("global", "sum")],
)
def test_other_collections(view, commit):
  strategy = fs.Strategy(devices=jax.devices()[:2])
  step = strategy.jit(stats_step) if view == "run" else jax.jit(stats_step)
  collections = {
    "stats": {"mean": np.zeros((), np.float32)},
    # What LoRA freezes.
    "frozen": np.zeros(100_000, np.float32),
  }
  state = start(agn(2, commit), strategy=strategy, **collections)
  xs = [strategy.shard_batch(XS[:2]), strategy.shard_batch(XS[2:])]
  local, committed = np.zeros(2), np.zeros(2)
  in_turn = commit == "sequential"
  with Workers([state] * 2, step, in_turn=in_turn) as group:
    for i in range(1, 4):
      group.step(xs)
      local = 0.5 * local + 0.5 * np.array([0.75, 3.0])
      if i == 2:
        local = np.full(2, local.mean()) if commit == "sum" else local
        committed = local
      for k, state in enumerate(group.states):
        assert float(own(state).collections["stats"]["mean"]) == local[k]
        # Without `run` the field of the state is that of the worker.
        wanted = committed if view == "run" else local
        assert float(state.stats["mean"]) == wanted[k]
    # In sequence those of the last worker that has committed.
    assert float(group.settle()[0].stats["mean"]) == committed[1]
    # What is frozen is not committed.
    assert group.workers[0].metrics()["commit_megabytes"] < 0.1


# Leaves.


@pytest.mark.parametrize("commit", ["mean", "sequential"])
def test_leaves_without_a_gradient_stay(commit):
  params = dict.fromkeys(["w", "zero", "other", "frozen"], np.ones(3, "f"))
  params["count"] = np.arange(3, dtype=np.int32)
  tx = fs.freeze(optax.adamw(0.5, weight_decay=0.5), ["frozen"])
  loss = lambda p: (p["w"] + 0 * p["zero"] + p["other"]).sum()
  some = jax.jit(lambda state: state.minimize(loss, var_list=["w", "zero"])[0])
  both = jax.jit(lambda state: state.minimize(loss)[0])
  state = start(agn(2, commit), tx=tx, params=params)
  with Workers([state], lambda state, step: step(state)) as group:
    group.step([some])
    group.step([some])
    center = group.states[0].params
    for name in ("other", "frozen", "count"):
      np.testing.assert_array_equal(center[name], params[name])
    # A gradient of zeros is a gradient: its weight decays.
    np.testing.assert_array_equal(center["zero"], [0.75] * 3)
    assert float(center["w"][0]) < 0.5
    # It had a gradient earlier in the period.
    group.step([both])
    group.step([some])
    center = group.states[0].params
    assert float(center["other"][0]) < 0.5
    np.testing.assert_array_equal(center["frozen"], params["frozen"])


def test_steps_that_are_not_committed():
  state = STEP(STEP(start(agn()), XS), XS)
  with pytest.warns(UserWarning, match="agn.* the last 2 "):
    assert_trees_equal(state.without_wrappers().params, start().params)
  state = train_alone(start(agn(4, fragments=2)), STEP, 5, XS)
  with pytest.warns(UserWarning, match="agn.* the last 3 "):
    state.without_wrappers()
