"""Strategy: training on any number of replicas equals one device."""

import re

import compilations
import jax
import numpy as np
import optax
import pytest
from regression import batch
from regression import create
from regression import loss_fn
from regression import sharded
from regression import split
from regression import train_step
import sparse_states
from sparse_states import ADAGRAD
from tree_equality import assert_trees_close
from tree_equality import assert_trees_equal

import flaxshard as fs

P = jax.sharding.PartitionSpec

ONE, TWO, FOUR = (fs.Strategy(devices=jax.devices()[:n]) for n in (1, 2, 4))
SPLIT, EXPLICIT = (
  fs.Strategy(
    mesh_shape={"replica": 2, "model": 2},
    axis_type=axis_type,
    devices=jax.devices()[:4],
  )
  for axis_type in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
)
DYNAMIC = fs.LossScale("dynamic")

# No warning is due to a correct step.
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def wanted():
  """Three steps on one device."""
  state, losses = create(wrappers=[DYNAMIC]), []
  step = jax.jit(train_step)
  for i in range(3):
    state, loss = step(state, batch(i))
    losses.append(float(loss))
  return state, losses


# Different ways to write the step. All of them average gradients once.


def step_without_aggregation(state, batch):
  loss, grads = state.value_and_grad(loss_fn, batch)
  grads = fs.get_replica_context().all_reduce("mean", grads)
  state = state.apply_gradients(grads=grads, skip_gradients_aggregation=True)
  return state, loss


def step_with_reduced_loss(state, batch):
  def mean_loss(params):
    loss = loss_fn(params, batch)
    return fs.get_replica_context().all_reduce("mean", loss)

  return state.minimize(mean_loss)


@pytest.mark.filterwarnings("ignore:run. the gradients are already")
@pytest.mark.parametrize(
  ("strategy", "step"),
  [
    (ONE, train_step),
    (TWO, jax.jit(train_step)),
    (FOUR, step_without_aggregation),
    (SPLIT, step_with_reduced_loss),
  ],
)
def test_run_equals_one_device(strategy, step, wanted):
  # Compiled without a replica context, the same function averages nothing.
  if strategy is TWO:
    step(create(wrappers=[DYNAMIC]), batch(0))
  state, losses = create(strategy, [DYNAMIC]), []
  for i in range(3):
    state, loss = strategy.run(step, args=(state, sharded(strategy, i)))
    assert isinstance(loss, fs.PerReplica)
    losses.append(float(strategy.reduce("mean", loss)))
  assert_trees_close(state, wanted[0])
  np.testing.assert_allclose(losses, wanted[1], rtol=1e-5)


@pytest.mark.parametrize(
  ("strategy", "spec", "jit", "donate"),
  [
    (FOUR, None, FOUR.jit, 0),  # a state on one device
    (FOUR, P(None, "replica"), FOUR.jit, ()),
    (ONE, P("replica"), ONE.jit, 0),
    (SPLIT, P(("replica", "model")), SPLIT.jit, 0),
    (EXPLICIT, P("model", "replica"), EXPLICIT.jit, 0),
    (SPLIT, P(), jax.jit, 0),
  ],
)
def test_steps_on_any_sharding_equal_one_device_and_compile_once(
  strategy, spec, jit, donate, wanted
):
  first = state = create(wrappers=[DYNAMIC])
  if spec is not None:
    first = state = split(create(strategy, [DYNAMIC]), strategy.mesh, spec)
  traced = []

  def traced_step(*args):
    traced.append(args)
    return train_step(*args)

  step = jit(traced_step, donate_argnums=donate)
  state, _ = jax.block_until_ready(step(state, sharded(strategy, 0)))
  with compilations.count() as compiled:
    for i in (1, 2):
      before = state
      state, _ = jax.block_until_ready(step(state, sharded(strategy, i)))
      assert before.params["w1"].is_deleted() == (donate == 0)
  assert (len(traced), compiled.total) == (1, 0)
  assert_trees_close(state, wanted[0])
  for matrix in (state.params["w1"], state.opt_state[0].nu["w1"]):
    where = jax.sharding.NamedSharding(strategy.mesh, spec or P())
    assert matrix.sharding.is_equivalent_to(where, 2)
  if donate == 0 and jit is not jax.jit:
    # Also if it was not on the mesh: it shared its memory with one that was.
    with pytest.raises(ValueError, match="argument 0/step is deleted"):
      step(first, sharded(strategy, 0))


