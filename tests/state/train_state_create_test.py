"""TrainState.create and create_train_state."""

import copy
import pickle
from typing import Any

import compilations
from flax import linen as nn
from flax import struct
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
from flaxshard.state import fields as fields_lib

X = np.array([[1.0, 2.0, -1.0], [0.5, -0.25, 3.0]], np.float32)


class Norm(nn.Module):
  @nn.compact
  def __call__(self, x, train=True):
    x = nn.Dense(4)(x)
    return nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)


# Creating.


@pytest.mark.parametrize(
  ("name", "wrappers"),
  [
    ("ema_params", ()),
    ("params_axes", (fs.LossScale("dynamic"),)),
    ("metrics", (fs.LossScale("dynamic"),)),
  ],
)
def test_collection_named_like_an_argument(name, wrappers):
  state = create(wrappers, **{name: {"w": jnp.full(2, 3.0)}})
  np.testing.assert_array_equal(getattr(state, name)["w"], [3.0, 3.0])
  new = state.apply_gradients(
    grads=jax.tree.map(jnp.ones_like, state.params),
    **{name: {"w": jnp.full(2, 4.0)}},
  )
  np.testing.assert_array_equal(getattr(new, name)["w"], [4.0, 4.0])
  np.testing.assert_array_equal(new.params["w"], [0.5, -2.5])


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


# Pickled and copied states, and states without wrappers.


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


def create_plain(cls=fs.TrainState, wrappers=(), **collections):
  return cls.create(
    apply_fn=apply_fn,
    params={"w": jnp.array([1.0, -2.0])},
    tx=TX,
    wrappers=wrappers,
    **collections,
  )


STATES = {
  "plain": {},
  "both": {
    "wrappers": [fs.LossScale(fs.DynamicLossScale(8.0, hysteresis=2))],
    "batch_stats": {"m": np.full(2, 3.0, np.float32)},
    "ema_params": {"w": np.zeros(2, np.float32)},
  },
  "subclass": {
    "cls": EmaState,
    "wrappers": [fs.LossScale("dynamic")],
    "ema": {"w": np.zeros(2, np.float32)},
    "note": "first",
    "cache": {"m": np.full(2, 3.0, np.float32)},
  },
}
COPIES = {
  "pickle": lambda state: pickle.loads(pickle.dumps(state)),
  "deepcopy": copy.deepcopy,
}


@jax.jit
def take_step(state):
  return state.minimize(lambda p: (p["w"] ** 2).sum())[0]


@pytest.mark.parametrize(
  ("kind", "how"),
  [("plain", "pickle"), ("both", "deepcopy"), ("subclass", "pickle")],
)
def test_pickled_and_copied_states_are_equal(kind, how):
  state = take_step(create_plain(**STATES[kind]))
  same = COPIES[how](state)
  assert type(same) is type(state)
  assert jax.tree.structure(same) == jax.tree.structure(state)
  names = fields_lib.fields_by_name(type(state))
  assert list(fields_lib.fields_by_name(type(same))) == list(names)
  for name in fields_lib.array_field_names(state):
    old, new = getattr(state, name), getattr(same, name)
    assert jax.tree.structure(new) == jax.tree.structure(old)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
      assert a.dtype == b.dtype
      np.testing.assert_array_equal(a, b)
  assert same.wrappers == state.wrappers
  assert same.apply_fn is apply_fn
  assert int(same.step) == 1
  assert isinstance(same, STATES[kind].get("cls", fs.TrainState))
  if kind == "subclass":
    assert same.note == "first"
  # The copy trains like the original.
  b = take_step(state)
  with compilations.count() as compiled:
    a = take_step(same)
  assert compiled.total == 0
  np.testing.assert_array_equal(a.params["w"], b.params["w"])
  np.testing.assert_array_equal(
    a.opt_state["trace"]["w"], b.opt_state["trace"]["w"]
  )
  assert int(a.step) == 2


def test_without_wrappers_is_equal_to_a_state_created_without():
  stats = {"m": np.full(2, 3.0, np.float32)}
  plain = create_plain(batch_stats=stats)
  state = create_plain(wrappers=[fs.LossScale(8)], batch_stats=stats)
  bare = state.without_wrappers()
  assert bare.wrappers == ()
  assert fields_lib.array_field_names(bare) == fields_lib.array_field_names(
    plain
  )
  assert type(bare) is type(plain)
  assert jax.tree.structure(bare) == jax.tree.structure(plain)
  same = pickle.loads(pickle.dumps(bare))
  np.testing.assert_array_equal(same.batch_stats["m"], stats["m"])
  assert "wrapper_states" not in fields_lib.array_field_names(same)


# create_train_state, for Linen.


def test_linen_with_batch_stats():
  state = fs.create_train_state(
    Norm(),
    jax.random.key(1),
    X,
    optax.sgd(0.1),
    wrappers=[fs.LossScale("dynamic")],
  )
  assert set(state.batch_stats["BatchNorm_0"]) == {"mean", "var"}

  @jax.jit
  def step(state, x):
    def loss_fn(params):
      variables = {"params": params, "batch_stats": state.batch_stats}
      out, new = state.apply_fn(variables, x, mutable=["batch_stats"])
      return (out**3).mean(), new

    (_, new), grads = state.value_and_grad(loss_fn, has_aux=True)
    return state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])

  dense = X @ state.params["Dense_0"]["kernel"]
  new = step(state, X)
  stats = new.batch_stats["BatchNorm_0"]
  np.testing.assert_allclose(stats["mean"], dense.mean(0) / 2, rtol=1e-5)
  np.testing.assert_allclose(stats["var"], 0.5 + dense.var(0) / 2, rtol=1e-4)
  skipped = step(new, X * np.inf)
  assert_trees_equal(skipped.batch_stats, new.batch_stats)
  assert_trees_equal(skipped.params, new.params)
  assert int(skipped.step) == 1


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
