"""NNX modules in a TrainState."""

import compilations
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.state import nnx_adapter

X = np.array(
  [[1.0, 2.0, -1.0], [0.5, -0.25, 3.0], [-2.0, 1.0, 0.0], [0.1, 0.2, 0.3]],
  np.float32,
)


class Net(nnx.Module):
  def __init__(self, rngs):
    self.dense = nnx.Linear(3, 8, rngs=rngs)
    self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.drop(self.norm(self.dense(x)))

  def twice(self, x, factor=2.0):
    return self.dense(x) * factor


def make(seed=0):
  return Net(nnx.Rngs(seed))


def as_dict(tree):
  """Returns arrays by path; PRNG keys as their integers."""
  return {
    jax.tree_util.keystr(path): np.asarray(
      jax.random.key_data(x)
      if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
      else x
    )
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def assert_same(a, b):
  a, b = as_dict(a), as_dict(b)
  assert a.keys() == b.keys()
  for name in a:
    np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6)


def test_collections_of_other_variables():
  class Kept(nnx.Variable):
    pass

  class Module(nnx.Module):
    def __init__(self):
      self.w = nnx.Param(jnp.ones(2))
      self.kept = Kept(jnp.full(2, 3.0))
      self.cache = nnx.Cache(jnp.zeros(1))
      self.layers = nnx.List([nnx.Param(jnp.full(1, 5.0))])

  _, variables = nnx_adapter.split(Module())
  assert float(variables["Kept"]["kept"][0]) == 3.0
  assert float(variables["cache"]["cache"][0]) == 0.0
  # The index of a list is a string key.
  assert float(variables["params"]["layers"]["0"][0]) == 5.0


def test_calls_are_equal_to_calls_of_the_module():
  module, same = make(), make()
  apply_fn, variables = nnx_adapter.split(module)
  before = as_dict(variables)
  out, new = jax.jit(lambda v, x: apply_fn(v, x, mutable=True))(variables, X)
  np.testing.assert_allclose(out, same(X), rtol=1e-5, atol=1e-6)
  assert set(new) == {"batch_stats", "rngs"}
  _, wanted = nnx_adapter.split(same)
  assert_same(new["batch_stats"], wanted["batch_stats"])
  assert_same(new["rngs"], wanted["rngs"])
  # Neither the module nor the variables have changed.
  assert_same(variables, nnx_adapter.split(module)[1])
  for name, value in as_dict(variables).items():
    np.testing.assert_array_equal(value, before[name])
  # The second call has another dropout mask, as a second call of the module.
  out2, _ = apply_fn({**variables, **new}, X, mutable=True)
  np.testing.assert_allclose(out2, same(X), rtol=1e-5, atol=1e-6)
  assert ((np.asarray(out2) == 0) != (np.asarray(out) == 0)).any()


def test_mode():
  module, same = make(), make()
  apply_fn, variables = nnx_adapter.split(module)
  out = apply_fn(variables, X, mode="eval")
  same.eval()
  np.testing.assert_allclose(out, same(X), rtol=1e-5, atol=1e-6)
  # No dropout, and normalization by the running averages.
  np.testing.assert_allclose(
    out, module.dense(X) / np.sqrt(1 + 1e-5), rtol=1e-4, atol=1e-5
  )
  # Without `mode`, the module keeps the mode that it was split in.
  apply_eval, eval_variables = nnx_adapter.split(same)
  np.testing.assert_allclose(apply_eval(eval_variables, X), out, rtol=1e-6)
  trained, _ = apply_eval(eval_variables, X, mode="train", mutable=True)
  np.testing.assert_allclose(trained, make()(X), rtol=1e-5, atol=1e-6)


