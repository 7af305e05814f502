"""The check of which programs give every replica the same TrainState.

A step puts the results of a program into its state: `run` refuses what may
differ between the replicas, and says why.
"""

import compilations
import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest
import quadratic_states

import flaxshard as fs

P = jax.sharding.PartitionSpec

STRATEGY = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
WHOLE = fs.Strategy(devices=jax.devices()[:4])
GROUPS, ACROSS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
RING = [(i, (i + 1) % 4) for i in range(4)]
# What all replicas share, and a batch, which is split.
X = np.arange(1.0, 5.0, dtype=np.float32)
Y = np.linspace(0.1, 1.0, 16, dtype=np.float32)

mean = lambda tree: jax.lax.pmean(tree, "replica")
replica_id = lambda: jax.lax.axis_index("replica")
send = lambda tree, to=RING: jax.lax.ppermute(tree, "replica", to)
grouped = lambda tree, groups=GROUPS: jax.lax.psum(
  tree, "replica", axis_index_groups=groups
)
on_device = STRATEGY.on_logical_device


def new_state(wrappers=()):
  return quadratic_states.create(wrappers, params=X)


STATE = new_state()
GROUP_STATE = new_state([fs.CrossShard(group_assignment=GROUPS)])


def step_of(fn):
  """Returns a step that takes the results of `fn(shared, own)` as params."""
  return lambda state, y: state.replace(params=fn(state.params, y))


def trace(fn, state=STATE):
  STRATEGY.jit(step_of(fn)).trace(state, STRATEGY.shard_batch(Y))


def refused(fn, state=STATE):
  """Returns the leaves of the state that may differ, each with its cause."""
  with pytest.raises(ValueError, match="may differ") as e:
    trace(fn, state)
  return str(e.value).partition("named: ")[2].partition(". state")[0]


@jax.custom_vjp
def double(x):
  return 2 * x


double.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def counted(x, goes_on):
  return jax.lax.while_loop(goes_on, lambda c: (c[0] + 1, c[1]), (0, x))[0]


def total(x, y, reduce=lambda z: z):
  add = lambda c, row: (c + reduce(row * y).sum(), None)
  return jax.lax.scan(add, 0.0, x)[0]


def root(x):
  return jax.lax.custom_root(
    lambda r: r * r - x.sum(),
    1.0,
    lambda f, r: jax.lax.fori_loop(0, 9, lambda _, r: r - f(r) / (2 * r), r),
    lambda g, y: y / g(1.0),
  )


def kernel_call(x, compute):
  def kernel(x_ref, out_ref):
    out_ref[...] = compute(x_ref[...])

  shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)


def write_to_ref_in_loop(x, value):
  ref = jax.new_ref(x)

  def add(i, _):
    ref[...] += value

  jax.lax.fori_loop(0, 3, add, None)
  return ref[...]


REPLICATED = {
  "shared": lambda x, y: jnp.sort(x) * 2 + jnp.arange(4),
  "pmean": lambda x, y: x + mean(y),
  "all_gather": lambda x, y: jax.lax.all_gather(y, "replica").sum(0),
  "scan": lambda x, y: total(x, y, mean),
  "while": lambda x, y: counted(mean(y), lambda c: c[0] < c[1].sum()),
  "cond": lambda x, y: jax.lax.cond(
    mean(y).sum() > 0, lambda: x, lambda: mean(y)
  ),
  "remat": lambda x, y: mean(
    jax.grad(jax.checkpoint(lambda x: jnp.sin(x * y).sum()))(x)
  ),
  "custom_vjp": lambda x, y: double(mean(jax.nn.relu(y))),
  "logical device": lambda x, y: mean(on_device(1, jnp.sin, y)),
  "root": lambda x, y: root(x),
  "groups of a replicated value": lambda x, y: grouped(x),
  "groups, then across them": lambda x, y: grouped(grouped(y), ACROSS),
  "shard_map": lambda x, y: jax.shard_map(
    lambda z: mean(jax.lax.psum(z, "model")),
    in_specs=P("model"),
    out_specs=P(),
    axis_names={"model"},
  )(y),
  "pallas_call": lambda x, y: kernel_call(mean(y), jnp.sin),
}

# These do not run on CPU devices, or are the same by the user's word alone.
ASSUMED = {
  "pbroadcast": lambda x, y: jax.lax.pbroadcast(y, ("replica",), 2),
  "pure_callback": lambda x, y: jax.pure_callback(np.sin, x, x),
  "assumed": lambda x, y: fs.get_replica_context().assume_replicated(y) + x,
}

OWN_DATA = {
  "own": lambda x, y: y,
  "axis_index": lambda x, y: replica_id(),
  "random": lambda x, y: jax.random.normal(
    jax.random.fold_in(jax.random.key(0), replica_id()), (4,)
  ),
  "scan": lambda x, y: total(x, y),
  "as often as own": lambda x, y: counted(y, lambda c: c[0] < c[1].sum()),
  "cond": lambda x, y: jax.lax.cond(x[0] > 0, lambda: x, lambda: y),
  "cond on own": lambda x, y: jax.lax.cond(y[0] > 0, lambda: x, lambda: -x),
  # What is averaged in the loss is not averaged in its gradient.
  "gradient of a mean": lambda x, y: jax.grad(
    lambda x: mean(jnp.sin(x * y).sum())
  )(x),
  "logical device": lambda x, y: on_device(1, jnp.sin, y),
  "ref written in a loop": lambda x, y: write_to_ref_in_loop(x, y),
}

