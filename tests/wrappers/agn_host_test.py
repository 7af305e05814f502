"""AGN with transport="host": local steps in one process, and commits."""

import functools

import flax.linen as nn
from flax.linen import fp8_ops
import host_workers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.state import host_commits

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
HOST = functools.partial(fs.AGN, transport="host")
SCALE = fs.DynamicLossScale(8.0, growth_interval=2)


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


def run_one(state, step, steps, *args):
  """One worker alone."""
  workers = host_workers.Workers(lambda: state, 1, step)
  for _ in range(steps):
    workers.step(*([x] for x in args))
  return workers


def assert_trees_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


# Within one process.


@pytest.mark.parametrize("view", ["run", "global"])
def test_replicas_of_a_process_take_one_step_together(view):
  alone = run_one(create(HOST(2, "mean")), STEP, 5, XS).states[0]
  step = FOUR.jit(train_step) if view == "run" else STEP
  workers = run_one(
    create(HOST(2, "mean"), strategy=FOUR), step, 5, FOUR.shard_batch(XS)
  )
  state = workers.states[0]
  assert_trees_equal(alone, state)
  assert agn(state).local_params["w"].shape == (2, 4)
  assert {x.sharding.spec for x in jax.tree.leaves(state)} == {P()}
  assert int(agn(state).commits) == 2
  # The mean over the batch: 1.875 a step, in two periods.
  first = PARAMS["b"] - 0.25 * 1.875
  second = first - 0.25 * (1.875 + 0.5 * 1.875)
  assert float(state.params["b"]) == second


@pytest.mark.parametrize("commit", ["mean", "sequential"])
def test_parameters_that_are_split_within_a_process_stay_split(commit):
  w = jax.device_put(
    PARAMS["w"], jax.sharding.NamedSharding(SPLIT.mesh, P(None, "model"))
  )
  state = create(HOST(2, commit), params={**PARAMS, "w": w}, strategy=SPLIT)
  shardings = jax.tree.map(lambda x: x.sharding, state)
  x = SPLIT.shard_batch(XS)
  state = run_one(state, SPLIT.jit(train_step), 4, x).states[0]
  whole = run_one(create(HOST(2, commit)), STEP, 4, XS).states[0]
  assert_trees_equal(state.params, whole.params)
  assert_trees_equal(agn(state), agn(whole))
  assert agn(state).grad_accum["w"].sharding.spec == P(None, "model")
  assert jax.tree.map(lambda x: x.sharding, state) == shardings


def test_state_is_donated_and_never_shared():
  wrapper = HOST(1, "mean", outer_tx=MOMENTUM)
  state = create(wrapper)
  step = jax.jit(train_step, donate_argnums=0)
  for _ in range(2):
    state = step(state, XS)
    state, commit = host_workers.take(state, (0,))
    state = host_workers.apply_mean(state, (0,), jax.device_get(commit))
    state = host_workers.replace_params(state, {"b": np.float32(2)})
    center = jax.device_get(host_commits.center_of(state))
    state = host_commits.with_center(state, center, restart=True)
  assert float(step(state, XS).params["b"]) == 2


# Beside other wrappers.


@pytest.mark.parametrize("scale_first", [True, False])
def test_a_skipped_step_is_no_local_step(scale_first):
  wrappers = [fs.LossScale(SCALE), HOST(2, "mean")]
  state = create(*(wrappers if scale_first else wrappers[::-1]))
  assert host_commits.is_splittable(state) == scale_first
  good = np.float32(1)
  workers = host_workers.Workers(lambda: state, 2, STEP)
  workers.step([good, good])
  before = workers.states[0]
  after = STEP(before, np.float32(np.inf))
  assert_trees_equal((before.params, agn(before)), (after.params, agn(after)))
  assert float(after.wrapper_states["loss_scale"].scale) == 4.0
  workers.step([good, good])
  for state in workers.states:
    assert float(state.params["b"]) == 0.25
    assert int(agn(state).commits) == 1


def test_loss_scale_inside_skips_a_commit_that_is_not_finite():
  state = create(HOST(1, "mean"), fs.LossScale(SCALE))
  state = STEP(state, XS)
  state, commit = host_workers.take(state, (0,))
  commit = {k: np.full_like(x, np.nan) for k, x in commit.items()}
  commit["@received"] = np.ones(2, np.float32)
  state = host_workers.apply_mean(state, (0,), commit)
  assert_trees_equal(state.params, PARAMS)


def test_ema_outside_averages_the_center_of_each_step():
  workers = host_workers.Workers(
    lambda: create(fs.EMA(0.5), HOST(2, "mean")), 2, STEP
  )
  average, weight = 0.0, 0.0
  for _ in range(5):
    # A step sees the center of the last commit.
    center = float(workers.states[0].params["b"])
    average, weight = 0.5 * average + 0.5 * center, 0.5 * weight + 0.5
    workers.step([XS[0], XS[1]])
    for state in workers.states:
      np.testing.assert_allclose(
        state.eval_params["b"], average / weight, rtol=1e-6
      )


