"""TrainState: equal to Flax's without wrappers; losses, gradients, updates."""

import collections
import re
from typing import Any, NamedTuple

import compilations
import flax
from flax import core
from flax import linen as nn
from flax.training import train_state as flax_train_state
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

X = np.array([[1.0, 2.0, -1.0], [0.5, -0.25, 3.0]], np.float32)
Y = np.array([[1.0], [-2.0]], np.float32)


class Mlp(nn.Module):
  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    x = nn.tanh(nn.Dense(4, dtype=self.dtype)(x))
    return nn.Dense(1, dtype=self.dtype)(x)


# Without wrappers it is Flax's class.


def normalized_hlo(compiled):
  """Returns the optimized HLO without names and source locations."""
  text = compiled.as_text()
  # Tables of files and frames stand between the header and the computations.
  header, _, body = text.partition("\n")
  layout = re.search(r"entry_computation_layout=\S+", header).group()
  start = re.search(r"^(%|ENTRY)", body, re.MULTILINE).start()
  body = re.sub(r', metadata=\{(?:"[^"]*"|[^}"])*\}', "", body[start:])
  body = re.sub(r"\(([^()]*: [^()]*)\) ->", "() ->", body)
  names: dict[str, str] = {}
  body = re.sub(
    r"%[\w.\-]+", lambda m: names.setdefault(m[0], f"%{len(names)}"), body
  )
  return layout + "\n" + body


def mlp_loss(params, x, y):
  return ((Mlp().apply({"params": params}, x) - y) ** 2).mean()


def compiled_step(state_class, donate, **kwargs):
  params = Mlp().init(jax.random.key(0), X)["params"]
  state = state_class.create(
    apply_fn=Mlp().apply, params=params, tx=optax.adamw(0.1), **kwargs
  )
  # Flax's step is a Python int until the first update.
  state = state.replace(step=jnp.zeros((), jnp.int32))

  def step(state, x, y):
    if isinstance(state, fs.TrainState):
      loss, grads = state.value_and_grad(mlp_loss, x, y)
    else:
      loss, grads = jax.value_and_grad(mlp_loss)(state.params, x, y)
    return state.apply_gradients(grads=grads), loss

  step = jax.jit(step, donate_argnums=(0,) if donate else ())
  return step.lower(state, X, Y).compile()


@pytest.mark.parametrize("donate", [False, True])
def test_step_without_wrappers_compiles_to_the_program_of_flax(donate):
  bare = normalized_hlo(compiled_step(flax_train_state.TrainState, donate))
  assert "fusion" in bare
  assert normalized_hlo(compiled_step(fs.TrainState, donate)) == bare
  # "auto" finds nothing to scale in float32: it is compiled away.
  off = compiled_step(fs.TrainState, donate, wrappers=[fs.LossScale("auto")])
  assert normalized_hlo(off) == bare
  if not donate:
    on = compiled_step(fs.TrainState, donate, wrappers=[fs.LossScale(8)])
    assert normalized_hlo(on) != bare


def test_leaves_without_wrappers_are_those_of_flax():
  params, tx = make_params(), optax.adam(0.1)
  flax_state = flax_train_state.TrainState.create(
    apply_fn=None, params=params, tx=tx
  )
  ours = create(params=params, tx=tx)
  assert isinstance(ours, flax_train_state.TrainState)
  theirs = jax.tree_util.tree_leaves_with_path(flax_state)
  leaves = jax.tree_util.tree_leaves_with_path(ours)
  assert [p for p, _ in leaves] == [p for p, _ in theirs]
  for (_, a), (_, b) in zip(leaves, theirs, strict=True):
    np.testing.assert_array_equal(a, b)
  to_keys = lambda s: flax.traverse_util.flatten_dict(
    flax.serialization.to_state_dict(s), keep_empty_nodes=True
  ).keys()
  assert to_keys(ours) == to_keys(flax_state)


def test_serialization_round_trips():
  make = lambda tx, m: create(
    [fs.LossScale("dynamic")], tx=tx, batch_stats={"m": jnp.full(2, m)}
  )
  tx = optax.adam(0.1)
  state, blank = make(tx, 1.0), make(tx, 0.0)
  state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
  restored = flax.serialization.from_bytes(
    blank, flax.serialization.to_bytes(state)
  )
  assert_trees_equal(restored, state)


# The second step does not recompile.