# By the name of the primitive that the error must name.
UNKNOWN = {
  "ppermute": lambda x, y: send(y),
  # A replica without a sender receives zeros.
  "ppermute, partial": lambda x, y: send(x, RING[:2]),
  "psum over axis_index_groups": lambda x, y: grouped(y),
  # In another order a sum may round differently.
  "psum over axis_index_groups, other order": lambda x, y: grouped(
    grouped(y, [[0, 3], [1, 2]])
  ),
  "reduce_scatter": lambda x, y: jax.lax.psum_scatter(y, "replica", tiled=True),
  "all_to_all": lambda x, y: jax.lax.all_to_all(x, "replica", 0, 0, tiled=True),
  "pure_callback": lambda x, y: jax.pure_callback(np.sin, y, y),
  "io_callback": lambda x, y: jax.experimental.io_callback(np.sin, x, x),
  "ffi_call": lambda x, y: jax.ffi.ffi_call(
    "some_kernel", jax.ShapeDtypeStruct((4,), jnp.float32)
  )(y),
  "pallas_call": lambda x, y: kernel_call(y, jnp.sin),
  "pallas_call, collective": lambda x, y: kernel_call(
    x, lambda x: x + replica_id()
  ),
  "rng_uniform": lambda x, y: jax.lax.rng_uniform(0.0, 1.0, (4,)),
}


@pytest.mark.parametrize("name", REPLICATED | ASSUMED)
def test_replicated_results_pass(name):
  trace((REPLICATED | ASSUMED)[name])


def run_all(strategy, programs):
  run = lambda x, y: {name: fn(x, y) for name, fn in programs.items()}
  return jax.device_get(strategy.run(run, args=(X, strategy.shard_batch(Y))))


@pytest.mark.slow
@pytest.mark.parametrize("programs", [REPLICATED, OWN_DATA])
def test_programs_have_these_results_also_on_split_replicas(programs):
  split = run_all(STRATEGY, programs)
  # All but those that need logical devices.
  rest = programs.keys() - {"logical device", "shard_map"}
  whole = run_all(WHOLE, {name: programs[name] for name in rest})
  for name in rest:
    np.testing.assert_allclose(split[name], whole[name], 1e-6, err_msg=name)
  for name in programs if programs is REPLICATED else ():
    rows = [np.asarray(split[name])[:1]] * 4
    np.testing.assert_array_equal(split[name], np.concatenate(rows), name)


@pytest.mark.parametrize("name", OWN_DATA)
def test_own_data_is_refused(name):
  assert refused(OWN_DATA[name]) == "params (a replica's own data)"


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_results_are_refused_by_the_name_of_the_primitive(name):
  primitive = name.partition(", ")[0]
  assert refused(UNKNOWN[name]) == f"params ({primitive})"


def test_each_leaf_is_followed_by_itself():
  own = lambda *leaves: ", ".join(
    f"params/{i} (a replica's own data)" for i in leaves
  )
  assert refused(lambda x, y: (y, x, y, mean(y))) == own(0, 2)
  barrier = jax.lax.optimization_barrier
  assert refused(lambda x, y: barrier((x, y))) == own(1)
  trace(lambda x, y: mean((x, y)))
  step = lambda c, row: ((c[0] + row, c[1] * 2), (row, c[1]))
  scan = lambda x, y: jax.tree.leaves(jax.lax.scan(step, (0.0, 1.0), y))
  assert refused(scan) == own(0, 2)
  # After three rounds all differ.
  shift = lambda c, x: ((c[1], c[2], x), None)
  shifted = lambda x, y: jax.lax.scan(shift, (jnp.zeros(()),) * 3, y)[0]
  assert refused(shifted) == own(0, 1, 2)


@pytest.mark.filterwarnings("ignore:CrossShard")
def test_groups_of_a_wrapper_may_differ_but_not_within():
  trace(lambda x, y: grouped(y), GROUP_STATE)
  # In groups that overlap, each replica adds the same numbers as its partner.
  trace(lambda x, y: grouped(grouped(y, [[0, 3], [1, 2]])), GROUP_STATE)
  assert refused(lambda x, y: y, GROUP_STATE).endswith("own data)")
  assert refused(lambda x, y: send(y), GROUP_STATE) == "params (ppermute)"
  # Another state, without groups, must be the same on all replicas.
  copy = lambda change: STRATEGY.jit(
    lambda student, teacher: teacher.replace(params=change(student.params))
  ).trace(GROUP_STATE, STATE)
  copy(mean)
  with pytest.raises(ValueError, match=r"params \(a replica's own data\)"):
    copy(lambda params: params)


def test_every_shape_is_checked_before_it_is_compiled():
  # With the second batch it is another program, of the same structure.
  run = STRATEGY.jit(step_of(lambda x, y: x + y.sum() if y.size > 1 else x))
  run(STATE, STRATEGY.shard_batch(np.ones(4)))
  batch = STRATEGY.shard_batch(np.ones(8))
  with compilations.count() as compiled, pytest.raises(ValueError):
    run(STATE, batch)
  assert compiled.total == 0
