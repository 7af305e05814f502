"""NNX variables: transformations, sown values, trees and bare arrays."""

import warnings

import compilations
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.state import nnx_adapter

X = np.array([[1.0, 2.0, -1.0], [0.5, -0.25, 3.0]], np.float32)


class RematNorm(nnx.Module):
  def __init__(self, rngs):
    self.block = nnx.Linear(3, 3, rngs=rngs)
    self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=rngs)

  def __call__(self, x):
    block = nnx.remat(lambda module, x: jnp.tanh(module(x)))
    return self.norm(block(self.block, x))


class RematInside(nnx.Module):
  """Rematerializes the layer that has running averages."""

  def __init__(self, rngs):
    self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=rngs)

  def __call__(self, x):
    return nnx.remat(lambda module, x: module(x))(self.norm, x)


def assert_close(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b
  )


# Transformations inside a module.


@pytest.mark.parametrize("kind", [RematNorm, RematInside])
def test_remat_with_batch_norm(kind):
  module = kind(nnx.Rngs(0))
  apply_fn, variables = nnx_adapter.split(module)
  assert set(variables) == {"params", "batch_stats"}
  # In the mode "eval" the batch statistics are constant.
  out = apply_fn(variables, X, mode="eval")
  both, new = apply_fn(variables, X, mode="eval", mutable=True)
  np.testing.assert_array_equal(out, both)
  assert_close(new["batch_stats"], variables["batch_stats"])
  # In training they are equal to those of a call of the module.
  trained, new = apply_fn(variables, X, mutable=["batch_stats"])
  np.testing.assert_allclose(trained, module(X), rtol=1e-5, atol=1e-6)
  wanted = nnx_adapter.split(module)[1]["batch_stats"]
  assert_close(new["batch_stats"], wanted)
  assert not np.allclose(
    new["batch_stats"]["norm"]["mean"], variables["batch_stats"]["norm"]["mean"]
  )
  module.eval()
  np.testing.assert_allclose(
    apply_fn({**variables, **new}, X, mode="eval"), module(X), rtol=1e-5
  )


# Variables that a call adds.


class Sows(nnx.Module):
  def __init__(self, rngs):
    self.dense = nnx.Linear(3, 2, rngs=rngs)

  def __call__(self, x):
    x = self.dense(x)
    with warnings.catch_warnings():
      # Newer Flax prefers nnx.capture.
      warnings.simplefilter("ignore", DeprecationWarning)
      self.sow(nnx.Intermediate, "hidden", x)
    return x * 2


def test_sown_values_are_returned_if_mutable():
  module = Sows(nnx.Rngs(0))
  apply_fn, variables = nnx_adapter.split(module)
  assert set(variables) == {"params"}
  wanted = module.dense(X)
  for call in (
    lambda v: apply_fn(v, X, mutable=["intermediates"]),
    lambda v: apply_fn(v, X, mutable="intermediates"),
    lambda v: apply_fn(v, X, mutable=True),
  ):
    out, new = jax.jit(call)(variables)
    assert set(new) == {"intermediates"}
    (hidden,) = jax.tree.leaves(new["intermediates"])
    assert set(new["intermediates"]) == {"hidden"}
    np.testing.assert_allclose(hidden, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out, wanted * 2, rtol=1e-5, atol=1e-6)


# Values of variables.


class Nested(nnx.Module):
  def __init__(self):
    self.tree = nnx.Param({"a": jnp.ones(3), "b": {"c": jnp.full(3, 2.0)}})
    self.w = nnx.Param(jnp.full(3, 5.0))

  def __call__(self, x):
    tree = self.tree.get_value()
    return (x * tree["a"] + tree["b"]["c"]) * self.w[...]


