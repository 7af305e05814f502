"""AGN, Accumulate and EMA with gradients of tables as rows."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tree_equality

import flaxshard as fs

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
ROWS, WIDTH, PER_REPLICA = 40, 4, 6
PARAMS = {
  "table": RNG.normal(size=(ROWS, WIDTH)).astype(np.float32),
  "w": RNG.normal(size=WIDTH).astype(np.float32),
}
SGD = optax.sgd(0.1)
ADAM = optax.adam(0.1)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


def sparse(tx, semantics="lazy"):
  return fs.sparse_rows(tx, ["table"], semantics)


@functools.cache
def strategy_of(replicas):
  return fs.Strategy(devices=jax.devices()[:replicas])


def make_batches(replicas, steps, size=PER_REPLICA):
  rng = np.random.default_rng(1)
  count = replicas * size
  return [
    {
      "ids": rng.integers(0, ROWS, count).astype(np.int32),
      "y": rng.normal(size=count).astype(np.float32),
    }
    for _ in range(steps)
  ]


def loss_fn(params, batch):
  predicted = params["table"][batch["ids"]] @ params["w"]
  return ((predicted - batch["y"]) ** 2).mean()


def step(state, batch):
  return state.minimize(loss_fn, batch)


def create(tx, wrappers, strategy=None, params=PARAMS):
  return fs.TrainState.create(
    apply_fn=None,
    params=jax.tree.map(jnp.array, params),
    tx=tx,
    wrappers=wrappers,
    strategy=strategy,
  )


def train(tx, wrappers, batches, replicas=1, state=None):
  strategy = strategy_of(replicas)
  state = state or create(tx, wrappers, strategy)
  run = strategy.jit(step)
  for batch in batches:
    state, _ = run(state, strategy.shard_batch(batch))
  return state


def leaves_without_touched(states):
  return jax.tree.leaves(
    {
      name: s._replace(touched=()) if hasattr(s, "touched") else s
      for name, s in states.items()
    }
  )


WRAPPERS = {
  "mean": fs.AGN(3, "mean"),
  "sequential": fs.AGN(3),
  "delta": fs.AGN(3, "sum", commit_delta=True, share_step_count=True),
  "sequential_delta": fs.AGN(3, commit_delta=True),
  "fragments": fs.AGN(4, "mean", fragments=2, delay=1, blend=0.5),
  "sequential_fragments": fs.AGN(4, fragments=2, delay=2),
  "accumulate": fs.Accumulate(3),
  "accumulate_per_replica": fs.Accumulate(3, per_replica=True),
  "ema": fs.EMA(0.5),
}
QUICK = ("mean",)


@pytest.mark.parametrize(
  "name, replicas",
  [
    pytest.param(name, 4, marks=() if name in QUICK else pytest.mark.slow)
    for name in WRAPPERS
  ]
  + [pytest.param("sequential", 1, marks=pytest.mark.slow)],
)
def test_rows_with_sgd_equal_whole_gradients(name, replicas):
  wrappers = [WRAPPERS[name]]
  batches = make_batches(replicas, 7)
  state = train(sparse(SGD), wrappers, batches, replicas)
  dense = train(SGD, wrappers, batches, replicas)
  # Center, local parameters and sums, in the middle of a period.
  for a, b in zip(
    jax.tree.leaves(state.params), jax.tree.leaves(dense.params), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
  for a, b in zip(
    leaves_without_touched(state.wrapper_states),
    leaves_without_touched(dense.wrapper_states),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
  if name == "ema":
    return
  touched = state.wrapper_states[wrappers[0].name].touched["table"]
  seen = np.split(
    batches[-1]["ids"], touched.shape[0] if touched.ndim > 1 else 1
  )
  for rows, ids in zip(np.atleast_2d(touched), seen, strict=True):
    assert np.flatnonzero(rows).tolist() == sorted(set(ids.tolist()))
  assert dense.wrapper_states[wrappers[0].name].touched == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean", "sequential", "delta"])
@pytest.mark.parametrize(
  "tx", [sparse(ADAM, "tf"), sparse(optax.MultiSteps(OUTER, 2))]
)
def test_updates_of_whole_tables_equal_a_dense_run(tx, name):
  batches = make_batches(4, 7)
  state = train(tx, [WRAPPERS[name]], batches, 4)
  dense = train(tx.inner, [WRAPPERS[name]], batches, 4)
  touched = state.wrapper_states["agn"].touched["table"]
  assert (touched is None) is (name != "mean")
  for get in (
    lambda s: s.params,
    lambda s: s.opt_state,
    lambda s: s.wrapper_states["agn"].local_params,
  ):
    for a, b in zip(
      jax.tree.leaves(get(state)), jax.tree.leaves(get(dense)), strict=True
    ):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_catch_up_of_decaying_tables_raises():
  tx = sparse(optax.chain(optax.add_decayed_weights(0.1), SGD), "catch_up")
  with pytest.raises(ValueError, match=r"AGN: table .*'catch_up'"):
    create(tx, [fs.AGN(2, "mean")])
  create(tx, [fs.Accumulate(2)])


@pytest.mark.slow
def test_sequential_commits_by_an_outer_optimizer_of_whole_tables():
  wrappers = [fs.AGN(3, outer_tx=OUTER)]
  batches = make_batches(4, 7)
  state = train(sparse(SGD), wrappers, batches, 4)
  dense = train(SGD, wrappers, batches, 4)
  assert state.wrapper_states["agn"].touched["table"] is None
  for a, b in zip(
    jax.tree.leaves(state.wrapper_states["agn"].local_params),
    jax.tree.leaves(dense.wrapper_states["agn"].local_params),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class LazyAdam:
  """Adam on the rows that have a gradient."""

  def __init__(self, params):
    self.params = {k: p.astype(np.float64) for k, p in params.items()}
    self.m = {k: np.zeros_like(p) for k, p in self.params.items()}
    self.v = {k: np.zeros_like(p) for k, p in self.params.items()}
    self.count = 0

  def update(self, grads, rows):
    self.count += 1
    for k, g in grads.items():
      i = rows if k == "table" else slice(None)
      m, v, p = self.m[k], self.v[k], self.params[k]
      m[i] = 0.9 * m[i] + 0.1 * g[i]
      v[i] = 0.999 * v[i] + 0.001 * g[i] ** 2
      rate = 0.1 * np.sqrt(1 - 0.999**self.count) / (1 - 0.9**self.count)
      p[i] -= (
        rate * m[i] / (np.sqrt(v[i]) + 1e-8 * np.sqrt(1 - 0.999**self.count))
      )


def numpy_grads(params, ids, y):
  rows = params["table"][ids]
  error = 2 * (rows @ params["w"] - y) / len(y)
  table = np.zeros_like(params["table"])
  np.add.at(table, ids, error[:, None] * params["w"])
  return {"table": table, "w": error @ rows}


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["mean", "sequential"])
def test_lazy_adam_equals_a_numpy_reference(commit):
  replicas, period = 2, 2
  batches = make_batches(replicas, 5)
  center = LazyAdam(PARAMS)
  locals_ = [LazyAdam(PARAMS) for _ in range(replicas)]
  zeros = {k: np.zeros(p.shape) for k, p in PARAMS.items()}
  sums, used = [dict(zeros) for _ in locals_], [set() for _ in locals_]
  for n, batch in enumerate(batches, 1):
    for i, local in enumerate(locals_):
      part = slice(i * PER_REPLICA, (i + 1) * PER_REPLICA)
      ids, y = batch["ids"][part], batch["y"][part]
      grads = numpy_grads(local.params, ids, y)
      local.update(grads, sorted(set(ids.tolist())))
      sums[i] = {k: s + grads[k] / period for k, s in sums[i].items()}
      used[i] |= set(ids.tolist())
    if n % period:
      continue
    if commit == "mean":
      mean = {k: sum(s[k] for s in sums) / replicas for k in PARAMS}
      center.update(mean, sorted(set.union(*used)))
    for i, local in enumerate(locals_):
      if commit == "sequential":
        center.update(sums[i], sorted(used[i]))
      local.params = {k: p.copy() for k, p in center.params.items()}
    sums, used = [dict(zeros) for _ in locals_], [set() for _ in locals_]
  wrappers = [fs.AGN(period, commit)]
  state = train(sparse(ADAM), wrappers, batches, replicas)
  for k, p in center.params.items():
    np.testing.assert_allclose(state.params[k], p, rtol=2e-5, atol=1e-5)
  agn = state.wrapper_states["agn"]
  for i, local in enumerate(locals_):
    for k, p in local.params.items():
      np.testing.assert_allclose(
        agn.local_params[k][i], p, rtol=2e-5, atol=1e-5
      )


@pytest.mark.slow
def test_rows_of_accumulated_batches_equal_one_large_batch():
  batches = make_batches(1, 6)
  large = [
    {k: np.concatenate([b[k] for b in batches[i : i + 3]]) for k in batches[0]}
    for i in (0, 3)
  ]
  state = train(sparse(ADAM), [fs.Accumulate(3)], batches)
  expected = train(sparse(ADAM), [], large)
  for a, b in zip(
    jax.tree.leaves((state.params, state.opt_state)),
    jax.tree.leaves((expected.params, expected.opt_state)),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean", "accumulate"])
def test_an_overflow_in_one_row_adds_nothing(name):
  wrappers = [fs.LossScale("dynamic"), WRAPPERS[name]]
  good, bad = make_batches(2, 2)
  bad["y"][3] = np.inf
  before = train(sparse(SGD), wrappers, [good], 2)
  after = train(sparse(SGD), wrappers, [bad], 2, before)
  key = WRAPPERS[name].name
  tree_equality.assert_trees_equal(
    after.wrapper_states[key], before.wrapper_states[key]
  )
  assert int(after.wrapper_states["loss_scale"].skipped_steps) == 1


def test_rows_of_equal_numbers_are_summed_in_float32():
  params = {"table": jnp.zeros((1, 1), jnp.bfloat16)}
  # A sum in bfloat16 ends at 256.
  ones = jnp.ones((300, 1), jnp.bfloat16)
  rows = fs.IndexedSlices(jnp.zeros(300, jnp.int32), ones, (1, 1))
  state = create(sparse(optax.sgd(1.0)), [fs.Accumulate(1)], params=params)
  new = jax.jit(lambda state, rows: state.apply_gradients(grads=rows))(
    state, {"table": rows}
  )
  assert new.params["table"] == -300


@pytest.mark.slow
def test_rows_of_a_larger_batch_wait_for_the_next_commit():
  large, *small = make_batches(1, 1, size=20) + make_batches(1, 2, size=2)
  wrappers = [fs.AGN(2, "mean")]
  state = train(sparse(SGD), wrappers, [large, small[0]])
  agn = state.wrapper_states["agn"]
  all_rows = set(large["ids"].tolist()) | set(small[0]["ids"].tolist())
  # A commit of two steps with two rows each has four rows.
  assert int(agn.touched["table"].sum()) == len(all_rows) - 4
  assert f"{len(all_rows) - 4} rows" in wrappers[0].pending(agn)
  dense = train(SGD, wrappers, [large, small[0]])
  waiting = np.asarray(agn.touched["table"][0])
  np.testing.assert_allclose(
    state.params["table"][~waiting], dense.params["table"][~waiting], rtol=1e-6
  )
  np.testing.assert_array_equal(
    state.params["table"][waiting], PARAMS["table"][waiting]
  )


@pytest.mark.slow
def test_a_table_without_a_gradient_in_the_step_of_a_commit_is_committed():
  batch = make_batches(1, 1)[0]
  state = create(sparse(SGD), [fs.AGN(2, "mean")])
  dense = create(SGD, [fs.AGN(2, "mean")])

  def two_steps(state):
    state, _ = state.minimize(loss_fn, batch)
    grads = {"table": None, "w": jnp.ones(WIDTH)}
    return state.apply_gradients(grads=grads)

  state, dense = jax.jit(two_steps)(state), jax.jit(two_steps)(dense)
  np.testing.assert_allclose(
    state.params["table"], dense.params["table"], rtol=1e-6
  )
  assert np.any(state.params["table"] != PARAMS["table"])
  assert not np.any(state.wrapper_states["agn"].touched["table"])


@pytest.mark.slow
def test_outer_optimizer_of_whole_tables_warns_and_equals_a_dense_run():
  wrappers = [fs.AGN(3, "mean", outer_tx=OUTER, commit_delta=True)]
  batches = make_batches(2, 7)
  with pytest.warns(UserWarning) as caught:
    state = train(sparse(SGD), wrappers, batches, 2)
  (warning,) = caught
  assert "outer_tx" in str(warning.message)
  dense = train(SGD, wrappers, batches, 2)
  np.testing.assert_allclose(
    state.params["table"], dense.params["table"], rtol=1e-6, atol=1e-6
  )


@pytest.mark.slow
def test_outer_optimizer_of_rows_leaves_the_others():
  wrappers = [fs.AGN(2, "mean", outer_tx=sparse(OUTER), commit_delta=True)]
  batches = make_batches(2, 4)
  state = train(sparse(ADAM), wrappers, batches, 2)
  used = np.isin(np.arange(ROWS), [batch["ids"] for batch in batches])
  is_changed = np.any(state.params["table"] != PARAMS["table"], axis=1)
  assert is_changed.tolist() == used.tolist() and not used.all()


@pytest.mark.slow
def test_run_steps_equals_single_steps():
  strategy = strategy_of(2)
  wrappers = [fs.AGN(2, "mean")]
  batches = make_batches(2, 4)
  single = train(sparse(ADAM), wrappers, batches, 2)
  state, _ = strategy.run_steps(
    step,
    create(sparse(ADAM), wrappers, strategy),
    [strategy.shard_batch(batch) for batch in batches],
  )
  for a, b in zip(
    jax.tree.leaves(state.params), jax.tree.leaves(single.params), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@dataclasses.dataclass(frozen=True)
class Sign(fs.wrappers.Base):
  """Maps over all leaves, as a wrapper that knows no rows."""

  def apply(self, state, target, grads, next):
    return next(target, jax.tree.map(jnp.sign, grads)), state


@dataclasses.dataclass(frozen=True)
class RowSign(fs.wrappers.Base):
  takes_indexed_slices = True

  def apply(self, state, target, grads, next):
    is_rows = fs.is_indexed_slices
    signs = jax.tree.map(
      lambda g: g.map_values(jnp.sign) if is_rows(g) else jnp.sign(g),
      grads,
      is_leaf=is_rows,
    )
    return next(target, signs), state


@dataclasses.dataclass(frozen=True)
class Halve(fs.wrappers.Base):
  """Multiplies all leaves, as a wrapper that knows no rows."""

  def unscale_gradients(self, state, grads):
    return jax.tree.map(
      lambda g: g // 2 if g.dtype == "int32" else g / 2, grads
    )


class HalveAndAverage(Halve, fs.EMA):
  """Inherits the attribute with another `unscale_gradients`."""

  name = "halve"


class Watch(fs.wrappers.Base):
  """Overrides neither of the methods that get gradients."""


def test_a_custom_wrapper_gets_whole_gradients_and_a_warning():
  batch = make_batches(1, 1)[0]
  with pytest.warns(UserWarning, match=r"'sign'.*table.*takes_indexed_slices"):
    state, _ = step(create(sparse(SGD), [Sign()]), batch)
  dense, _ = step(create(SGD, [Sign()]), batch)
  tree_equality.assert_trees_equal(state.params, dense.params)


@pytest.mark.parametrize("cls", [Halve, HalveAndAverage])
def test_a_custom_unscaling_gets_whole_gradients_and_a_warning(cls):
  batch = make_batches(1, 1)[0]
  with pytest.warns(UserWarning, match=r"'halve': unscale_gradients"):
    _, grads = create(sparse(SGD), [cls()]).value_and_grad(loss_fn, batch)
  _, dense = create(SGD, [cls()]).value_and_grad(loss_fn, batch)
  tree_equality.assert_trees_equal(grads, dense)


@pytest.mark.parametrize("wrapper", [RowSign(), Watch()])
def test_a_custom_wrapper_that_takes_rows_gets_rows(wrapper):
  batch = make_batches(1, 1)[0]
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    # Momentum moves the other rows if the gradient is a whole array.
    tx = optax.chain(optax.trace(0.9), optax.sgd(0.1))
    state, _ = step(create(sparse(tx), [wrapper]), batch)
    unused = np.flatnonzero(~np.isin(np.arange(ROWS), batch["ids"]))
    trace = jax.tree.map(lambda x: x.at[...].set(1), state.opt_state)
    new, _ = step(state.replace(opt_state=trace), batch)
  np.testing.assert_array_equal(
    new.params["table"][unused, :], PARAMS["table"][unused, :]
  )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean", "sequential"])
def test_tables_that_are_split_by_rows(name):
  strategy = fs.Strategy(
    devices=jax.devices()[:4], mesh_shape={"replica": 2, "model": 2}
  )
  split = jax.sharding.NamedSharding(strategy.mesh, jax.P("model"))
  params = {**PARAMS, "table": jax.device_put(PARAMS["table"], split)}
  batches = make_batches(2, 4)
  state = fs.TrainState.create(
    apply_fn=None,
    params=params,
    tx=sparse(ADAM),
    wrappers=[WRAPPERS[name]],
    strategy=strategy,
  )
  run = strategy.jit(step)
  for batch in batches:
    state, _ = run(state, strategy.shard_batch(batch))
  whole = train(sparse(ADAM), [WRAPPERS[name]], batches, 2)
  agn, other = state.wrapper_states["agn"], whole.wrapper_states["agn"]
  assert agn.grad_accum["table"].sharding.spec == jax.P("replica", "model")
  for a, b in zip(
    jax.tree.leaves((state.params, agn)),
    jax.tree.leaves((whole.params, other)),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
