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
from flaxshard.partitioning import FSDP

P = jax.sharding.PartitionSpec
STRATEGY = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
X = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
TX = optax.sgd(0.5, momentum=0.9)


class Net(nnx.Module):
  def __init__(self, rngs, names=None, is_remat=False):
    init = nnx.initializers.lecun_normal()
    if names:
      init = nnx.with_partitioning(init, names)
    self.dense = nnx.Linear(16, 8, kernel_init=init, rngs=rngs)
    self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)
    self.raw = nnx.data(jnp.ones(8))
    self.is_remat = is_remat

  def __call__(self, x):
    call = lambda module, x: module(x)
    normalize = nnx.remat(call) if self.is_remat else call
    return self.drop(normalize(self.norm, self.dense(x))) * self.raw

  def twice(self, x, factor=2.0):
    return self.dense(x) * factor


def make(seed=0, **kwargs):
  return Net(nnx.Rngs(seed), **kwargs)


def create(model, rng=None, **kwargs):
  return fs.create_train_state(model, rng, None, TX, **kwargs)


def split(module):
  """Returns the apply function of a state, and its variables."""
  state = create(module)
  return state.apply_fn, fs.merge_lora(state)


def assert_close(a, b):
  np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# Calls.


@pytest.mark.parametrize(
  "is_remat", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_calls_are_equal_to_calls_of_the_module(is_remat):
  module, same = make(is_remat=is_remat), make()
  apply_fn, variables = split(module)
  before = jax.tree.map(np.array, variables["params"])
  call = jax.jit(lambda v, x: apply_fn(v, x, mutable=True))
  out, new = call(variables, X)
  assert_close(out, same(X))
  assert set(new) == {"batch_stats", "rngs", "arrays"}
  _, wanted = split(same)
  assert_trees_close(new, {name: wanted[name] for name in new})
  # Neither the module nor the variables have changed.
  assert_trees_close(variables, split(module)[1])
  assert_trees_equal(variables["params"], before)
  # The second call has another dropout mask, as a second call of the module.
  again, _ = call({**variables, **new}, X)
  assert_close(again, same(X))
  assert ((np.asarray(again) == 0) != (np.asarray(out) == 0)).any()


def test_mode():
  module, same = make(), make()
  apply_fn, variables = split(module)
  out = apply_fn(variables, X, mode="eval")
  same.eval()
  assert_close(out, same(X))
  # No dropout, and normalization by the running averages.
  assert_close(out, module.dense(X) / np.sqrt(1 + 1e-5))
  _, new = apply_fn(variables, X, mode="eval", mutable=True)
  assert_trees_equal(new["batch_stats"], variables["batch_stats"])
  # Without `mode`, the module keeps the mode that it was split in.
  apply_eval, eval_variables = split(same)
  assert_close(apply_eval(eval_variables, X), out)
  trained, _ = apply_eval(eval_variables, X, mode="train", mutable=True)
  assert_close(trained, make()(X))
  # Arrays outside of variables are a collection.
  variables["arrays"] = {"raw": jnp.full(8, 7.0)}
  assert_close(apply_fn(variables, X, mode="eval"), 7 * out)


@pytest.mark.parametrize(
  ("mutable", "words"),
  [
    (False, r"rngs\[drop"),
    (["batch_stats"], r"rngs\[drop/rngs/count\].*mutable=\['rngs'\]"),
    ("rngs", r"batch_stats\[norm/mean\]"),
  ],
)
def test_change_of_an_immutable_collection_raises(mutable, words):
  apply_fn, variables = split(make())
  with pytest.raises(ValueError, match=words):
    jax.jit(lambda v: apply_fn(v, X, mutable=mutable))(variables)


@pytest.mark.parametrize(
  ("args", "method", "factor"),
  [((), "twice", 2), ((4.0,), Net.twice, 4), ((), lambda m, x: m.twice(x), 2)],
)
def test_method(args, method, factor):
  module = make()
  apply_fn, variables = split(module)
  out = apply_fn(variables, X, *args, method=method)
  np.testing.assert_allclose(out, module.dense(X) * factor, rtol=1e-5)


# States.


class Kept(nnx.Variable):
  pass


class OfManyKinds(nnx.Module):
  def __init__(self):
    self.tree = nnx.Param({"a": jnp.ones(3), "b": {"c": jnp.full(3, 2.0)}})
    self.layers = nnx.List([nnx.Param(jnp.full(3, 5.0))])
    self.kept = Kept(jnp.full(2, 3.0))
    self.cache = nnx.Cache(jnp.zeros(1))

  def __call__(self, x):
    tree = self.tree.get_value()
    return (x * tree["a"] + tree["b"]["c"]) * self.layers[0][...]


def test_variables_of_many_kinds():
  state = create(OfManyKinds(), wrappers=[fs.LossScale("dynamic")])
  assert float(state.Kept["kept"][0]) == 3.0
  assert float(state.cache["cache"][0]) == 0.0
  variables = fs.merge_lora(state)

  def loss_fn(params):
    x = np.ones(3, np.float32)
    return state.apply_fn(variables | {"params": params}, x).sum()

  step = jax.jit(lambda s: s.minimize(loss_fn))
  new, loss = step(state)
  assert float(loss) == 45.0
  # The index of a list is a string, as Orbax restores it.
  assert jax.tree.map(np.ndarray.tolist, jax.device_get(new.params)) == {
    "tree": {"a": [-1.5] * 3, "b": {"c": [-0.5] * 3}},
    "layers": {"0": [3.5] * 3},
  }
  with compilations.count() as compiled:
    step(new)
  assert compiled.total == 0


def test_states_share_a_compiled_step_and_no_arrays_with_their_module():
  module = make()
  kernel = np.array(module.dense.kernel[...])
  # A second module from the same class is equal for jit.
  state, other = create(module), create(make(1))
  step = jax.jit(
    lambda s: s.apply_gradients(grads=jax.tree.map(jnp.ones_like, s.params)),
    donate_argnums=0,
  )
  new = step(state)
  assert state.params["dense"]["kernel"].is_deleted()
  assert not any(x.is_deleted() for x in jax.tree.leaves(nnx.state(module)))
  np.testing.assert_array_equal(module.dense.kernel[...], kernel)
  np.testing.assert_allclose(
    new.params["dense"]["kernel"], kernel - 0.5, rtol=1e-6
  )
  with compilations.count() as compiled:
    step(other)
    step(new)
  assert compiled.total == 0


# On a mesh, and abstractly.


@pytest.mark.parametrize("is_instance", [False, True])
def test_metadata_rules_and_values(is_instance):
  model, rng = lambda rngs: Net(rngs, (None, "model")), jax.random.key(0)
  if is_instance:
    with jax.set_mesh(STRATEGY.mesh):
      model = model(nnx.Rngs(rng))
  state = create(model, rng, strategy=STRATEGY)
  assert state.params["dense"]["kernel"].sharding.spec == P(None, "model")
  kwargs = dict(strategy=STRATEGY, rules=FSDP(min_size=64))
  state = create(model, rng, **kwargs)
  for params in (state.params, state.opt_state[0].trace):
    assert params["dense"]["kernel"].sharding.spec == P("replica", "model")
    assert params["norm"]["scale"].sharding.spec == P()
  # NNX functions create new initializers at each call, so apply_fn differs.
  own = state.replace(apply_fn=None)
  plain = create(lambda rngs: Net(rngs), rng)
  assert_trees_close(own, plain.replace(apply_fn=None))
  call = jax.jit(lambda s: s.apply_fn(fs.merge_lora(s), X, mutable=True)[0])
  assert_close(call(state), call(plain))
  with compilations.count() as compiled:
    abstract = create(model, rng, **kwargs, abstract=True)
  assert compiled.total == 0
  describe = lambda x: (x.shape, x.dtype, x.sharding)
  wanted = jax.tree.map(describe, own)
  assert jax.tree.map(describe, abstract.replace(apply_fn=None)) == wanted


def test_an_abstract_module_is_enough_for_an_abstract_state():
  state = create(nnx.eval_shape(make), abstract=True)
  shapes = lambda state: jax.tree.map(jnp.shape, state.params)
  assert shapes(state) == shapes(create(make()))
