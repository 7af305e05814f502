"""TrainState.create and create_train_state."""

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

X = np.array([[1.0, 2.0, -1.0], [0.5, -0.25, 3.0]], np.float32)
Y = np.array([[1.0], [-2.0]], np.float32)


class Mlp(nn.Module):
  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    x = nn.tanh(nn.Dense(4, dtype=self.dtype)(x))
    return nn.Dense(1, dtype=self.dtype)(x)


class Norm(nn.Module):
  @nn.compact
  def __call__(self, x, train=True):
    x = nn.Dense(4)(x)
    return nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)


def mlp_loss(params, x, y):
  return ((Mlp().apply({"params": params}, x) - y) ** 2).mean()


# Creating.


def test_create_with_invalid_arguments_raises():
  with pytest.raises(TypeError, match=r"params\[b/c\]"):
    create(params={"w": jnp.ones(1), "b": {"c": "x"}})
  with pytest.raises(TypeError, match=r"batch_stats\[m\]"):
    create(batch_stats={"m": "x"})
  with pytest.raises(TypeError, match="tx"):
    create(tx=0.1)
  with pytest.raises(TypeError, match="wrappers"):
    create(fs.LossScale())


@pytest.mark.parametrize("name", ["step", "wrapper_states", "minimize"])
def test_collection_with_the_name_of_an_attribute_raises(name):
  with pytest.raises(ValueError, match=f"'{name}'"):
    create(**{name: {"m": jnp.ones(1)}})


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


@pytest.mark.parametrize(
  ("kwargs", "match"),
  [
    ({"wrapers": [fs.LossScale()]}, "'wrapers'.*'wrappers'"),
    ({"strategy": {"m": np.ones(1)}}, "strategy"),
    ({"rules": {"m": np.ones(1)}}, "rules="),
    ({"batch_stats": None}, "batch_stats=None"),
  ],
)
def test_keyword_that_is_no_collection_raises(kwargs, match):
  with pytest.raises(TypeError, match=match):
    create(**kwargs)


@pytest.mark.parametrize("params", [jnp.ones(2), None, {"a": {}}, "w"])
def test_params_that_are_no_tree_raise(params):
  with pytest.raises(TypeError, match="params"):
    fs.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))


def test_unordered_wrappers_raise():
  for wrappers in ({fs.LossScale()}, {"loss_scale": fs.LossScale()}, ""):
    with pytest.raises(TypeError, match="wrappers"):
      create(wrappers)
  with pytest.raises(TypeError, match="wrappers"):
    fs.create_train_state(
      Mlp(), jax.random.key(0), X, optax.sgd(0.1), wrappers={fs.LossScale()}
    )


def test_wrappers_from_an_iterator():
  wanted = (fs.LossScale(8),)
  assert create(iter(wanted)).wrappers == wanted
  assert create(w for w in wanted).wrappers == wanted
  state = fs.create_train_state(
    Mlp(), jax.random.key(0), X, optax.sgd(0.1), wrappers=iter(wanted)
  )
  assert state.wrappers == wanted
  assert float(state.wrapper_states["loss_scale"].scale) == 8.0


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


def test_subclass_field_with_a_default():
  state = EmaState.create(
    apply_fn=None, params=make_params(), tx=optax.sgd(0.5)
  )
  assert state.ema is None
  new, _ = state.minimize(quadratic)
  np.testing.assert_array_equal(new.params["w"], [0.0, 0.0])


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


# create_train_state, for Linen.


