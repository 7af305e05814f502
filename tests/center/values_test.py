"""AGN with a center in a store: values."""

import functools

import agn_problem
import center_workers
import flax.linen as nn
from flax.linen import fp8_ops
import jax
import numpy as np
import optax
import pytest
import tree_equality

import flaxshard as fs

P = jax.sharding.PartitionSpec
FOUR = fs.Strategy(devices=jax.devices()[:4])
SPLIT = fs.Strategy(
  mesh_shape={"replica": 2, "model": 2}, devices=jax.devices()[:4]
)
PARAMS = {
  "w": np.arange(8, dtype=np.float32).reshape(2, 4) / 4,
  "b": np.float32(0.5),
}
MOMENTUM = optax.sgd(0.25, momentum=0.5)
ONES = np.ones(2, np.float32)
XS = np.array([0.5, 1.0, 2.0, 4.0], np.float32)
SCALE = fs.DynamicLossScale(8.0, growth_interval=2)
OUTER = optax.adam(0.05)
OPTIMIZERS = agn_problem.OPTIMIZERS

pytestmark = pytest.mark.filterwarnings("ignore:AGN. communication_period")


def store(period, commit="sequential", commit_delta=False, outer_tx=None, **kw):
  return fs.AGN(
    period,
    commit,
    commit_delta=commit_delta,
    outer_tx=outer_tx,
    transport=fs.Store(**kw),
  )


def loss_fn(params, x):
  return (params["w"] * x.mean()).sum() + params["b"] * x.mean()


def train_step(state, x):
  return state.minimize(loss_fn, x)[0]


STEP = jax.jit(train_step)


def create(*wrappers, tx=MOMENTUM, params=PARAMS, strategy=None, **collections):
  return fs.TrainState.create(
    apply_fn=None,
    params=params,
    tx=tx,
    wrappers=wrappers,
    strategy=strategy,
    **collections,
  )


def agn(state):
  return state.wrapper_states["agn"]


def train_alone(state, step, steps, *args):
  with center_workers.Workers([state], step) as group:
    for _ in range(steps):
      group.step(*([x] for x in args))
    return group.states[0]


def assert_trees_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, *jax.device_get((a, b)))


# Beside the reference.


def compare(wrapper, tx, *, workers=3, steps=9):
  wanted = agn_problem.reference(wrapper, tx, workers)
  targets = [agn_problem.targets_of_replica(i) for i in range(workers)]
  close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
  state = agn_problem.create(None, wrapper, tx)
  in_turn = wrapper.commit == "sequential"
  step = jax.jit(agn_problem.step)
  with center_workers.Workers([state] * workers, step, None, in_turn) as group:
    for _ in range(steps):
      group.step(targets)
      wanted.take(agn_problem.grad_fn)
      in_flight = {k for _, new in wanted.sent for k in new[0]}
      for k in agn_problem.PARAMS:
        # In turn, the last worker knows the newest center.
        if k not in in_flight:
          close(group.states[-1].params[k], wanted.center[k])
        for i, state in enumerate(group.states):
          close(agn(state).local_params[k], wanted.local[i][k])
          close(agn(state).grad_accum[k], wanted.accum[i][k])


@pytest.mark.parametrize(
  ("name", "wrapper", "kwargs"),
  [
    ("momentum", store(3, "sum"), {}),
    ("adam", store(3, "mean", fragments=3), {}),
    ("adam", store(4, fragments=2), {}),
    ("clipped", store(4, "mean", fragments=2), {}),
    ("momentum", store(4, "mean", fragments=3, delay=3, blend=0.25), {}),
    ("momentum", store(3, delay=1, blend=0.5), {"workers": 1}),
    ("sgd", store(3, "mean", True, fragments=3), {}),
    ("sgd", store(3), {}),
    # Streaming DiLoCo.
    (
      "adam",
      store(4, "mean", True, OUTER, fragments=2, delay=1, blend=0.5),
      {"workers": 2},
    ),
  ],
)
def test_every_step_equals_the_reference(name, wrapper, kwargs):
  compare(wrapper, OPTIMIZERS[name], **kwargs)


# Commits.


