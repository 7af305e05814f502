"""The compiled step of AGN with fragments: bytes of each commit, memory."""

import functools
import itertools

import compilations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard import compiled
from flaxshard.compiled import executions
from flaxshard.compiled import find as find_lib
from flaxshard.compiled import hlo

SIZE = 64
PARAMS = {
  f"layer{i}": {
    "w": np.eye(SIZE, dtype=np.float32),
    "b": np.zeros(SIZE, np.float32),
  }
  for i in range(4)
}
BYTES = 4 * sum(p.size for p in jax.tree.leaves(PARAMS))


def loss_fn(params, x):
  for layer in params.values():
    x = jnp.tanh(x @ layer["w"] + layer["b"])
  return (x**2).mean()


def step(state, x):
  return state.minimize(loss_fn, x)


STRATEGY = fs.Strategy()
RUN = STRATEGY.jit(step, donate_argnums=0)


def create(*wrappers, tx=None):
  return fs.TrainState.create(
    apply_fn=None,
    params=PARAMS,
    tx=tx or optax.adam(1e-2),
    wrappers=wrappers,
    strategy=STRATEGY,
  )


@functools.cache
def compile_step(*wrappers, clip=False):
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
  state = create(*wrappers, tx=tx if clip else None)
  x = STRATEGY.shard_batch(np.ones((16, SIZE), np.float32))
  return RUN.lower(state, x).compile()


def commit_bytes(program):
  """Returns the bytes of the collectives' operands, by conditional."""
  program = hlo.parse(program)
  commits = executions.find_commits(program)
  found = {}
  for item in find_lib.find(program):
    [name] = [name for name, _ in item.site.branches if name in commits]
    nbytes = sum(array.nbytes for array in item.operands)
    found[name] = found.get(name, 0) + nbytes * item.site.executions
  return sorted(found.values())


@pytest.mark.filterwarnings("ignore:AGN. communication_period")
@pytest.mark.parametrize(
  ("kwargs", "clip"),
  [
    ({"commit": "mean"}, False),
    pytest.param(
      {"commit": "mean", "delay": 2, "blend": 0.5},
      False,
      marks=pytest.mark.slow,
    ),
    pytest.param(
      {"commit": "mean", "commit_dtype": "int8"}, False, marks=pytest.mark.slow
    ),
    pytest.param({"commit": "sequential"}, False, marks=pytest.mark.slow),
    pytest.param(
      {"commit": "sequential", "delay": 1}, True, marks=pytest.mark.slow
    ),
  ],
)
def test_a_commit_of_a_fragment_has_its_part_of_the_bytes(kwargs, clip):
  [whole] = commit_bytes(compile_step(fs.AGN(8, **kwargs), clip=clip))
  parts = commit_bytes(
    compile_step(fs.AGN(8, fragments=4, **kwargs), clip=clip)
  )
  assert len(parts) == 4
  assert sum(parts) == pytest.approx(whole, rel=0.01)
  assert parts[-1] == pytest.approx(whole / 4, rel=0.02)
  if kwargs == {"commit": "mean"}:
    assert (whole, parts) == (BYTES, [BYTES / 4] * 4)


@pytest.mark.slow
def test_fragments_and_delay_take_no_temporary_memory():
  plain = compile_step(fs.AGN(8, "mean")).memory_analysis()
  for wrapper in (
    fs.AGN(8, "mean", fragments=4),
    fs.AGN(8, "mean", fragments=4, delay=2, blend=0.5),
  ):
    stats = compile_step(wrapper).memory_analysis()
    assert stats.temp_size_in_bytes < plain.temp_size_in_bytes + BYTES / 4
    more = stats.argument_size_in_bytes - plain.argument_size_in_bytes
    assert more < 100
    assert stats.alias_size_in_bytes > 7 * BYTES


@pytest.mark.slow
def test_a_sequential_delay_keeps_one_more_copy_of_the_parameters():
  plain = compile_step(fs.AGN(8)).memory_analysis()
  delayed = compile_step(fs.AGN(8, delay=2)).memory_analysis()
  more = delayed.argument_size_in_bytes - plain.argument_size_in_bytes
  assert BYTES <= more < BYTES + 100


