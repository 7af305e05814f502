"""NNX modules in a TrainState."""

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
  """Paths and values; keys as their data, so that they can be compared."""
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


def test_is_module():
  assert nnx_adapter.is_module(make())
  assert not nnx_adapter.is_module(Net)
  assert not nnx_adapter.is_module(None)


def test_split_names_collections_as_linen_does():
  module = make()
  _, variables = nnx_adapter.split(module)
  assert set(variables) == {"params", "batch_stats", "rngs"}
  assert set(variables["params"]) == {"dense", "norm"}
  np.testing.assert_array_equal(
    variables["params"]["dense"]["kernel"], module.dense.kernel[...]
  )
  assert set(variables["batch_stats"]["norm"]) == {"mean", "var"}
  assert set(variables["rngs"]) == {"drop"}


def test_other_kinds_of_variables():
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
  # Orbax has string keys only.
  assert float(variables["params"]["layers"]["0"][0]) == 5.0


def test_values_are_those_of_the_module_itself():
  module, same = make(), make()
  apply_fn, variables = nnx_adapter.split(module)
  before = as_dict(variables)
  out, new = jax.jit(lambda v, x: apply_fn(v, x, mutable=True))(variables, X)
  np.testing.assert_allclose(out, same(X), rtol=1e-5, atol=1e-6)
  assert set(new) == {"batch_stats", "rngs"}
  _, wanted = nnx_adapter.split(same)
  assert_same(new["batch_stats"], wanted["batch_stats"])
  assert_same(new["rngs"], wanted["rngs"])
  # Neither the module nor what was split off has changed.
  assert_same(variables, nnx_adapter.split(module)[1])
  for name, value in as_dict(variables).items():
    np.testing.assert_array_equal(value, before[name])
  # The second call has another mask, as the module's own would.
  out2, _ = apply_fn({**variables, **new}, X, mutable=True)
  np.testing.assert_allclose(out2, same(X), rtol=1e-5, atol=1e-6)
  assert ((np.asarray(out2) == 0) != (np.asarray(out) == 0)).any()


def test_eval_and_train_mode():
  module, same = make(), make()
  apply_fn, variables = nnx_adapter.split(module)
  out = apply_fn(variables, X, mode="eval")
  same.eval()
  np.testing.assert_allclose(out, same(X), rtol=1e-5, atol=1e-6)
  # Nothing is dropped: the output is the normalized one by running averages.
  np.testing.assert_allclose(
    out, module.dense(X) / np.sqrt(1 + 1e-5), rtol=1e-4, atol=1e-5
  )
  # A module split in eval mode stays in it, unless asked.
  apply_eval, eval_variables = nnx_adapter.split(same)
  np.testing.assert_allclose(apply_eval(eval_variables, X), out, rtol=1e-6)
  trained, _ = apply_eval(eval_variables, X, mode="train", mutable=True)
  np.testing.assert_allclose(trained, make()(X), rtol=1e-5, atol=1e-6)


def test_mutable_says_what_is_returned():
  apply_fn, variables = nnx_adapter.split(make())
  both = ["batch_stats", "rngs"]
  _, new = apply_fn(variables, X, mutable=both)
  assert set(new) == set(both)
  _, new = apply_fn(variables, X, mode="eval", mutable="batch_stats")
  assert set(new) == {"batch_stats"}
  assert_same(new["batch_stats"], variables["batch_stats"])
  out, new = apply_fn(variables, X, mode="eval", mutable=[])
  assert new == {}
  np.testing.assert_array_equal(out, apply_fn(variables, X, mode="eval"))
  _, new = apply_fn(variables, X, mode="eval", mutable=["params"])
  assert_same(new["params"], variables["params"])


def test_a_change_that_would_be_lost_is_an_error():
  apply_fn, variables = nnx_adapter.split(make())
  with pytest.raises(
    ValueError, match=r"changed rngs\[drop/rngs/count\].*mutable=\['rngs'\]"
  ):
    apply_fn(variables, X, mutable=["batch_stats"])
  with pytest.raises(ValueError, match=r"changed batch_stats\[norm/mean\]"):
    apply_fn(variables, X, mutable="rngs")
  with pytest.raises(ValueError, match="would be lost"):
    jax.jit(lambda v: apply_fn(v, X))(variables)


def test_other_methods():
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


@pytest.mark.parametrize(
  ("change", "kwargs", "match"),
  [
    ({"rngs": None}, {}, r"variables lack \['rngs'\]; the module has"),
    ({"stats": {}}, {}, r"variables names \['stats'\]; the module has"),
    ({}, {"mutable": ["stats"]}, r"mutable names \['stats'\]; the module"),
    ({}, {"mutable": "stats"}, r"mutable names \['stats'\]; the module"),
    ({}, {"mode": "evaluate"}, "mode='evaluate'; allowed: 'train', 'eval'"),
  ],
)
def test_wrong_calls(change, kwargs, match):
  apply_fn, variables = nnx_adapter.split(make())
  variables = {
    k: v for k, v in {**variables, **change}.items() if v is not None
  }
  with pytest.raises(ValueError, match=f"apply_fn: {match}"):
    apply_fn(variables, X, **kwargs)


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


@pytest.mark.parametrize("wrappers", [(), (fs.LossScale("dynamic"),)])
@pytest.mark.parametrize("donate", [False, True])
def test_training_equals_training_the_module_itself(wrappers, donate):
  state = create(wrappers)
  module = make()
  optimizer = nnx.Optimizer(module, optax.sgd(0.5), wrt=nnx.Param)
  # A function of its own, so that the count below is of this test alone.
  step = jax.jit(
    lambda state, x: train_step(state, x),
    donate_argnums=(0,) if donate else (),
  )

  @nnx.jit
  def nnx_step(module, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: ((m(x) - 1) ** 2).mean())(module)
    optimizer.update(module, grads)
    return loss

  for i in range(3):
    state, loss = step(state, X * (i + 1))
    np.testing.assert_allclose(
      loss, nnx_step(module, optimizer, X * (i + 1)), rtol=1e-4
    )
  wanted = nnx_adapter.split(module)[1]
  assert_same(state.params, wanted["params"])
  assert_same(state.batch_stats, wanted["batch_stats"])
  assert_same(state.rngs, wanted["rngs"])
  assert int(state.step) == 3
  assert step._cache_size() == 1


def test_a_skipped_step_holds_back_statistics_and_random_streams():
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
  # The mask of the retry is the one that the skipped step would have had.
  a, _ = step(state, X)
  b, _ = step(skipped, X)
  assert_same(a.params, b.params)


def test_auto_reads_the_dtype_of_the_module():
  class Half(nnx.Module):
    dtype = jnp.float16

    def __init__(self, rngs):
      self.dense = nnx.Linear(3, 2, dtype=self.dtype, rngs=rngs)

  make_state = lambda module: fs.create_train_state(
    module, None, None, optax.sgd(0.1), wrappers=[fs.LossScale("auto")]
  )
  on = make_state(Half(nnx.Rngs(0))).wrapper_states["loss_scale"]
  assert float(on.scale) == 2.0**15
  assert make_state(make()).wrapper_states["loss_scale"] == ()


def test_modules_that_cannot_be():
  class Empty(nnx.Module):
    pass

  with pytest.raises(ValueError, match="model=Empty has no parameters"):
    fs.create_train_state(Empty(), None, None, optax.sgd(0.1))
  with pytest.raises(TypeError, match="model must be an instance"):
    fs.create_train_state(Net, None, None, optax.sgd(0.1))