@pytest.mark.parametrize(
  ("dtype", "largest"), [("bfloat16", 128), ("int8", 127), ("int4", 7)]
)
def test_what_encoding_cuts_off_is_not_lost(dtype, largest):
  xs = np.random.default_rng(0).normal(size=(2, 300)).astype(np.float32)
  params = {"w": np.zeros(300, np.float32), "b": np.float32(0)}
  state = create(
    store(2, "sum", commit_dtype=dtype), tx=optax.sgd(1.0), params=params
  )
  step = jax.jit(lambda s, x: s.minimize(lambda p: p["w"] @ x + p["b"])[0])
  with center_workers.Workers([state] * 2, step) as group:
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


def test_a_mean_is_weighted_by_examples():
  with center_workers.Workers(
    [create(store(2, "mean"), tx=optax.sgd(1.0))] * 2, STEP
  ) as group:
    for _ in range(2):
      group.step([np.float32(1), np.float32(5)], examples=[1, 3])
    for state in group.states:
      assert float(state.params["b"]) == 0.5 - (1 + 3 * 5) / 4


# Within one process.


@pytest.mark.parametrize("view", ["run", "global"])
def test_replicas_of_a_process_take_one_step_together(view):
  alone = train_alone(create(store(2, "mean")), STEP, 5, XS)
  step = FOUR.jit(train_step) if view == "run" else STEP
  state = create(store(2, "mean"), strategy=FOUR)
  state = train_alone(state, step, 5, FOUR.shard_batch(XS))
  assert_trees_equal(alone, state)
  assert agn(state).local_params["w"].shape == (2, 4)
  assert {x.sharding.spec for x in jax.tree.leaves(state)} == {P()}
  assert int(agn(state).commits) == 2
  # The mean over the batch: 1.875 a step, in two periods.
  first = PARAMS["b"] - 0.25 * 1.875
  second = first - 0.25 * (1.875 + 0.5 * 1.875)
  assert float(state.params["b"]) == second


def test_parameters_that_are_split_within_a_process_stay_split():
  w = jax.device_put(
    PARAMS["w"], jax.sharding.NamedSharding(SPLIT.mesh, P(None, "model"))
  )
  state = create(store(2, "mean"), params={**PARAMS, "w": w}, strategy=SPLIT)
  shardings = jax.tree.map(lambda x: x.sharding, state)
  x = SPLIT.shard_batch(XS)
  state = train_alone(state, SPLIT.jit(train_step), 4, x)
  whole = train_alone(create(store(2, "mean")), STEP, 4, XS)
  assert_trees_equal((state.params, agn(state)), (whole.params, agn(whole)))
  assert agn(state).grad_accum["w"].sharding.spec == P(None, "model")
  assert jax.tree.map(lambda x: x.sharding, state) == shardings


@pytest.mark.parametrize("kwargs", [{}, {"commit_dtype": "int8", "delay": 1}])
def test_the_state_may_be_donated_and_the_step_compiles_once(kwargs):
  wrapper = store(2, "mean", outer_tx=MOMENTUM, **kwargs)
  step = jax.jit(train_step, donate_argnums=0)
  state = jax.jit(lambda x: x)(create(wrapper))
  with center_workers.Workers([state], step) as group:
    for _ in range(5):
      group.step([XS])
    compiled = step._cache_size()
    group.states = group.settle()
    for _ in range(3):
      group.step([XS])
  assert step._cache_size() == compiled
  kept = train_alone(create(wrapper), STEP, 8, XS)
  assert_trees_equal(group.states[0].params, kept.params)


# Beside other wrappers.


@pytest.mark.parametrize("scale_first", [True, False])
def test_a_skipped_step_is_no_local_step(scale_first):
  wrappers = [fs.LossScale(SCALE), store(2, "mean")]
  state = create(*(wrappers if scale_first else wrappers[::-1]))
  good, bad = np.float32(1), np.float32(np.inf)
  with center_workers.Workers([state] * 2, STEP) as group:
    group.step([good, good])
    before = group.states
    group.step([bad, bad])
    for old, new in zip(before, group.states, strict=True):
      assert_trees_equal((old.params, agn(old)), (new.params, agn(new)))
      assert float(new.wrapper_states["loss_scale"].scale) == 4.0
    group.step([good, good])
    for state in group.states:
      assert float(state.params["b"]) == 0.25
      assert int(agn(state).commits) == 1


