"""NNX modules in a TrainState."""

import compilations
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tree_equality import assert_trees_close
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard.state import nnx_adapter

X = np.array(
  [[1.0, 2.0, -1.0], [0.5, -0.25, 3.0], [-2.0, 1.0, 0.0], [0.1, 0.2, 0.3]],
  np.float32,
)
SGD = optax.sgd(0.5)


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
  before = jax.tree.map(np.array, variables["params"])
  out, new = jax.jit(lambda v, x: apply_fn(v, x, mutable=True))(variables, X)
  np.testing.assert_allclose(out, same(X), rtol=1e-5, atol=1e-6)
  assert set(new) == {"batch_stats", "rngs"}
  _, wanted = nnx_adapter.split(same)
  assert_trees_close(new["batch_stats"], wanted["batch_stats"])
  assert_trees_close(new["rngs"], wanted["rngs"])
  # Neither the module nor the variables have changed.
  assert_trees_close(variables, nnx_adapter.split(module)[1])
  assert_trees_equal(variables["params"], before)
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


class Stateless(nnx.Module):
  def __init__(self, rngs):
    self.dense = nnx.Linear(3, 2, rngs=rngs)
    self.norm = nnx.BatchNorm(2, rngs=rngs)
    self.raw = nnx.data(jnp.ones(2))

  def __call__(self, x):
    return self.norm(self.dense(x)) * self.raw


def apply_ones(state):
  return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))


def test_bare_arrays():
  state = fs.create_train_state(Stateless(nnx.Rngs(0)), None, None, SGD)
  assert set(state.params) == {"dense", "norm"}
  variables = {"params": state.params, "batch_stats": state.batch_stats}
  call = lambda **arrays: state.apply_fn(variables | arrays, X, mode="eval")
  sevenfold = call(arrays={"raw": jnp.full(2, 7.0)})
  np.testing.assert_allclose(sevenfold, 7 * call(arrays=state.arrays), 1e-6)
  with pytest.raises(ValueError, match="'arrays'"):
    call()


def test_donating_the_state_keeps_the_arrays_of_the_module():
  module = Stateless(nnx.Rngs(0))
  kernel = np.array(module.dense.kernel[...])
  state = fs.create_train_state(module, None, None, SGD)
  new = jax.jit(apply_ones, donate_argnums=0)(state)
  assert state.params["dense"]["kernel"].is_deleted()
  for leaf in jax.tree.leaves(nnx.state(module)):
    assert not leaf.is_deleted()
  np.testing.assert_array_equal(module.dense.kernel[...], kernel)
  np.testing.assert_allclose(
    new.params["dense"]["kernel"], kernel - 0.5, rtol=1e-6
  )


def test_states_of_one_class_share_a_compiled_step():
  # A second module from the same class is equal for jit.
  one, two = (
    fs.create_train_state(Stateless(nnx.Rngs(seed)), None, None, SGD)
    for seed in (0, 1)
  )
  step = jax.jit(apply_ones)
  new = step(one)
  with compilations.count() as compiled:
    step(two)
    step(new)
  assert compiled.total == 0


@pytest.mark.parametrize(
  ("args", "kwargs", "factor"),
  [
    ((), {"method": "twice"}, 2),
    ((), {"method": "twice", "factor": 3.0}, 3),
    ((4.0,), {"method": Net.twice}, 4),
    ((), {"method": lambda m, x: m.dense(x) * 5}, 5),
  ],
)
def test_method(args, kwargs, factor):
  module = make()
  apply_fn, variables = nnx_adapter.split(module)
  out = apply_fn(variables, X, *args, **kwargs)
  np.testing.assert_allclose(out, module.dense(X) * factor, rtol=1e-5)


class RematInside(nnx.Module):
  """Rematerializes the layer that has running averages."""

  def __init__(self, rngs):
    self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=rngs)

  def __call__(self, x):
    return nnx.remat(lambda module, x: module(x))(self.norm, x)


def test_remat_with_batch_norm():
  module = RematInside(nnx.Rngs(0))
  apply_fn, variables = nnx_adapter.split(module)
  assert set(variables) == {"params", "batch_stats"}
  # In the mode "eval" the batch statistics are constant.
  out = apply_fn(variables, X[:2], mode="eval")
  both, new = apply_fn(variables, X[:2], mode="eval", mutable=True)
  np.testing.assert_array_equal(out, both)
  assert_trees_close(new["batch_stats"], variables["batch_stats"])
  # In training they are equal to those of a call of the module.
  trained, new = apply_fn(variables, X[:2], mutable=["batch_stats"])
  np.testing.assert_allclose(trained, module(X[:2]), rtol=1e-5, atol=1e-6)
  wanted = nnx_adapter.split(module)[1]["batch_stats"]
  assert_trees_close(new["batch_stats"], wanted)
  assert not np.allclose(
    new["batch_stats"]["norm"]["mean"], variables["batch_stats"]["norm"]["mean"]
  )
  module.eval()
  np.testing.assert_allclose(
    apply_fn({**variables, **new}, X[:2], mode="eval"), module(X[:2]), rtol=1e-5
  )
