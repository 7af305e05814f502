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
DYNAMIC = fs.LossScale("dynamic")


# Pairs of gradients and paths.


@pytest.mark.parametrize(
  "wrappers", [(), (DYNAMIC,), (fs.AGN(2),), (fs.EMA(0.5), fs.Accumulate(2))]
)
def test_pairs_are_applied_as_minimize_does(wrappers):
  first = state = wanted = create(wrappers, tx=optax.adam(RATE))
  for _ in range(2):
    pairs = state.compute_gradients(quadratic, 2.0)
    assert [path for _, path in pairs] == ["b/c", "w"]
    state = state.apply_gradients(pairs)
    wanted, _ = wanted.minimize(quadratic, 2.0)
  assert_trees_equal(state, wanted)
  # Parameters without a pair keep their values and slots. Two steps: AGN and
  # Accumulate update at the second.
  state, pair = first, (jnp.ones(()), "b/c")
  for pairs in ([pair], [pair, (None, "w")]):
    state = state.apply_gradients(iter(pairs))
  np.testing.assert_array_equal(state.params["w"], W)
  np.testing.assert_array_equal(state.get_slot("w", "m"), [0, 0])
  assert float(state.params["b"]["c"]) < 0.5
  assert float(state.get_slot("b/c", "m")) > 0


def test_a_list_of_layers_is_a_tree():
  params = [(jnp.ones(2), jnp.ones(())), (jnp.ones(2), jnp.ones(()))]
  state = create(params=params, tx=optax.sgd(1.0, momentum=0.5))
  new = state.apply_gradients(grads=params)
  assert float(sum(p.sum() for p in jax.tree.leaves(new.params))) == 0
  new = state.apply_gradients([(jnp.ones(2), "1/0")])
  assert [float(p.sum()) for p in jax.tree.leaves(new.params)] == [2, 1, 0, 1]
  np.testing.assert_array_equal(new.get_slot("1/0", "momentum"), [1, 1])


def test_pairs_of_computed_rows():
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


# var_list, grad_loss, aggregation and gate_gradients.


def test_parameters_out_of_var_list_are_not_differentiated():
  @jax.custom_vjp
  def identity(x):
    return x

  def backward(_, cotangent):
    raise AssertionError("differentiated")

  identity.defvjp(lambda x: (x, None), backward)
  loss_fn = lambda p: (identity(p["w"]).sum() + p["b"]["c"], 7)
  options = dict(has_aux=True, var_list=["b/c"])
  (_, aux), grads = create().value_and_grad(loss_fn, **options)
  assert grads["w"] is None and float(grads["b"]["c"]) == 1 and aux == 7
  pairs, aux = create().compute_gradients(loss_fn, **options)
  assert [(float(g), path) for g, path in pairs] == [(1, "b/c")] and aux == 7


@pytest.mark.parametrize(
  ("wrappers", "dtype"),
  [
    ((), jnp.float32),
    ((fs.LossScale(8.0),), jnp.float16),
    ((fs.AGN(1),), jnp.float32),
  ],
)
def test_grad_loss_is_the_cotangent_of_an_array(wrappers, dtype):
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


def test_line_search_minimizes_the_weighted_sum():
  state = create(tx=optax.lbfgs())
  weights = jnp.array([0.5, 2.0])
  loss_fn = lambda p: (p["w"] - 3) ** 2
  step = jax.jit(lambda s: s.minimize(loss_fn, grad_loss=weights))
  for _ in range(5):
    state, loss = step(state)
  np.testing.assert_allclose(state.params["w"], [3, 3], atol=1e-3)
  assert loss.shape == (2,)


@pytest.mark.parametrize(
  "wrapper", [DYNAMIC, fs.Accumulate(1, per_replica=True)]
)
def test_reduction_over_replicas(wrapper):
  strategy = fs.Strategy()
  params = {"w": jnp.zeros(())}
  state = create([wrapper], optax.sgd(1.0), params, strategy=strategy)

  def step(state, x):
    loss_fn = lambda p: p["w"] * x.sum()
    return [
      state.minimize(loss_fn, aggregation=aggregation)[0].params["w"]
      for aggregation in (None, "mean", "sum")
    ]

  got = strategy.run(step, (state, strategy.shard_batch(jnp.arange(8.0))))
  got = [float(strategy.reduce("mean", w, axis=None)) for w in got]
  assert got == [-3.5, -3.5, -28.0]


@pytest.mark.parametrize("wrappers", [(), (DYNAMIC,)])
def test_gated_gradients_have_the_same_values_and_pass_in_16_bits(wrappers):
  state = create(wrappers)

  def loss_fn(params):
    half = params["w"].astype(jnp.bfloat16)
    return (half**2).sum().astype(jnp.float32) + params["b"]["c"]

  def steps(state):
    modes = ("none", "op", "graph")
    return [state.minimize(loss_fn, gate_gradients=mode) for mode in modes]

  wanted, *others = jax.jit(steps)(state)
  for other in others:
    # CPU: the compiler drops the barriers before it optimizes.
    assert_trees_equal(other, wanted)
  # Of "op" and of "graph".
  operands = [
    [x.aval.dtype.name for x in eqn.invars]
    for eqn in jax.make_jaxpr(steps)(state).eqns
    if eqn.primitive.name == "optimization_barrier"
  ]
  assert operands.count(["float32", "bfloat16"]) == 2


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
  (optax.MultiSteps(optax.adam(RATE), 2), ["acc_grads", "m", "v"]),
  (optax.masked(optax.trace(0.9), {"w": True, "b": False}), ["momentum"]),
  (
    optax.chain(optax.trace(0.9), optax.clip(1.0), optax.trace(0.5)),
    ["0/momentum", "2/momentum"],
  ),
  (fs.freeze(optax.adam(RATE), ["^b/"]), ["m", "v"]),
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
    assert sum(x is slot for x in state.variables().values()) == 1


def test_values_by_any_name():
  state = create(tx=optax.adam(RATE, b1=0.75, b2=0.5))
  state, _ = jax.jit(lambda s: s.minimize(quadratic))(state)
  for name in ("m", "mu", "0/m", "0/mu"):
    np.testing.assert_allclose(state.get_slot("w", name), 0.25 * 2 * W)
  np.testing.assert_allclose(state.get_slot("w", "v"), 0.5 * (2 * W) ** 2)
  slots = ("count", "mu/b/c", "mu/w", "nu/b/c", "nu/w")
  assert list(state.variables()) == [f"opt_state/0/{slot}" for slot in slots]
  # The path of a single array is that of every leaf.
  assert create(params=W, tx=optax.adam(RATE)).get_slot_names() == ["m", "v"]
  # Each of two optimizers has one of the parameters.
  tx = {"slow": optax.adam(RATE), "fast": optax.sgd(RATE, momentum=0.9)}
  tx = optax.partition(tx, {"w": "slow", "b": {"c": "fast"}})
  state = create(tx=tx)
  assert state.get_slot_names() == ["m", "momentum", "v"]
  assert state.get_slot("w", "m").shape == (2,)
  assert state.get_slot("b/c", "m") is state.get_slot("w", "momentum") is None


def test_slots_of_wrappers():
  tx = optax.sgd(RATE, momentum=0.9)
  state = create([DYNAMIC, fs.AGN(2)], tx)
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
