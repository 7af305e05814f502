"""AGN with unusual parameters, gradients and optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs

P = jax.sharding.PartitionSpec
FOUR = fs.Strategy(devices=jax.devices()[:4])
SPLIT = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
COMMITS = pytest.mark.parametrize("commit", ["sequential", "mean"])

pytestmark = pytest.mark.filterwarnings("ignore:AGN. communication_period")


def create(params, tx, *wrappers, strategy=FOUR):
  return fs.TrainState.create(
    apply_fn=None, params=params, tx=tx, wrappers=wrappers, strategy=strategy
  )


def apply_step(state, grads):
  return state.apply_gradients(grads=grads)


def apply(state, grads, strategy=FOUR):
  return strategy.run(apply_step, args=(state, grads))


def agn(state):
  return state.wrapper_states["agn"]


def put(x, *spec):
  return jax.device_put(x, jax.sharding.NamedSharding(SPLIT.mesh, P(*spec)))


ONES = np.ones(2, np.float32)


@COMMITS
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
  state = create(params, tx, fs.AGN(3, commit=commit))

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
  params = {"a": ONES, "b": ONES, "never": ONES}
  state = create(params, tx, wrapper)
  state = apply(state, {"a": ONES, "b": ONES, "never": None})
  local = 1 - 0.25 * 1.5
  np.testing.assert_array_equal(agn(state).local_params["b"], local)
  state = apply(state, {"a": ONES, "b": None, "never": None})
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
  w = np.ones((8, 8), np.float32)
  state = create({"w": put(w, None, "model")}, tx, fs.AGN(1), strategy=SPLIT)
  state = apply(state, {"w": jnp.zeros((8, 8))}, SPLIT)
  np.testing.assert_allclose(state.params["w"], 0.5**4)


def test_trees_with_empty_leaves_and_containers():
  params = {
    "w": np.ones(4, np.float32),
    "none": None,
    "empty": np.ones((3, 0), np.float32),
    "tuple": (np.ones(1, np.float32), {}),
  }
  state = create(params, optax.adam(0.25), fs.AGN(1))
  grads = jax.tree.map(jnp.ones_like, params)
  new = apply(state, grads)
  assert jax.tree.structure(new.params) == jax.tree.structure(params)
  for leaf in (new.params["w"], new.params["tuple"][0]):
    np.testing.assert_allclose(leaf, 1 - 0.25 * 4, atol=1e-4)
