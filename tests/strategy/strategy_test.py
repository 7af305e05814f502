"""Strategy: training on any number of replicas equals one device; errors."""

import re

import jax
import numpy as np
import pytest
from regression import batch
from regression import create
from regression import loss_fn
from regression import sharded
from regression import split
from regression import train_step
from tree_equality import assert_trees_close

import flaxshard as fs

P = jax.sharding.PartitionSpec
Explicit = jax.sharding.AxisType.Explicit

STRATEGIES = {
  "1": fs.Strategy(devices=jax.devices()[:1]),
  "2": fs.Strategy(devices=jax.devices()[:2]),
  "4": fs.Strategy(devices=jax.devices()[:4]),
  "8": fs.Strategy(),
  "2x4": fs.Strategy(mesh_shape={"replica": 2, "model": 4}),
  "1x8": fs.Strategy(mesh_shape={"replica": 1, "model": 8}),
  "explicit": fs.Strategy(
    mesh_shape={"replica": 2, "model": 4}, axis_type=Explicit
  ),
}
EIGHT = STRATEGIES["8"]
DYNAMIC = (fs.LossScale("dynamic"),)
WHO = lambda: fs.get_replica_context().replica_id_in_sync_group


@pytest.fixture(scope="module")
def wanted():
  """Three steps on one device."""
  state, losses = create(wrappers=DYNAMIC), []
  step = jax.jit(train_step)
  for i in range(3):
    state, loss = step(state, batch(i))
    losses.append(float(loss))
  return state, losses


def assert_trained(state, wanted):
  assert_trees_close(
    (state.step, state.params, state.opt_state),
    (wanted.step, wanted.params, wanted.opt_state),
  )


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
  ("name", "step"),
  [
    ("1", train_step),
    ("explicit", train_step),
    ("8", step_without_aggregation),
    ("2x4", step_with_reduced_loss),
    ("4", jax.jit(train_step)),
  ],
)
def test_run_equals_one_device(name, step, wanted):
  strategy = STRATEGIES[name]
  # Compiled without a replica context, the same function averages nothing.
  if name == "4":
    step(create(wrappers=DYNAMIC), batch(0))
  state = create(strategy, DYNAMIC)
  losses = []
  for i in range(3):
    state, loss = strategy.run(step, args=(state, sharded(strategy, i)))
    assert isinstance(loss, fs.PerReplica)
    losses.append(float(strategy.reduce("mean", loss)))
  assert_trained(state, wanted[0])
  np.testing.assert_allclose(losses, wanted[1], rtol=1e-5)


def test_global_view_equals_one_device(wanted):
  strategy = STRATEGIES["2x4"]
  state, step = create(strategy, DYNAMIC), jax.jit(train_step)
  for i in range(3):
    state, _ = jax.block_until_ready(step(state, sharded(strategy, i)))
  assert_trained(state, wanted[0])


@pytest.mark.parametrize(
  ("name", "spec"),
  [
    ("2x4", P(("replica", "model"))),
    ("explicit", P("model", "replica")),
  ],
)
def test_sharded_state_equals_one_device_and_stays_sharded(name, spec, wanted):
  strategy = STRATEGIES[name]
  state = split(create(strategy, DYNAMIC), strategy.mesh, spec)
  step = strategy.jit(train_step, donate_argnums=0)
  for i in range(3):
    state, _ = step(state, sharded(strategy, i))
  assert_trained(state, wanted[0])
  for matrix in (state.params["w1"], state.opt_state[0].nu["w1"]):
    where = jax.sharding.NamedSharding(strategy.mesh, spec)
    assert matrix.sharding.is_equivalent_to(where, 2)


@pytest.mark.parametrize("step", [train_step, step_without_aggregation])
def test_nonfinite_gradient_of_one_replica_skips_the_step_of_all(step):
  state = create(EIGHT, DYNAMIC)
  new, losses = EIGHT.run(step, args=(state, sharded(EIGHT, 0, bad=5)))
  assert_trees_close((new.step, new.params), (state.step, state.params), 0, 0)
  assert_trees_close(new.opt_state, state.opt_state, 0, 0)
  assert float(new.wrapper_states["loss_scale"].scale) == 2.0**14
  # Examples 4 and 5 are those of replica 2.
  finite = np.isfinite(np.asarray(losses))
  assert finite.tolist() == [i != 2 for i in range(8)]


@pytest.mark.parametrize(
  ("step", "wanted"),
  [
    # Gradients are one all-reduce, and the finite flag is none.
    (train_step, [["f32[8,8]", "f32[8]"]]),
    (step_without_aggregation, [["f32[8,8]", "f32[8]"], ["s32[]"]]),
  ],
)
def test_all_reduces(step, wanted):
  args = create(EIGHT, DYNAMIC), sharded(EIGHT, 0)
  text = EIGHT.jit(step).lower(*args).compile().as_text()
  found = re.findall(r"= (\(.*\)|\S+) all-reduce(?:-start)?\(", text)
  types = [sorted(re.findall(r"\w+\[[\d,]*\]", x)) for x in found]
  assert sorted(types) == wanted


def test_reversed_devices():
  reverse = fs.Strategy(devices=jax.devices()[::-1])
  assert reverse.mesh.devices.tolist() == jax.devices()[::-1]
  results = reverse.local_results(reverse.run(WHO))
  assert [int(x) for x in results] == list(range(8))
  assert [x.devices() for x in results] == [{d} for d in jax.devices()[::-1]]
  # What is the same everywhere comes along; a batch does not.
  state, _ = reverse.run(train_step, args=(create(EIGHT), sharded(reverse, 0)))
  assert int(state.step) == 1
  with pytest.raises(ValueError, match="argument 1/x"):
    reverse.run(train_step, args=(state, sharded(EIGHT, 0)))