@pytest.mark.parametrize(
  ("wrappers", "param"),
  [
    ([], 2.0),
    ([fs.LossScale(fs.DynamicLossScale(8))], 2.0),
    ([fs.LossScale(8)], np.float32(2.0)),
    ([fs.LossScale(fs.DynamicLossScale(8))], jnp.float16(2.0)),
  ],
)
def test_second_step_does_not_recompile(wrappers, param):
  # A Python number is weakly typed; step is a Python int in Flax.
  state = create(wrappers, tx=optax.adam(0.5), params={"w": param})
  assert not any(x.weak_type for x in jax.tree.leaves(state))
  step = jax.jit(lambda s: s.minimize(lambda p: (p["w"] ** 2).sum())[0])
  state = step(state)
  with compilations.count() as compiled:
    state = step(step(state))
  assert compiled.total == 0
  assert int(state.step) == 3


# Loss and gradients.


def test_value_and_grad_with_arguments_and_aux():
  state = create([fs.LossScale(1024.0)])

  def loss_fn(params, scale, shift):
    loss = quadratic(params, scale, shift)
    return loss, {"twice": 2 * loss, "name": jnp.arange(2)}

  @jax.jit
  def grad_step(state, scale):
    return state.value_and_grad(loss_fn, scale, 1.0, has_aux=True)

  (loss, aux), grads = grad_step(state, 2.0)
  assert float(loss) == 11.5
  assert float(aux["twice"]) == 23.0
  np.testing.assert_array_equal(aux["name"], [0, 1])
  np.testing.assert_array_equal(grads["w"], [4.0, -8.0])


def test_scaling_by_hand_equals_value_and_grad():
  state = create([fs.LossScale(1024.0)])

  @jax.jit
  def by_hand(state):
    scaled = lambda p: state.scale_loss(quadratic(p))
    return state.unscale_gradients(jax.grad(scaled)(state.params))

  scaled = jax.grad(lambda p: state.scale_loss(quadratic(p)))(state.params)
  np.testing.assert_array_equal(scaled["w"], [2048.0, -4096.0])
  assert_trees_equal(by_hand(state), state.value_and_grad(quadratic)[1])


# Applying gradients.


def test_float16_parameters_keep_their_dtypes():
  params = {"w": jnp.array([1.0, -2.0], jnp.float16)}
  wrappers = [fs.LossScale(fs.DynamicLossScale(16))]
  state = create(wrappers, tx=optax.adam(0.5), params=params)
  dtypes = jax.tree.map(lambda x: x.dtype, state)
  step = jax.jit(lambda s: s.minimize(lambda p: (p["w"] ** 2).sum())[0])
  # Equal dtypes: the step does not recompile.
  for _ in range(3):
    state = step(state)
    assert jax.tree.map(lambda x: x.dtype, state) == dtypes
  assert state.opt_state[0].mu["w"].dtype == jnp.float16
  # Adam's steps are as long as the learning rate while the gradients agree.
  assert float(state.params["w"][1]) == pytest.approx(-0.5, abs=0.1)


def test_shared_buffers_are_donated_safely():
  x = jnp.ones(3)
  state = create(
    [fs.LossScale("dynamic")],
    params={"a": x, "b": x},
    batch_stats={"m": x},
  )
  step = jax.jit(
    lambda s: s.minimize(lambda p: (p["a"] * 2 + p["b"]).sum())[0],
    donate_argnums=0,
  )
  state = step(step(state))
  np.testing.assert_array_equal(state.params["a"], np.full(3, -1.0))
  np.testing.assert_array_equal(state.params["b"], np.zeros(3))
  np.testing.assert_array_equal(state.batch_stats["m"], np.ones(3))


def test_slots_that_are_the_parameters_are_donated_safely():
  # As with Lookahead and averages, whose slots are the parameters at first.
  def update(updates, anchor, params):
    return jax.tree.map(lambda u, a, p: a - p - u, updates, anchor, params), (
      anchor
    )

  tx = optax.GradientTransformation(lambda params: params, update)
  params = {"w": jnp.full(2, 3.0)}
  state = create([fs.LossScale("dynamic")], tx=tx, params=params)
  step = jax.jit(
    lambda s: s.apply_gradients(grads={"w": jnp.ones(2)}), donate_argnums=0
  )
  state = step(step(state))
  np.testing.assert_array_equal(state.params["w"], [2.0, 2.0])
  np.testing.assert_array_equal(state.opt_state["w"], [3.0, 3.0])


