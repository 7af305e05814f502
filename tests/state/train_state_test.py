"""TrainState: equal to Flax's without wrappers; losses, gradients, updates."""

import copy
import pickle
from typing import Any

import compilations
import flax
from flax import core
from flax import linen as nn
from flax import struct
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


def mlp_loss(params, x, y):
  return ((Mlp().apply({"params": params}, x) - y) ** 2).mean()


def program(state_class, **kwargs):
  """Returns the text of a lowered step, which is what XLA compiles."""
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

  return jax.jit(step, donate_argnums=0).lower(state, X, Y).as_text()


def test_step_without_wrappers_is_the_program_of_flax():
  bare = program(flax_train_state.TrainState)
  assert "tf.aliasing_output" in bare
  assert program(fs.TrainState) == bare
  # "auto" finds nothing to scale in float32: it is compiled away.
  assert program(fs.TrainState, wrappers=[fs.LossScale("auto")]) == bare
  assert program(fs.TrainState, wrappers=[fs.LossScale(8)]) != bare


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
  # Flax's serialization reads the bytes of the one into the other.
  given = flax.serialization.to_bytes(ours)
  restored = flax.serialization.from_bytes(flax_state, given)
  jax.tree.map(np.testing.assert_array_equal, restored, flax_state)


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
  types = jax.tree.map(jax.typeof, state)
  assert not any(x.weak_type for x in jax.tree.leaves(state))
  step = jax.jit(lambda s: s.minimize(lambda p: (p["w"] ** 2).sum())[0])
  state = step(state)
  with compilations.count() as compiled:
    state = step(step(state))
  assert compiled.total == 0
  # Slots of float16 parameters stay float16, too.
  assert jax.tree.map(jax.typeof, state) == types
  # Adam's steps are as long as the learning rate while the gradients agree.
  assert float(state.params["w"]) == pytest.approx(0.5, abs=0.1)


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


def test_shared_buffers_are_donated_safely():
  x, key = jnp.ones(3), jax.random.key(7)

  # As with Lookahead and averages, whose slots are the parameters at first.
  def update(updates, anchor, params):
    return jax.tree.map(lambda u, a, p: a - p - u, updates, anchor, params), (
      anchor
    )

  state = create(
    [fs.LossScale("dynamic")],
    tx=optax.GradientTransformation(lambda params: params, update),
    params={"a": x, "b": x},
    batch_stats={"m": x},
    rngs={"a": key, "b": key},
  )
  step = jax.jit(
    lambda s: s.minimize(lambda p: (p["a"] * 2 + p["b"]).sum())[0],
    donate_argnums=0,
  )
  state = step(step(state))
  ones = np.ones(3)
  np.testing.assert_array_equal(state.params["a"], -ones)
  np.testing.assert_array_equal(state.params["b"], np.zeros(3))
  np.testing.assert_array_equal(state.opt_state["a"], ones)
  np.testing.assert_array_equal(state.batch_stats["m"], ones)
  for name in ("a", "b"):
    assert jax.random.key_data(state.rngs[name]).tolist() == [0, 7]


@pytest.mark.parametrize("compiled", [False, True])
def test_collections_keep_containers_and_types_or_are_held_back(compiled):
  stats = core.freeze({"m": {"mean": jnp.zeros(2)}})
  state = create(
    [fs.LossScale("dynamic")], batch_stats=stats, ema=jnp.zeros(())
  )
  step = lambda s, g: s.apply_gradients(
    grads=g,
    batch_stats={"m": {"mean": jnp.full(2, 7.0)}},
    ema=2.0,  # a weak type
  )
  step = jax.jit(step) if compiled else step
  good = step(state, state.params)
  bad = step(
    good.replace(batch_stats=stats),
    jax.tree.map(lambda p: p * jnp.nan, state.params),
  )
  for new, mean in ((good, 7.0), (bad, 0.0)):
    assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
    np.testing.assert_array_equal(new.batch_stats["m"]["mean"], [mean] * 2)
  assert int(bad.step) == 1


# Subclasses, copies and fp8.


class EmaState(fs.TrainState):
  """A subclass as users write it, with a default and a static field."""

  ema: Any = None
  note: str = struct.field(pytree_node=False, default="none")

  def averaged(self):
    return jax.tree.map(lambda e: e * 2, self.ema)