@pytest.mark.slow
def test_steps_and_commits_of_fragments_compile_once():
  state = create(
    fs.LossScale("dynamic"), fs.AGN(4, "mean", fragments=2, delay=1)
  )
  x = STRATEGY.shard_batch(np.ones((16, SIZE), np.float32))
  state, _ = RUN(state, x)
  with compilations.count() as compiled_steps:
    for _ in range(8):
      state, _ = RUN(state, x)
  assert compiled_steps.total == 0
  assert int(state.wrapper_states["agn"].commits) == 4


@pytest.mark.slow
def test_each_commit_of_a_fragment_counts_once_in_a_period():
  period = 8
  for kwargs in ({"delay": 2}, {"commit_dtype": "int8"}):
    wrappers = [
      fs.AGN(period, "mean", **kwargs),
      fs.AGN(period, "mean", fragments=4, **kwargs),
    ]
    traffic = [
      compiled.collectives(compile_step(w), STRATEGY.mesh) for w in wrappers
    ]
    assert all(c.in_commit for c in itertools.chain(*traffic))
    plain, fragments = (
      sum(c.operand_bytes * c.executions_per_step(period) for c in found)
      for found in traffic
    )
    assert fragments == pytest.approx(plain, rel=0.01)
    assert len(traffic[1]) == 4 * len(traffic[0])


@pytest.mark.slow
def test_a_plan_counts_fragments_as_the_plain_commit():
  plans = []
  for wrapper in (fs.AGN(8, "mean"), fs.AGN(8, "mean", fragments=4)):
    x = STRATEGY.shard_batch(jax.ShapeDtypeStruct((16, SIZE), jnp.float32))
    state = fs.TrainState.create(
      apply_fn=None,
      params=PARAMS,
      tx=optax.adam(1e-2),
      wrappers=[wrapper],
      strategy=STRATEGY,
    )
    plans.append(fs.plan(RUN, state, x))
  sent = [
    sum(c.link_bytes * c.executions_per_step(plan.period) for c in plan.traffic)
    for plan in plans
  ]
  assert plans[1].period == 8
  assert sent == [2 * 7 / 8 * BYTES / 8] * 2
  # The reads and writes of commits are divided by the period, too.
  hbm = [plan.cost.hbm_bytes for plan in plans]
  assert hbm[1] == pytest.approx(hbm[0], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["mean", "sequential"])
def test_fragments_of_logical_devices_equal_those_of_whole_replicas(commit):
  states = []
  for strategy in (
    fs.Strategy(mesh_shape={"replica": 4, "model": 2}),
    fs.Strategy(devices=jax.devices()[:4]),
  ):
    specs = {"w": jax.P(), "b": jax.P()}
    if not states:
      specs = {"w": jax.P(None, "model"), "b": jax.P("model")}
    params = jax.tree_util.tree_map_with_path(
      lambda path, x, specs=specs, mesh=strategy.mesh: jax.device_put(
        x, jax.sharding.NamedSharding(mesh, specs[path[-1].key])
      ),
      PARAMS,
    )
    state = fs.TrainState.create(
      apply_fn=None,
      params=params,
      tx=optax.adam(1e-2),
      wrappers=[fs.AGN(4, commit, fragments=4, delay=2, blend=0.5)],
      strategy=strategy,
    )
    run = strategy.jit(step, donate_argnums=0)
    x = np.random.default_rng(0).normal(size=(16, SIZE)).astype(np.float32)
    for _ in range(7):
      state, _ = run(state, strategy.shard_batch(x))
    states.append(state)
  own, whole = (s.wrapper_states["agn"] for s in states)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    (states[0].params, own.local_params, own.sent),
    (states[1].params, whole.local_params, whole.sent),
  )
  if commit == "sequential":
    spec = own.sent["params"]["layer1"]["w"].sharding.spec
    assert spec == jax.P("replica", None, "model")