def assert_close(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


def test_linen_model():
  key = jax.random.key(1)
  state = fs.create_train_state(
    Mlp(), key, X, optax.adam(0.1), wrappers=[fs.LossScale("dynamic")]
  )
  variables = Mlp().init(key, X)
  assert_close(state.params, variables["params"])
  np.testing.assert_allclose(
    state.apply_fn({"params": state.params}, X),
    Mlp().apply(variables, X),
    rtol=1e-5,
  )
  assert int(state.step) == 0
  assert not any(x.weak_type for x in jax.tree.leaves(state))
  before = mlp_loss(state.params, X, Y)
  step = jax.jit(lambda s: s.minimize(mlp_loss, X, Y))
  state, _ = step(state)
  with compilations.count() as compiled:
    for _ in range(20):
      state, loss = step(state)
  assert compiled.total == 0
  assert float(loss) < 0.5 * float(before)


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


class TwoInputs(nn.Module):
  @nn.compact
  def __call__(self, x, mask):
    return nn.Dense(2)(x) * mask


def test_linen_with_several_inputs_and_abstract_ones():
  key = jax.random.key(2)
  mask = np.ones((2, 1), np.float32)
  wanted = TwoInputs().init(key, X, mask)["params"]
  for inputs in (
    (X, mask),
    (jax.ShapeDtypeStruct(X.shape, X.dtype), mask),
  ):
    state = fs.create_train_state(TwoInputs(), key, inputs, optax.sgd(0.1))
    assert_close(state.params, wanted)


class Streams(nn.Module):
  @nn.compact
  def __call__(self, x):
    noise = jax.random.normal(self.make_rng("noise"), x.shape)
    return nn.Dense(1)(x + noise)


def test_linen_with_several_random_streams():
  rngs = {"params": jax.random.key(0), "noise": jax.random.key(1)}
  state = fs.create_train_state(Streams(), rngs, X, optax.sgd(0.1))
  assert_close(state.params, Streams().init(rngs, X)["params"])


class Boxed(nn.Module):
  @nn.compact
  def __call__(self, x):
    init = nn.with_partitioning(nn.initializers.ones, ("in", "out"))
    return nn.Dense(2, kernel_init=init)(x)


def test_partitioning_metadata_is_removed():
  state = fs.create_train_state(
    Boxed(), jax.random.key(0), X, optax.sgd(0.5), wrappers=[fs.LossScale(8)]
  )
  np.testing.assert_array_equal(state.params["Dense_0"]["kernel"], 1.0)
  new, _ = state.minimize(lambda p: p["Dense_0"]["kernel"].sum())
  np.testing.assert_array_equal(new.params["Dense_0"]["kernel"], 0.5)


class WithPolicy(nn.Module):
  policy: Any = None

  @nn.compact
  def __call__(self, x):
    return nn.Dense(1, dtype=self.policy.compute_dtype)(x)


def test_auto_prefers_its_own_policy_to_that_of_the_model():
  make = lambda policy, wrapper: fs.create_train_state(
    WithPolicy(fs.Policy(policy)),
    jax.random.key(0),
    X,
    optax.sgd(0.1),
    wrappers=[wrapper],
  ).wrapper_states["loss_scale"]
  auto = fs.LossScale("auto")
  assert make("mixed_float16", auto) != ()
  assert make("mixed_float16", fs.LossScale("auto", policy="float32")) == ()


class NoParams(nn.Module):
  def __call__(self, x):
    return x


class TakenName(nn.Module):
  @nn.compact
  def __call__(self, x):
    self.variable("step", "count", lambda: jnp.zeros(()))
    return nn.Dense(1)(x)


def test_invalid_model_raises():
  make = lambda model, **kwargs: fs.create_train_state(
    model, jax.random.key(0), X, optax.sgd(0.1), **kwargs
  )
  for model in (Mlp, lambda x: x, None, {"w": jnp.ones(1)}):
    with pytest.raises(TypeError, match="model"):
      make(model)
  with pytest.raises(ValueError, match="NoParams"):
    make(NoParams())
  with pytest.raises(ValueError, match="'step'"):
    make(TakenName())
  with pytest.raises(ValueError, match="'loss_scale'"):
    make(Mlp(), wrappers=[fs.LossScale(), fs.LossScale(8)])
  with pytest.raises(TypeError, match=r"wrappers\[0\]"):
    make(Mlp(), wrappers=[fs.LossScale])


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