def test_ema_outside_averages_the_center_of_each_step():
  state = create(fs.EMA(0.5), store(2, "mean"))
  average, weight = 0.0, 0.0
  with center_workers.Workers([state] * 2, STEP) as group:
    for _ in range(5):
      # A step sees the center of the last commit.
      center = float(group.states[0].params["b"])
      average, weight = 0.5 * average + 0.5 * center, 0.5 * weight + 0.5
      group.step([XS[0], XS[1]])
      for state in group.states:
        np.testing.assert_allclose(
          state.eval_params["b"], average / weight, rtol=1e-6
        )


@pytest.mark.parametrize("per_replica", [False, True])
def test_accumulate_outside(per_replica):
  wrappers = fs.Accumulate(2, per_replica=per_replica), store(2, "mean")
  state = create(*wrappers, strategy=FOUR)
  step, x = FOUR.jit(train_step), FOUR.shard_batch(XS)
  with center_workers.Workers([state], step) as group:
    for i in range(1, 7):
      group.step([x])
      own = agn(group.states[0])
      assert (int(own.local_step), int(own.commits)) == (i // 2, i // 4)
  np.testing.assert_array_equal(own.grad_accum["b"], 1.875)


@pytest.mark.parametrize(
  ("wrappers", "message"),
  [
    ([store(2), fs.EMA()], r"'ema' .* inside of 'agn'"),
    ([store(2), fs.Accumulate(2)], r"'accumulate' .* inside of 'agn'"),
    ([store(2), fs.CrossShard()], r"'cross_shard' .* inside of 'agn'"),
  ],
)
def test_order_of_wrappers(wrappers, message):
  with pytest.raises(ValueError, match=message):
    create(*wrappers)


@pytest.mark.filterwarnings("ignore:CrossShard. gradients are reduced in")
def test_replicas_that_differ_are_not_committed():
  groups = fs.CrossShard("mean", ((0, 1), (2, 3)))
  state = create(groups, store(2, "mean"), strategy=FOUR)
  with pytest.raises(ValueError, match=r"must have equal .* 2 groups of 2 "):
    center_workers.Workers([state], STEP)


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
  stats = {"mean": np.zeros((), np.float32)}
  state = create(store(2, commit), strategy=strategy, stats=stats)
  xs = [strategy.shard_batch(XS[:2]), strategy.shard_batch(XS[2:])]
  own, committed = np.zeros(2), np.zeros(2)
  in_turn = commit == "sequential"
  with center_workers.Workers([state] * 2, step, None, in_turn) as group:
    for i in range(1, 4):
      group.step(xs)
      own = 0.5 * own + 0.5 * np.array([0.75, 3.0])
      if i == 2:
        own = np.full(2, own.mean()) if commit == "sum" else own
        committed = own
      for k, state in enumerate(group.states):
        assert float(agn(state).collections["stats"]["mean"]) == own[k]
        # Without `run` the field of the state is that of the worker.
        wanted = committed if view == "run" else own
        assert float(state.stats["mean"]) == wanted[k]
    # In sequence those of the last worker that has committed.
    assert float(group.settle()[0].stats["mean"]) == committed[1]


def test_lora_commits_its_factors():
  state = fs.create_train_state(
    nn.Dense(4),
    jax.random.key(0),
    np.ones((2, 8), np.float32),
    optax.sgd(0.1),
    lora=fs.LoRA(rank=2, patterns=("kernel",)),
    wrappers=[store(2, "mean")],
  )

  @jax.jit
  def step(state, x):
    variables = lambda p: {"params": p, "frozen": state.frozen}
    return state.minimize(lambda p: state.apply_fn(variables(p), x).sum())[0]

  with center_workers.Workers([state] * 2, step) as group:
    for _ in range(2):
      group.step([np.ones((2, 8), np.float32), np.full((2, 8), 3, np.float32)])
    first, second = group.states
    assert_trees_equal(first.params, second.params)
    changed = jax.tree.map(
      lambda a, b: bool((a != b).any()), first.params, state.params
    )
    assert changed["kernel"]["lora_b"]
    assert_trees_equal(first.frozen, state.frozen)


# Leaves.


@pytest.mark.parametrize("commit", ["mean", "sequential"])
def test_leaves_without_a_gradient_stay(commit):
  params = {
    "w": np.ones(3, np.float32),
    "zero": np.ones(3, np.float32),
    "other": np.ones(3, np.float32),
    "frozen": np.ones(3, np.float32),
    "count": np.arange(3, dtype=np.int32),
  }
  tx = fs.freeze(optax.adamw(0.5, weight_decay=0.5), ["frozen"])
  loss = lambda p: (p["w"] + 0 * p["zero"] + p["other"]).sum()
  some = jax.jit(lambda state: state.minimize(loss, var_list=["w", "zero"])[0])
  # Had a gradient earlier in the period.
  both = jax.jit(lambda state: state.minimize(loss)[0])
  state = create(store(2, commit), tx=tx, params=params)
  with center_workers.Workers(
    [state], lambda state, step: step(state)
  ) as group:
    for step in (some, some):
      group.step([step])
    center = group.states[0].params
    for name in ("other", "frozen", "count"):
      np.testing.assert_array_equal(center[name], params[name])
    # A gradient of zeros is a gradient: its weight decays.
    np.testing.assert_array_equal(center["zero"], [0.75] * 3)
    assert float(center["w"][0]) < 0.5
    for step in (both, some):
      group.step([step])
    center = group.states[0].params
    assert float(center["other"][0]) < 0.5
    np.testing.assert_array_equal(center["frozen"], params["frozen"])


def test_complex_parameters():
  params = {"z": np.array([1 + 1j, 2 - 1j], np.complex64)}
  loss = lambda p, x: (p["z"] * x).real.sum() ** 2
  step = jax.jit(lambda state, x: state.minimize(loss, x)[0])
  wrapper = store(2, "mean", commit_dtype="int8")
  found = train_alone(create(wrapper, params=params), step, 2, 1 + 2j)
  strategy = fs.Strategy(devices=jax.devices()[:1])
  state = create(fs.AGN(2, "mean"), params=params, strategy=strategy)
  for _ in range(2):
    state = strategy.run(lambda s: step(s, 1 + 2j), args=(state,))
  np.testing.assert_allclose(found.params["z"], state.params["z"], rtol=1e-6)


def test_an_optimizer_with_a_key_draws_like_compiled_commits():
  tx = optax.chain(optax.add_noise(0.5, 0.5, 0), optax.sgd(0.25))
  found = train_alone(create(store(2, "mean"), tx=tx), STEP, 4, XS[0])
  one = fs.Strategy(devices=jax.devices()[:1])
  state = create(fs.AGN(2, "mean"), tx=tx, strategy=one)
  for _ in range(4):
    state = one.run(lambda s: STEP(s, XS[0]), args=(state,))
  np.testing.assert_allclose(found.params["w"], state.params["w"], rtol=1e-6)
  assert np.abs(found.params["w"] - PARAMS["w"] + 0.25).max() > 0.01


def test_arguments_that_cannot_work():
  with pytest.raises(ValueError, match=r"fragments=3 must be at most .* 2"):
    create(store(8, fragments=3))
  fp8 = {"params": PARAMS, fp8_ops.OVERWRITE_WITH_GRADIENT: {"scale": ONES}}
  with pytest.raises(ValueError, match="fp8"):
    center_workers.Workers([create(store(2), params=fp8)], STEP)


def test_steps_that_are_not_committed():
  state = create(store(2, "mean"))
  for _ in range(2):
    state = STEP(state, XS)
  with pytest.warns(UserWarning, match="agn.* the last 2 "):
    plain = state.without_wrappers()
  assert_trees_equal(plain.params, PARAMS)
  state = train_alone(create(store(4, "mean", fragments=2)), STEP, 5, XS)
  with pytest.warns(UserWarning, match="agn.* the last 3 "):
    state.without_wrappers()


# Workers that come later.


def test_a_worker_that_joins_has_the_center_and_its_slots():
  wrapper = store(4, "mean", fragments=2)
  create_one = lambda: create(wrapper, tx=optax.adam(0.1))
  directory = center_workers.new_directory()
  with center_workers.Workers([create_one()], STEP, directory) as group:
    for _ in range(8):
      group.step([XS])
    [wanted] = group.settle()
  with fs.Worker(directory, 0, 1) as worker:
    state = worker.start(create_one())
    assert (worker.clock, worker.missed_steps) == (8, 8)
  tree_equality.assert_trees_equal(
    (state.params, state.opt_state), (wanted.params, wanted.opt_state)
  )
  own = agn(state)
  assert_trees_equal(own.local_params, wanted.params)
  assert (int(own.local_step), int(state.step)) == (8, 8)
  assert int(own.local_opt_state[0].count) == 8