@pytest.mark.parametrize("per_replica", [False, True])
def test_accumulate_outside(per_replica):
  wrappers = fs.Accumulate(2, per_replica=per_replica), HOST(2, "mean")
  state = create(*wrappers, strategy=FOUR)
  step, x = FOUR.jit(train_step), FOUR.shard_batch(XS)
  for _ in range(5):
    state = step(state, x)
  assert int(host_commits.local_step(state)) == 2
  np.testing.assert_array_equal(agn(state).grad_accum["b"], 2 * 1.875)


@pytest.mark.parametrize(
  ("wrappers", "message"),
  [
    ([HOST(2), fs.EMA()], r"EMA must be outside of 'agn'"),
    ([HOST(2), fs.Accumulate(2)], r"Accumulate must be outside of 'agn'"),
    ([HOST(2), fs.CrossShard()], r"Put 'cross_shard' first"),
    (
      [fs.CrossShard("mean", ((0, 1), (2, 3))), HOST(2)],
      r"equal replicas within a process: 'cross_shard'",
    ),
  ],
)
def test_order_of_wrappers(wrappers, message):
  with pytest.raises(ValueError, match=message):
    create(*wrappers)


def test_cross_shard_outside():
  state = create(fs.CrossShard("sum"), HOST(2, "mean"), strategy=FOUR)
  state = FOUR.jit(train_step)(state, FOUR.shard_batch(XS))
  assert float(agn(state).grad_accum["b"]) == 7.5


def test_nnx_optimizer_raises():
  from flax import nnx

  model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match=r"AGN\(transport='host'\) needs a Tra"):
    fs.nnx.Optimizer(model, MOMENTUM, wrt=nnx.Param, wrappers=[HOST(2)])


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
  state = create(
    HOST(2, commit),
    strategy=strategy,
    stats={"mean": np.zeros((), np.float32)},
  )
  workers = host_workers.Workers(lambda: jax.tree.map(jnp.copy, state), 2, step)
  xs = [strategy.shard_batch(XS[:2]), strategy.shard_batch(XS[2:])]
  own, committed = np.zeros(2), np.zeros(2)
  for i in range(1, 4):
    workers.step(xs)
    own = 0.5 * own + 0.5 * np.array([0.75, 3.0])
    if i == 2:
      own = np.full(2, own.mean()) if commit == "sum" else own
      committed = own
    for k, state in enumerate(workers.states):
      assert float(agn(state).collections["stats"]["mean"]) == own[k]
      # Without `run` the field of the state is that of the worker.
      wanted = committed if view == "run" else own
      assert float(state.stats["mean"]) == wanted[k]
  if commit == "sequential":
    # Those of the last worker that has committed.
    assert float(workers.center().collections["stats/mean"]) == committed[1]


def test_lora_commits_its_factors_alone():
  state = fs.create_train_state(
    nn.Dense(4),
    jax.random.key(0),
    np.ones((2, 8), np.float32),
    MOMENTUM,
    lora=fs.LoRA(rank=2, patterns=("kernel",)),
    wrappers=[HOST(2, "mean")],
  )
  _, commit = host_commits.take(state, (0,))
  assert sorted(commit) == ["@received", "kernel/lora_a", "kernel/lora_b"]


def test_a_collection_like_a_parameter_raises():
  state = create(HOST(1), params={"stats": {"w": ONES}}, stats={"w": ONES})
  with pytest.raises(ValueError, match=r"no parameter may have .*'stats/w'"):
    host_commits.take(state, (0,))


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
  step = jax.jit(lambda state: state.minimize(loss, var_list=["w", "zero"])[0])
  workers = run_one(create(HOST(2, commit), tx=tx, params=params), step, 2)
  center = workers.center()
  for name in ("other", "frozen", "count"):
    np.testing.assert_array_equal(center.params[name], params[name])
  # A gradient of zeros is a gradient: its weight decays.
  np.testing.assert_array_equal(center.params["zero"], [0.75] * 3)
  assert float(center.params["w"][0]) < 0.5
  # Had one earlier in the period.
  both = jax.jit(lambda state: state.minimize(loss)[0])
  state = workers.states[0]
  for step_fn in (both, step):
    state = step_fn(state)
  _, commit = host_commits.take(state, (0,))
  assert commit["other"].tolist() == [1.0] * 3
  # In the order of the leaves: other, w, zero.
  assert commit["@received"].tolist() == [1.0] * 3


