"""The surface of `tf.train.Optimizer`: minimize, pairs, slots, gating."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quadratic_states import create
from quadratic_states import make_params
from quadratic_states import quadratic
from tree_equality import assert_trees_equal

import flaxshard as fs

RATE = 0.1
W = make_params()["w"]
WRAPPERS = [
  pytest.param((), id="bare"),
  pytest.param((fs.LossScale("dynamic"),), id="loss_scale"),
  pytest.param((fs.AGN(2),), id="agn"),
  pytest.param((fs.EMA(0.5), fs.Accumulate(2)), id="ema accumulate"),
]


# Pairs of gradients and paths.


@pytest.mark.parametrize("wrappers", WRAPPERS)
def test_pairs_are_applied_as_minimize_does(wrappers):
  state = wanted = create(wrappers, tx=optax.adam(0.1))
  for _ in range(2):
    pairs = state.compute_gradients(quadratic, 2.0)
    assert [path for _, path in pairs] == ["b/c", "w"]
    state = state.apply_gradients(pairs)
    wanted, _ = wanted.minimize(quadratic, 2.0)
  assert_trees_equal(state, wanted)


@pytest.mark.parametrize("wrappers", WRAPPERS)
def test_parameters_without_a_pair_keep_values_and_slots(wrappers):
  state = create(wrappers, tx=optax.adam(0.1))
  # Two steps: AGN and Accumulate update at the second.
  for pairs in ([(jnp.ones(()), "b/c")], [(jnp.ones(()), "b/c"), (None, "w")]):
    state = state.apply_gradients(iter(pairs))
  np.testing.assert_array_equal(state.params["w"], W)
  np.testing.assert_array_equal(state.get_slot("w", "m"), [0, 0])
  assert float(state.params["b"]["c"]) < 0.5
  assert float(state.get_slot("b/c", "m")) > 0


def test_aux_and_var_list():
  pairs, aux = create().compute_gradients(
    lambda p: (quadratic(p), 7), has_aux=True, var_list=["w"]
  )
  [(gradient, path)] = pairs
  assert (aux, path) == (7, "w")
  np.testing.assert_array_equal(gradient, 2 * W)


# var_list, grad_loss and aggregation.


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize(
  "wrappers", [(), (fs.LossScale(8.0),), (fs.AGN(1),), (fs.Accumulate(1),)]
)
def test_cotangent_of_an_array(wrappers, dtype):
  state = create(wrappers)
  cotangent = np.array([1.0, -3.0], np.float32)
  loss_fn = lambda p: (p["w"] ** 2).astype(dtype)
  loss, grads = state.value_and_grad(loss_fn, grad_loss=cotangent)
  np.testing.assert_array_equal(loss, [1, 4])
  assert loss.dtype == dtype
  np.testing.assert_allclose(grads["w"], 2 * W * cotangent)
  new, loss = state.minimize(loss_fn, grad_loss=cotangent)
  assert loss.shape == (2,)
  np.testing.assert_allclose(new.params["w"], [0, -8])


@pytest.mark.parametrize(
  "wrappers",
  [(), (fs.LossScale("dynamic"),), (fs.Accumulate(1, per_replica=True),)],
)
def test_reduction_over_replicas(wrappers):
  strategy = fs.Strategy()
  n = strategy.num_replicas_in_sync
  params = {"w": jnp.zeros(())}
  state = create(wrappers, params=params, tx=optax.sgd(1.0), strategy=strategy)
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


# Slots.

SLOTS = [
  (optax.sgd(RATE), []),
  (optax.sgd(RATE, momentum=0.9), ["momentum"]),
  (optax.adam(RATE), ["m", "v"]),
  (optax.amsgrad(RATE), ["m", "v", "vhat"]),
  (optax.rmsprop(RATE), ["rms"]),
  (optax.rmsprop(RATE, momentum=0.0), ["momentum", "rms"]),
  (optax.rmsprop(RATE, centered=True), ["mg", "rms"]),
  (optax.adagrad(RATE), ["accumulator"]),
  (optax.adadelta(RATE), ["accum", "accum_update"]),
  (optax.adafactor(RATE), ["v", "v_col", "v_row"]),
  (optax.inject_hyperparams(optax.adam)(RATE), ["m", "v"]),
  (optax.MultiSteps(optax.adam(RATE), 2), ["acc_grads", "m", "v"]),
  (optax.masked(optax.trace(0.9), {"w": True, "b": False}), ["momentum"]),
  (
    optax.chain(optax.trace(0.9), optax.clip(1.0), optax.trace(0.5)),
    ["0/momentum", "2/momentum"],
  ),
  (fs.freeze(optax.adam(RATE), ["^b/"]), ["m", "v"]),
  (fs.scale_learning_rates(optax.adam(RATE), [("^b/", 2.0)]), ["m", "v"]),
  (fs.optimizers.ftrl(RATE), ["accum", "linear"]),
  (
    fs.optimizers.adagrad_da(RATE),
    ["gradient_accumulator", "gradient_squared_accumulator"],
  ),
]


@pytest.mark.parametrize(("tx", "names"), SLOTS)
def test_names_of_slots(tx, names):
  state = create(tx=tx)
  assert state.get_slot_names() == names
  for name in names:
    slot = state.get_slot("w", name)
    assert slot.shape[-1:] in ((2,), (1,))  # (1,): Adafactor without factors
    found = [x for x in state.variables().values() if x is slot]
    assert len(found) == 1


def test_values_by_any_name():
  state = create(tx=optax.adam(RATE, b1=0.75, b2=0.5))
  state, _ = jax.jit(lambda s: s.minimize(quadratic))(state)
  for name in ("m", "mu", "0/m", "0/mu"):
    np.testing.assert_allclose(state.get_slot("w", name), 0.25 * 2 * W)
  np.testing.assert_allclose(state.get_slot("w", "v"), 0.5 * (2 * W) ** 2)
  assert list(state.variables()) == [
    "opt_state/0/count",
    "opt_state/0/mu/b/c",
    "opt_state/0/mu/w",
    "opt_state/0/nu/b/c",
    "opt_state/0/nu/w",
  ]


def test_parameters_of_different_optimizers():
  tx = optax.partition(
    {"slow": optax.adam(RATE), "fast": optax.sgd(RATE, momentum=0.9)},
    {"w": "slow", "b": {"c": "fast"}},
  )
  state = create(tx=tx)
  assert state.get_slot_names() == ["m", "momentum", "v"]
  assert state.get_slot("w", "m").shape == (2,)
  assert state.get_slot("b/c", "m") is None
  assert state.get_slot("w", "momentum") is None


def test_the_path_of_a_slot_is_a_string():
  state = create(params=[W, W], tx=optax.adam(0.1))
  assert state.get_slot("0", "m").shape == W.shape
  with pytest.raises(ValueError, match="parameter=0 matches no parameter"):
    state.get_slot(0, "m")


def test_slots_of_wrappers():
  state = create(
    tx=optax.sgd(RATE, momentum=0.9),
    wrappers=[fs.LossScale("dynamic"), fs.AGN(2)],
  )
  own = ["agn/grad_accum", "agn/local_params", "agn/momentum"]
  assert state.get_slot_names() == [*own, "momentum"]
  state, _ = jax.jit(lambda s: s.minimize(quadratic))(state)
  # The center has its first update at the commit; replicas have an axis.
  np.testing.assert_array_equal(state.get_slot("w", "momentum"), [0, 0])
  for name in ("agn/momentum", "agn/local_opt_state/0/trace", own[0]):
    np.testing.assert_allclose(state.get_slot("w", name), 2 * W[None])
  variables = state.variables()
  assert int(variables["wrapper_states/agn/local_step"]) == 1
  assert "wrapper_states/loss_scale/scale" in variables
  leaves = jax.tree.leaves((state.opt_state, dict(state.wrapper_states)))
  assert len(variables) == len(leaves)


# `gate_gradients`: optimization barriers behind the gradients.

LAYERS = {
  "layer0": {"kernel": jnp.eye(3), "bias": jnp.ones(3)},
  "layer1": {"kernel": jnp.eye(3), "bias": jnp.ones(3)},
  "head": jnp.ones(3),
}
X = jnp.arange(6.0).reshape(2, 3)


def layers_loss(params, x, dtype=jnp.float32):
  for name in ("layer0", "layer1"):
    layer = jax.tree.map(lambda p: p.astype(dtype), params[name])
    x = jnp.tanh(x.astype(dtype) @ layer["kernel"] + layer["bias"])
  return (x.astype(jnp.float32) @ params["head"]).mean()


def barriers(fn, *args):
  """Returns the dtypes of the operands of each barrier in a program."""
  return [
    [x.aval.dtype.name for x in eqn.invars]
    for eqn in jax.make_jaxpr(fn)(*args).eqns
    if eqn.primitive.name == "optimization_barrier"
  ]


@pytest.mark.parametrize("wrappers", [(), (fs.LossScale("dynamic"),)])
def test_gated_gradients_have_the_same_values_and_pass_in_16_bits(wrappers):
  state = create(params=LAYERS, tx=optax.sgd(0.1), wrappers=wrappers)

  def steps(state, x):
    return [
      state.minimize(layers_loss, x, jnp.bfloat16, gate_gradients=mode)
      for mode in ("none", "op", "graph")
    ]

  wanted, *others = jax.jit(steps)(state, X)
  for other in others:
    # CPU: the compiler drops the barriers before it optimizes.
    jax.tree.map(np.testing.assert_array_equal, other, wanted)
  # Of "op" and of "graph"; sorted by path, the head computes in float32.
  found = barriers(steps, state, X)
  assert found.count(["float32", *["bfloat16"] * 4]) == 2


def test_list_of_layers_is_a_tree():
  params = [(jnp.ones(2), jnp.ones(())), (jnp.ones(2), jnp.ones(()))]
  state = create(params=params, tx=optax.sgd(1.0))
  new = state.apply_gradients(grads=params)
  assert float(sum(p.sum() for p in jax.tree.leaves(new.params))) == 0
  new = state.apply_gradients([(jnp.ones(2), "1/0")])
  assert [float(p.sum()) for p in jax.tree.leaves(new.params)] == [2, 1, 0, 1]


def test_computed_rows():
  params = {"table": jnp.ones((4, 2)), "w": jnp.ones(2)}
  state = create(
    params=params, tx=fs.sparse_rows(optax.sgd(1.0, momentum=0.5), ["table"])
  )
  loss_fn = lambda p, ids: (p["table"][ids] * p["w"]).sum()

  @jax.jit
  def step(state, ids):
    [(slices, path)] = pairs = state.compute_gradients(
      loss_fn, ids, var_list=["table"], gate_gradients="graph"
    )
    assert fs.is_indexed_slices(slices) and path == "table"
    return state.apply_gradients(pairs)

  new = step(state, jnp.array([1, 3, 3]))
  np.testing.assert_array_equal(new.params["table"][:, 0], [1, 0, 1, -1])
  np.testing.assert_array_equal(new.params["w"], [1, 1])
  slot = new.get_slot("table", "momentum")
  np.testing.assert_array_equal(slot[:, 0], [0, 1, 0, 2])


def test_line_search_minimizes_the_weighted_sum():
  state = create(tx=optax.lbfgs())
  weights = jnp.array([0.5, 2.0])
  loss_fn = lambda p: (p["w"] - 3) ** 2
  step = jax.jit(lambda s: s.minimize(loss_fn, grad_loss=weights))
  for _ in range(5):
    state, loss = step(state)
  np.testing.assert_allclose(state.params["w"], [3, 3], atol=1e-3)
  assert loss.shape == (2,)
