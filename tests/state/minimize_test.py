"""`minimize` with var_list, grad_loss and aggregation; held steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quadratic_states import create
from quadratic_states import make_params
from quadratic_states import quadratic

import flaxshard as fs

WRAPPERS = [
  pytest.param((), id="bare"),
  pytest.param((fs.LossScale(8.0),), id="loss_scale"),
  pytest.param((fs.AGN(1),), id="agn"),
  pytest.param((fs.EMA(0.5), fs.Accumulate(1)), id="ema accumulate"),
]


# var_list.


@pytest.mark.parametrize("wrappers", WRAPPERS)
def test_others_keep_values_and_slots(wrappers):
  state = create(wrappers, tx=optax.adamw(0.1))
  before = state
  for _ in range(2):
    state, loss = state.minimize(quadratic, var_list=["^b/"])
  assert float(loss) < float(quadratic(before.params))
  np.testing.assert_array_equal(state.params["w"], make_params()["w"])
  np.testing.assert_array_equal(state.get_slot("w", "v"), [0, 0])
  assert float(state.get_slot("b/c", "v")) > 0
  assert int(state.step) == 2


def test_others_are_not_differentiated():
  @jax.custom_vjp
  def identity(x):
    return x

  def backward(_, cotangent):
    raise AssertionError("differentiated")

  identity.defvjp(lambda x: (x, None), backward)
  loss_fn = lambda p: identity(p["w"]).sum() + p["b"]["c"]
  _, grads = create().value_and_grad(loss_fn, var_list=["b/c"])
  assert grads["w"] is None and float(grads["b"]["c"]) == 1


def test_path_selects_one_parameter_and_pattern_several():
  params = {"a": jnp.ones(()), "ab": jnp.ones(()), "c": jnp.ones(())}
  state = create(params=params)
  loss_fn = lambda p: p["a"] + p["ab"] + p["c"]

  def selected(var_list):
    pairs = state.compute_gradients(loss_fn, var_list=var_list)
    return [path for g, path in pairs if g is not None]

  assert selected(["a"]) == ["a"]
  assert selected(["a.*"]) == ["a", "ab"]
  assert selected(("b$", "c")) == ["ab", "c"]


# grad_loss.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("wrappers", WRAPPERS)
def test_cotangent_of_an_array(wrappers, dtype):
  state = create(wrappers)
  cotangent = np.array([1.0, -3.0], np.float32)
  loss_fn = lambda p: (p["w"] ** 2).astype(dtype)
  loss, grads = state.value_and_grad(loss_fn, grad_loss=cotangent)
  np.testing.assert_array_equal(loss, [1, 4])
  assert loss.dtype == dtype
  np.testing.assert_allclose(grads["w"], 2 * make_params()["w"] * cotangent)
  new, loss = state.minimize(loss_fn, grad_loss=cotangent)
  assert loss.shape == (2,)
  np.testing.assert_allclose(new.params["w"], [0, -8])


def test_line_search_minimizes_the_weighted_sum():
  state = create(tx=optax.lbfgs())
  weights = jnp.array([0.5, 2.0])
  loss_fn = lambda p: (p["w"] - 3) ** 2
  step = jax.jit(lambda s: s.minimize(loss_fn, grad_loss=weights))
  for _ in range(5):
    state, loss = step(state)
  np.testing.assert_allclose(state.params["w"], [3, 3], atol=1e-3)
  assert loss.shape == (2,)


# aggregation.


@pytest.mark.parametrize(
  "wrappers",
  [
    (),
    (fs.LossScale("dynamic"),),
    (fs.Accumulate(1, per_replica=True),),
  ],
  ids=str,
)
def test_reduction_over_replicas(wrappers):
  strategy = fs.Strategy()
  n = strategy.num_replicas_in_sync
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.zeros(())},
    tx=optax.sgd(1.0),
    wrappers=wrappers,
    strategy=strategy,
  )
  x = strategy.shard_batch(np.arange(float(n), dtype=np.float32))

  def step(state, x):
    loss_fn = lambda p: p["w"] * x.sum()
    return [
      state.minimize(loss_fn, aggregation=aggregation)[0].params["w"]
      for aggregation in (None, "mean", "sum")
    ]

  got = strategy.run(step, args=(state, x))
  total = n * (n - 1) / 2
  wanted = [-total / n, -total / n, -total]
  assert [float(strategy.reduce("mean", w, axis=None)) for w in got] == wanted


LBFGS = {"tx": optax.lbfgs()}


@pytest.mark.parametrize(
  ("create_args", "args", "error", "facts"),
  [
    ({}, {"var_list": []}, ValueError, ["at least one"]),
    ({}, {"var_list": "kernel"}, TypeError, ["sequence", "kernel"]),
    ({}, {"var_list": [1]}, TypeError, ["var_list[0]", "1"]),
    ({}, {"var_list": ["w", "b/d"]}, ValueError, ["'b/d'", "b/c"]),
    (LBFGS, {"var_list": ["w"]}, ValueError, ["value_fn", "freeze"]),
    ({}, {"grad_loss": jnp.ones(3)}, ValueError, ["()", "(3,)"]),
    ({}, {"aggregation": "avg"}, ValueError, ["aggregation", "avg"]),
    (LBFGS, {"aggregation": "sum"}, ValueError, ["grad and value_fn"]),
    (
      {"wrappers": (fs.CrossShard("sum"),)},
      {"aggregation": "sum"},
      ValueError,
      ["cross_shard", "sum"],
    ),
    ({}, {"gate_gradients": "grpah"}, ValueError, ["'graph'"]),
    ({}, {"gate_gradients": 2}, TypeError, ["'graph'"]),
  ],
)
def test_mistakes(create_args, args, error, facts):
  with pytest.raises(error) as e:
    create(**create_args).minimize(quadratic, **args)
  assert all(fact in str(e.value) for fact in facts)


# step, which stands for TensorFlow's global_step.


@pytest.mark.parametrize(
  ("wrappers", "steps"),
  [
    ((), [1, 2, 3, 4]),
    # An overflow in the second step.
    ((fs.LossScale("dynamic"),), [1, 1, 2, 3]),
    # A fixed scale skips nothing.
    ((fs.LossScale(8.0),), [1, 2, 3, 4]),
    # Three local steps, of which one is skipped.
    ((fs.LossScale("dynamic"), fs.AGN(2)), [1, 1, 2, 3]),
    # An update for two batches; the second has no finite gradients.
    ((fs.LossScale("dynamic"), fs.Accumulate(2)), [0, 0, 1, 1]),
  ],
  ids=str,
)
def test_step_counts_updates(wrappers, steps):
  state = create(wrappers)
  got = []
  for factor in (1.0, np.inf, 1.0, 1.0):
    state, _ = state.minimize(quadratic, factor)
    got.append(int(state.step))
  assert got == steps