@pytest.mark.slow
def test_complex_parameters():
  params = {"z": np.array([1 + 1j, 2 - 1j], np.complex64)}
  loss = lambda p, x: (p["z"] * x).real.sum() ** 2
  step = jax.jit(lambda state, x: state.minimize(loss, x)[0])
  workers = run_one(create(HOST(2, "mean"), params=params), step, 2, 1 + 2j)
  strategy = fs.Strategy(devices=jax.devices()[:1])
  state = create(fs.AGN(2, "mean"), params=params, strategy=strategy)
  for _ in range(2):
    state = strategy.run(lambda s: step(s, 1 + 2j), args=(state,))
  np.testing.assert_allclose(
    workers.states[0].params["z"], state.params["z"], rtol=1e-6
  )
  _, commit = host_commits.take(step(workers.states[0], 1 + 2j), (0,))
  assert commit["z"].shape == (2, 2)
  assert commit["z"].dtype == np.float32


def test_statistics_of_fp8_layers_are_replaced_by_the_largest():
  params = {
    "params": {"w": np.ones(2, np.float32)},
    fp8_ops.OVERWRITE_WITH_GRADIENT: {"scale": np.ones(1, np.float32)},
  }
  owg = fp8_ops.OVERWRITE_WITH_GRADIENT

  @jax.jit
  def step(state, x):
    grads = {
      "params": {"w": jnp.ones(2)},
      owg: {"scale": jnp.full(1, x)},
    }
    return state.apply_gradients(grads=grads)

  workers = host_workers.Workers(
    lambda: create(HOST(2, "sum"), params=params), 2, step
  )
  assert host_commits.reductions(workers.states[0], (0,)) == {
    "@received": "max",
    f"{owg}/scale": "max",
    "params/w": "sum",
  }
  for x in (2.0, 3.0):
    workers.step([np.float32(x), np.float32(4 * x)])
  for state in workers.states:
    assert float(state.params[owg]["scale"][0]) == 12.0
    assert float(agn(state).local_params[owg]["scale"][0]) == 12.0
    np.testing.assert_array_equal(state.params["params"]["w"], 0.5)


def test_slots_beside_statistics_stay_without_a_gradient():
  owg = fp8_ops.OVERWRITE_WITH_GRADIENT
  params = {"params": {"v": ONES, "w": ONES}, owg: {"scale": ONES}}
  state = create(HOST(1, "mean"), params=params)
  for v in (ONES, None):
    grads = {"params": {"v": v, "w": ONES}, owg: {"scale": jnp.ones(2)}}
    state = state.apply_gradients(grads=grads)
    state, commit = host_workers.take(state, (0,))
    state = host_workers.apply_mean(state, (0,), jax.device_get(commit))
  trace = state.opt_state[0].trace
  np.testing.assert_array_equal(trace["v"], ONES)
  np.testing.assert_array_equal(trace["w"], 1.5 * ONES)


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["mean", "sequential"])
def test_tables_are_committed_whole_and_updated_by_rows(commit):
  rng = np.random.default_rng(0)
  params = {"table": rng.normal(size=(12, 3)).astype(np.float32)}
  tx = fs.sparse_rows(optax.adam(0.1), ["table"])
  loss = lambda p, ids: (p["table"][ids] ** 2).sum()
  step = lambda state, ids: state.minimize(loss, ids)[0]
  strategy = fs.Strategy(devices=jax.devices()[:2])
  compiled = create(fs.AGN(2, commit), tx=tx, params=params, strategy=strategy)
  workers = host_workers.Workers(
    lambda: create(HOST(2, commit), tx=tx, params=params), 2, jax.jit(step)
  )
  run = strategy.jit(step)
  for i in range(4):
    ids = rng.integers(0, 6 + i, (2, 3)).astype(np.int32)
    compiled = run(compiled, strategy.shard_batch(ids.ravel()))
    workers.step(ids)
  center = workers.center()
  np.testing.assert_allclose(
    center.params["table"], compiled.params["table"], rtol=1e-5, atol=1e-6
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    center.opt_state,
    compiled.opt_state,
  )
  np.testing.assert_array_equal(center.params["table"][9:], params["table"][9:])
  assert not agn(workers.states[0]).touched["table"].any()