def test_parameter_that_is_a_tree():
  state = fs.create_train_state(
    Nested(), None, None, optax.sgd(0.5), wrappers=[fs.LossScale("dynamic")]
  )
  paths = [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, _ in jax.tree_util.tree_leaves_with_path(state.params)
  ]
  assert sorted(paths) == ["tree/a", "tree/b/c", "w"]
  x = np.ones(3, np.float32)
  loss_fn = lambda p: state.apply_fn({"params": p}, x).sum()
  step = jax.jit(lambda s: s.minimize(loss_fn))
  new, loss = step(state)
  assert float(loss) == 45.0
  np.testing.assert_array_equal(new.params["tree"]["a"], [-1.5] * 3)
  np.testing.assert_array_equal(new.params["tree"]["b"]["c"], [-0.5] * 3)
  np.testing.assert_array_equal(new.params["w"], [3.5] * 3)
  with compilations.count() as compiled:
    step(new)
  assert compiled.total == 0


class RawArray(nnx.Module):
  def __init__(self, rngs=None):
    self.w = nnx.Param(jnp.full(4, 2.0))
    self.raw = nnx.data(jnp.ones(4))

  def __call__(self, x):
    return x * self.w[...] + self.raw


def test_bare_arrays():
  state = fs.create_train_state(
    RawArray(), None, None, optax.sgd(0.5), wrappers=[fs.LossScale("dynamic")]
  )
  assert set(state.params) == {"w"}
  assert set(state.arrays) == {"raw"}
  np.testing.assert_array_equal(state.arrays["raw"], np.ones(4))
  out = state.apply_fn(
    {"params": state.params, "arrays": {"raw": jnp.full(4, 7.0)}}, jnp.ones(4)
  )
  np.testing.assert_array_equal(out, np.full(4, 9.0))
  with pytest.raises(ValueError, match="'arrays'"):
    state.apply_fn({"params": state.params}, jnp.ones(4))


# Several states of one module.


class Net(nnx.Module):
  def __init__(self, rngs):
    self.dense = nnx.Linear(3, 2, rngs=rngs)
    self.norm = nnx.BatchNorm(2, rngs=rngs)
    self.raw = nnx.data(jnp.ones(2))

  def __call__(self, x):
    return self.norm(self.dense(x)) * self.raw


def test_donating_the_state_keeps_the_arrays_of_the_module():
  module = Net(nnx.Rngs(0))
  kernel = np.array(module.dense.kernel[...])
  state = fs.create_train_state(
    module, None, None, optax.sgd(0.5), wrappers=[fs.LossScale("dynamic")]
  )
  step = jax.jit(
    lambda s: s.apply_gradients(grads=jax.tree.map(jnp.ones_like, s.params)),
    donate_argnums=0,
  )
  new = step(state)
  assert state.params["dense"]["kernel"].is_deleted()
  for leaf in jax.tree.leaves(nnx.state(module)):
    assert not leaf.is_deleted()
  np.testing.assert_array_equal(module.dense.kernel[...], kernel)
  np.testing.assert_allclose(
    new.params["dense"]["kernel"], kernel - 0.5, rtol=1e-6
  )
  assert np.isfinite(module(X)).all()


@pytest.mark.parametrize(
  ("kind", "again"), [(Net, True), (RawArray, True), (Net, False)]
)
def test_states_of_one_class_share_a_compiled_step(kind, again):
  module, tx = kind(nnx.Rngs(0)), optax.adam(0.1)
  make = lambda m: fs.create_train_state(
    m, None, None, tx, wrappers=[fs.LossScale("dynamic")]
  )
  # A second module from the same class is equal for jit.
  one, two = make(module), make(kind(nnx.Rngs(1)) if again else module)
  assert jax.tree.structure(one) == jax.tree.structure(two)
  assert hash(jax.tree.structure(one)) == hash(jax.tree.structure(two))
  assert one.apply_fn == two.apply_fn
  assert hash(one.apply_fn) == hash(two.apply_fn)
  step = jax.jit(
    lambda s: s.apply_gradients(grads=jax.tree.map(jnp.ones_like, s.params))
  )
  new = step(one)
  with compilations.count() as compiled:
    step(two)
    step(new)
  assert compiled.total == 0