def test_subclass_with_fields():
  state = EmaState.create(
    apply_fn=None,
    params=make_params(),
    tx=optax.sgd(0.5),
    wrappers=[fs.LossScale("dynamic")],
    ema={"w": jnp.zeros(2)},
    note="first",
    batch_stats={"m": jnp.ones(1)},
  )
  assert isinstance(state, EmaState)
  assert state.note == "first"
  step = jax.jit(
    lambda s, g: s.apply_gradients(
      grads=g, ema={"w": s.ema["w"] + 1.0}, note="later"
    )
  )
  good = jax.tree.map(jnp.ones_like, state.params)
  new = step(state, good)
  np.testing.assert_array_equal(new.averaged()["w"], [2.0, 2.0])
  np.testing.assert_array_equal(new.params["w"], [0.5, -2.5])
  assert new.note == "later"
  assert float(new.batch_stats["m"][0]) == 1.0
  bad = {"w": jnp.array([jnp.inf, 0.0]), "b": {"c": jnp.array(1.0)}}
  skipped = step(new, bad)
  np.testing.assert_array_equal(skipped.ema["w"], [1.0, 1.0])
  assert int(skipped.step) == 1


class MetricsState(fs.TrainState):
  # As in Flax's examples. It hides the method `metrics`.
  metrics: Any
  key: Any


def test_subclass_with_a_field_named_metrics():
  kwargs = dict(apply_fn=None, params=make_params(), tx=optax.sgd(0.5))
  state = MetricsState.create(
    **kwargs,
    metrics={"loss": 1.0},
    key=jnp.zeros(2),
    wrappers=[fs.LossScale(8)],
  )
  new, _ = state.minimize(quadratic)
  assert float(new.metrics["loss"]) == 1.0
  with pytest.raises(TypeError, match="metrics"):
    MetricsState.create(**kwargs, key=jnp.zeros(2))


def _init(params):
  return {"trace": jax.tree.map(jnp.zeros_like, params)}


def _update(updates, state, params=None):
  del params
  trace = jax.tree.map(lambda t, u: 0.5 * t + u, state["trace"], updates)
  return jax.tree.map(lambda t: -t, trace), {"trace": trace}


# Pickle finds these functions by name; those inside optax have none.
TX = optax.GradientTransformation(_init, _update)


def apply_fn(variables, x):
  return variables["params"]["w"] * x


# create_train_state, for Linen.


def test_fp8_module_trains_and_updates_its_statistics():
  dense = nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp)
  state = fs.create_train_state(
    dense,
    jax.random.key(0),
    jnp.ones((4, 16)),
    optax.sgd(0.1),
    wrappers=[fs.LossScale(1024.0)],
  )
  x = jnp.full((4, 16), 3.0)

  def loss_fn(variables):
    return (state.apply_fn(variables, x) ** 2).mean()

  new, _ = jax.jit(lambda s: s.minimize(loss_fn))(state)
  histories = lambda s: {
    jax.tree_util.keystr(p): np.asarray(a)
    for p, a in jax.tree_util.tree_leaves_with_path(
      s.params["_overwrite_with_gradient"]
    )
    if "input_amax_history" in jax.tree_util.keystr(p)
  }
  (before,), (after,) = histories(state).values(), histories(new).values()
  assert (before == 0).all()
  # The largest input, neither scaled nor taken off with a learning rate.
  assert after.max() == 3.0
  kernel = lambda s: np.asarray(s.params["params"]["kernel"])
  assert (kernel(new) != kernel(state)).any()


@pytest.mark.parametrize(
  "copied",
  [lambda state: pickle.loads(pickle.dumps(state)), copy.deepcopy],
  ids=["pickle", "deepcopy"],
)
def test_pickled_and_copied_states_are_equal(copied):
  state = EmaState.create(
    apply_fn=apply_fn,
    params={"w": jnp.array([1.0, -2.0])},
    tx=TX,
    wrappers=[fs.LossScale("dynamic")],
    ema={"w": np.zeros(2, np.float32)},
    note="first",
    batch_stats={"m": np.full(2, 3.0, np.float32)},
  )
  step = jax.jit(lambda s: s.minimize(lambda p: (p["w"] ** 2).sum())[0])
  state = step(state)
  same = copied(state)
  assert type(same) is type(state) and isinstance(same, EmaState)
  # The structure has the static fields, such as `note`.
  assert jax.tree.structure(same) == jax.tree.structure(state)
  assert_trees_equal(same, state)
  # The copy trains like the original.
  wanted = step(state)
  with compilations.count() as compiled:
    new = step(same)
  assert compiled.total == 0
  assert_trees_equal(new, wanted)
  # Without wrappers it is a state that was created without.
  bare, plain = (
    s.without_wrappers() for s in (copied(same.without_wrappers()), state)
  )
  assert bare.wrappers == () and len(jax.tree.leaves(bare)) == 5
  assert jax.tree.structure(bare) == jax.tree.structure(plain)


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