def test_arguments_that_cannot_work():
  with pytest.raises(ValueError, match=r"tx needs value in every update"):
    create(HOST(2), tx=optax.polyak_sgd())
  create(HOST(2, outer_tx=MOMENTUM, commit_delta=True), tx=optax.polyak_sgd())
  with jax.enable_x64():
    with pytest.raises(ValueError, match=r"params\[w\] is float64"):
      create(HOST(2), params={"w": jnp.ones(2, jnp.float64)})
  with pytest.raises(ValueError, match=r"must have an AGN .*\['ema'\]"):
    host_commits.local_step(create(fs.EMA()))
  state = create(HOST(2, "mean"))
  with pytest.raises(ValueError, match=r"reduced must have .*'@received'"):
    host_commits.apply_mean(state, (0,), {"b": 0.0, "w": PARAMS["w"]})
  with pytest.raises(ValueError, match=r"params: 'c' is unknown.* b, w"):
    host_commits.replace_params(state, {"c": 0.0})
  with pytest.raises(ValueError, match=r"'@received' is missing"):
    host_commits.update_center(
      state, host_commits.center_of(state), (0,), {"b": np.float32(0)}
    )


# What a user sees.


def test_steps_that_are_not_committed():
  state = create(HOST(2, "mean"))
  for _ in range(2):
    state = STEP(state, XS)
  with pytest.warns(UserWarning, match=r"none of the 2 local .*worker.commit"):
    plain = state.without_wrappers()
  assert_trees_equal(plain.params, PARAMS)
  workers = run_one(create(HOST(2, "mean")), STEP, 3, XS)
  with pytest.warns(UserWarning, match=r"the last 1 local steps of this proc"):
    workers.states[0].without_wrappers()


def test_uncommitted_steps_of_fragments():
  wrapper = HOST(4, "mean", fragments=2)
  state = run_one(create(wrapper), STEP, 5, XS).states[0]
  with pytest.warns(UserWarning, match=r"of fragments 0 to 1 the last 3, 1 "):
    state.without_wrappers()


def test_a_commit_that_was_not_made_comes_back():
  state = STEP(create(HOST(2, "mean")), XS)
  new, commit = host_commits.take(state, (0,))
  assert float(agn(new).grad_accum["b"]) == 0
  assert not agn(new).received.any()
  back = host_commits.add_to_accumulators(new, jax.device_get(commit))
  assert_trees_equal(agn(back), agn(state))


def test_a_worker_that_joins():
  wrapper = HOST(4, "mean", share_step_count=True)
  tx = optax.adam(0.1)
  workers = run_one(create(wrapper, tx=tx), STEP, 6, XS)
  center = jax.device_get(host_commits.center_of(workers.states[0]))
  state = host_commits.with_center(
    create(wrapper, tx=tx), center, restart=True, local_step=np.int32(6)
  )
  own = agn(state)
  assert_trees_equal(own.local_params, center.params)
  assert (int(own.local_step), int(state.step), int(own.commits)) == (6, 6, 1)
  # As that of the other: 5 after the commit, and two steps.
  assert int(own.local_opt_state[0].count) == 7
  assert int(agn(workers.states[0]).local_opt_state[0].count) == 7
  # It comes back with slots of its own, eight steps later.
  old = workers.states[0]
  new = host_commits.with_center(
    old, center, restart=True, local_step=14, keep_slots=True
  )
  assert_trees_equal(
    agn(new).local_opt_state[0].mu, agn(old).local_opt_state[0].mu
  )
  assert int(new.step) == 14
  assert not agn(new).received.any()


def test_parts_of_the_center():
  state = create(HOST(2), tx=optax.adam(0.1), stats={"m": np.ones(1)})
  center = host_commits.center_of(state)
  part = host_commits.get_part(center, ["w"])
  assert sorted(part) == [
    "commits",
    "opt_state/0/count",
    "opt_state/0/mu/w",
    "opt_state/0/nu/w",
    "params/w",
  ]
  assert "collections/stats/m" in host_commits.get_part(center, ["stats/m"])
  new = host_commits.put_part(
    center, {"params/w": -PARAMS["w"], "commits": np.int32(3)}
  )
  np.testing.assert_array_equal(new.params["w"], -PARAMS["w"])
  assert int(new.commits) == 3
  assert new.params["b"] is center.params["b"]
  with pytest.raises(ValueError, match=r"part: 'params/c' is unknown"):
    host_commits.put_part(center, {"params/c": 0})


@pytest.mark.parametrize(
  ("tx", "expected"),
  [
    (optax.adamw(0.1), True),
    (optax.lamb(0.1), True),
    (optax.adafactor(0.1), True),
    (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), False),
    (optax.apply_if_finite(optax.sgd(0.1), 3), False),
    (optax.MultiSteps(optax.adam(0.1), 2), True),
  ],
  ids=["adamw", "lamb", "adafactor", "clip", "finite", "multi_steps"],
)
def test_splittable_optimizers(tx, expected):
  assert host_commits.is_splittable(create(HOST(2), tx=tx)) == expected


def test_quantized_keys():
  state = create(HOST(2, commit_dtype="int8"), stats={"m": np.ones(1)})
  assert host_commits.quantized_keys(state, (0,)) == {"w"}
  assert host_commits.quantized_keys(create(HOST(2)), (0,)) == frozenset()