def test_change_of_an_immutable_collection_raises():
  apply_fn, variables = nnx_adapter.split(make())
  with pytest.raises(
    ValueError, match=r"rngs\[drop/rngs/count\].*mutable=\['rngs'\]"
  ):
    apply_fn(variables, X, mutable=["batch_stats"])
  with pytest.raises(ValueError, match=r"batch_stats\[norm/mean\]"):
    apply_fn(variables, X, mutable="rngs")
  with pytest.raises(ValueError, match=r"rngs\[drop"):
    jax.jit(lambda v: apply_fn(v, X))(variables)


def test_method():
  module = make()
  apply_fn, variables = nnx_adapter.split(module)
  wanted = module.dense(X)
  np.testing.assert_allclose(
    apply_fn(variables, X, method="twice"), wanted * 2, rtol=1e-5
  )
  np.testing.assert_allclose(
    apply_fn(variables, X, method="twice", factor=3.0), wanted * 3, rtol=1e-5
  )
  np.testing.assert_allclose(
    apply_fn(variables, X, 4.0, method=Net.twice), wanted * 4, rtol=1e-5
  )
  np.testing.assert_allclose(
    apply_fn(variables, X, method=lambda m, x: m.dense(x) + 1),
    wanted + 1,
    rtol=1e-5,
  )


def create(wrappers=(), tx=None):
  return fs.create_train_state(
    make(), None, None, tx or optax.sgd(0.5), wrappers=wrappers
  )


def loss_fn(params, state, x):
  variables = {
    "params": params,
    "batch_stats": state.batch_stats,
    "rngs": state.rngs,
  }
  out, new = state.apply_fn(variables, x, mutable=["batch_stats", "rngs"])
  return ((out - 1) ** 2).mean(), new


def train_step(state, x):
  (loss, new), grads = state.value_and_grad(loss_fn, state, x, has_aux=True)
  return state.apply_gradients(grads=grads, **new), loss


@pytest.mark.parametrize(
  ("wrappers", "donate"), [((), False), ((fs.LossScale("dynamic"),), True)]
)
def test_training_is_equal_to_training_with_nnx(wrappers, donate):
  state = create(wrappers)
  module = make()
  optimizer = nnx.Optimizer(module, optax.sgd(0.5), wrt=nnx.Param)
  # A new function, because jit caches by function.
  step = jax.jit(
    lambda state, x: train_step(state, x),
    donate_argnums=(0,) if donate else (),
  )

  @nnx.jit
  def nnx_step(module, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: ((m(x) - 1) ** 2).mean())(module)
    optimizer.update(module, grads)
    return loss

  inputs = [X, X * 2, X * 3]
  state, loss = step(state, inputs[0])
  np.testing.assert_allclose(loss, nnx_step(module, optimizer, X), rtol=1e-4)
  with compilations.count() as compiled:
    state, second = step(state, inputs[1])
    state, third = step(state, inputs[2])
  assert compiled.total == 0
  for x, loss in zip(inputs[1:], (second, third), strict=True):
    np.testing.assert_allclose(loss, nnx_step(module, optimizer, x), rtol=1e-4)
  wanted = nnx_adapter.split(module)[1]
  assert_same(state.params, wanted["params"])
  assert_same(state.batch_stats, wanted["batch_stats"])
  assert_same(state.rngs, wanted["rngs"])
  assert int(state.step) == 3


def test_skipped_step_keeps_statistics_and_random_streams():
  state = create([fs.LossScale("dynamic")])
  step = jax.jit(train_step)
  state, _ = step(state, X)
  bad = X.copy()
  bad[2, 1] = np.inf
  skipped, _ = step(state, bad)
  for name in ("params", "batch_stats", "rngs", "opt_state"):
    old, new = as_dict(getattr(state, name)), as_dict(getattr(skipped, name))
    assert old.keys() == new.keys()
    for path in old:
      np.testing.assert_array_equal(old[path], new[path])
  assert int(skipped.step) == 1
  assert float(skipped.wrapper_states["loss_scale"].scale) == 2.0**14
  # The next step has the dropout mask that the skipped step would have had.
  a, _ = step(state, X)
  b, _ = step(skipped, X)
  assert_same(a.params, b.params)