def sparse_state_and_batch():
  state = sparse_states.create(FOUR, ADAGRAD, [DYNAMIC])
  poison = np.zeros(sparse_states.BATCH, np.float32)
  poison[11] = np.inf
  return state, FOUR.shard_batch({**sparse_states.batch(0), "poison": poison})


def state_and_batch():
  return create(FOUR, [DYNAMIC]), sharded(FOUR, 0, bad=5)


@pytest.mark.parametrize(
  ("step", "make_arguments"),
  [
    (train_step, state_and_batch),
    (step_without_aggregation, state_and_batch),
    (sparse_states.step_with_poison, sparse_state_and_batch),
  ],
)
def test_nonfinite_gradient_of_one_replica_skips_the_step_of_all(
  step, make_arguments
):
  state, one = make_arguments()
  new, _ = FOUR.run(step, args=(state, one))
  assert new.metrics() == {"loss_scale": 2.0**14, "skipped_steps": 1}
  # On every device.
  for i in range(4):
    held = jax.tree.map(
      lambda x, i=i: x.addressable_shards[i].data,
      (new.step, new.params, new.opt_state),
    )
    assert_trees_equal(held, (state.step, state.params, state.opt_state))


def test_all_reduces():
  args = create(FOUR, [DYNAMIC]), sharded(FOUR, 0)
  # Gradients are one all-reduce, and the finite flag is none.
  for step, others in ((train_step, []), (step_without_aggregation, ["s32[]"])):
    text = FOUR.jit(step).lower(*args).compile().as_text()
    found = re.findall(r"= (\(.*\)|\S+) all-reduce(?:-start)?\(", text)
    types = [" ".join(sorted(re.findall(r"\w+\[[\d,]*\]", x))) for x in found]
    assert sorted(types) == ["f32[8,8] f32[8]", *others]


def test_reversed_devices():
  reverse = fs.Strategy(devices=jax.devices()[3::-1])
  number = lambda: fs.get_replica_context().replica_id_in_sync_group
  results = reverse.local_results(reverse.run(number))
  assert [int(x) for x in results] == list(range(4))
  assert [x.devices() for x in results] == [{d} for d in jax.devices()[3::-1]]
  # What is the same everywhere comes along.
  state, _ = reverse.run(train_step, args=(create(FOUR), sharded(reverse, 0)))
  assert int(state.step) == 1


# -- Row-sparse gradients.


def train_sparse(strategy, state, way):
  """Takes three steps."""
  batches = [strategy.shard_batch(sparse_states.batch(i)) for i in range(3)]
  step = sparse_states.train_step
  if way == "run_steps":
    return strategy.run_steps(step, state, batches)[0]
  step = (jax.jit if way == "jit" else strategy.jit)(step, donate_argnums=0)
  for one in batches:
    state, _ = step(state, one)
  return state


@pytest.mark.parametrize(
  ("way", "strategy", "spec", "wrappers", "tx"),
  [
    ("run", FOUR, P(), [], optax.adam(0.1)),
    ("run", SPLIT, P("model", None), [fs.CrossShard(), DYNAMIC], ADAGRAD),
    ("run_steps", SPLIT, P(None, "model"), [DYNAMIC], ADAGRAD),
    ("jit", FOUR, P("replica", None), [DYNAMIC], ADAGRAD),
  ],
)
def test_sparse_steps_equal_dense_steps_on_the_whole_batch(
  way, strategy, spec, wrappers, tx
):
  # "lazy" is equal where zero gradients change nothing.
  options = {"sparse_semantics": "lazy" if tx is ADAGRAD else "tf"}
  state = sparse_states.create(strategy, tx, wrappers, spec, **options)
  new = train_sparse(strategy, state, way)
  assert_trees_close(new.params, sparse_states.reference(tx, 3))
  where = jax.sharding.NamedSharding(strategy.mesh, spec)
  assert new.params["table"].sharding.is_equivalent_to(where, 2)


def test_gradient_of_a_table_that_explicit_axes_split_is_dense():
  state = sparse_states.create(EXPLICIT, ADAGRAD, [], P(None, "model"))
  with pytest.warns(UserWarning, match="'table' .* Explicit axes split"):
    new = train_sparse(EXPLICIT, state, "run")
  assert_trees_close(new.params, sparse_states.reference(ADAGRAD, 3))