def test_a_program_may_put_our_class_in_the_place_of_flax_s(monkeypatch):
  monkeypatch.setattr(flax_train_state, "TrainState", fs.TrainState)
  state = create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.5))
  state = state.apply_gradients(grads={"w": jnp.ones(2)})
  assert state.params["w"].tolist() == [0.5, 0.5]


class Pair(NamedTuple):
  w: Any
  b: Any


# Gradients in other containers.

W, B = np.array([1.0, -2.0], np.float32), np.array([4.0], np.float32)


@pytest.mark.parametrize(
  ("params", "grads"),
  [
    # core/trees_test.py compares the other pairs of containers.
    (Pair(W, B), {"w": W, "b": B}),
    (
      collections.OrderedDict(w=W, b=B),
      collections.OrderedDict(b=B, w=W),
    ),
    ({"o": {"w": W}, "l": [B]}, core.freeze({"l": (B,), "o": {"w": W}})),
  ],
)
def test_gradients_in_other_containers(params, grads):
  state = create((fs.LossScale("dynamic"),), tx=optax.adam(0.5), params=params)
  step = jax.jit(lambda s, g: s.apply_gradients(grads=g))
  # Of this loss the gradients equal the parameters.
  wanted = step(state, state.params)
  got = step(state, grads)
  assert jax.tree.structure(got) == jax.tree.structure(state)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)
  for new, old in zip(
    jax.tree.leaves(got.params), jax.tree.leaves(state.params), strict=True
  ):
    # The first step of Adam goes against the sign of each gradient.
    np.testing.assert_allclose(new, old - 0.5 * np.sign(old), rtol=1e-4)


def test_different_paths_with_the_same_string():
  params = {"a/b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}}
  state = create([fs.LossScale("dynamic")], params=params)
  grads = {"a": {"b": jnp.ones(1)}, "a/b": jnp.full(1, 2.0)}
  new = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
  assert float(new.params["a"]["b"][0]) == -0.5
  assert float(new.params["a/b"][0]) == -1.0
  for short in ({"a": {"b": jnp.ones(1)}}, {"a/b": jnp.ones(1)}):
    with pytest.raises(ValueError, match="a/b"):
      state.apply_gradients(grads=short)
  # One of them without a gradient is that one alone.
  new = state.apply_gradients(grads={"a": {"b": None}, "a/b": jnp.ones(1)})
  assert float(new.params["a"]["b"][0]) == 0.0
  assert float(new.params["a/b"][0]) == -0.5


# Collections in other containers.


def test_collections_in_other_containers_under_a_dynamic_scale():
  stats = core.freeze({"m": {"mean": jnp.zeros(2)}})
  state = create([fs.LossScale("dynamic")], params={"w": W}, batch_stats=stats)
  step = jax.jit(
    lambda s, g: s.apply_gradients(
      grads={"w": g}, batch_stats={"m": {"mean": jnp.full(2, 7.0)}}
    )
  )
  good = step(state, jnp.ones(2))
  bad = step(good.replace(batch_stats=stats), jnp.array([jnp.nan, 0.0]))
  for new, mean in ((good, 7.0), (bad, 0.0)):
    assert isinstance(new.batch_stats, core.FrozenDict)
    np.testing.assert_array_equal(new.batch_stats["m"]["mean"], [mean] * 2)
    assert jax.tree.structure(new) == jax.tree.structure(state)
  assert int(bad.step) == 1


def test_weakly_typed_collections_do_not_recompile():
  state = create(
    [fs.LossScale("dynamic")],
    tx=optax.adam(0.5),
    params={"w": W},
    ema=jnp.zeros(()),
  )
  weak = jnp.asarray(2.0)
  assert weak.weak_type

  @jax.jit
  def step(state):
    return state.apply_gradients(
      grads={"w": jnp.ones(2)}, ema=jnp.asarray(2.0) * 1.5
    )

  # Outside of jit, and a Python number.
  states = [
    state.apply_gradients(grads={"w": jnp.ones(2)}, ema=value)
    for value in (weak, 2.0)
  ]
  state = step(state)
  assert float(state.ema) == 3.0
  with compilations.count() as compiled:
    for new in (state, *states):
      assert not any(x.weak_type for x in jax.tree.leaves(new))
      step(new)
  assert compiled.total == 0
