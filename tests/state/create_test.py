"""create_train_state and TrainState.create: shardings, inputs, precision."""

import dataclasses
import math
from typing import Any, NamedTuple
import warnings

import compilations
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tree_equality import assert_trees_close

import flaxshard as fs
from flaxshard.partitioning import FSDP

P = jax.sharding.PartitionSpec
STRATEGY = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
MESH = STRATEGY.mesh
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)
KEY = jax.random.key(0)


def put(x, *spec, mesh=MESH):
  return jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))


def specs(tree):
  """Returns the non-empty specs by path; checks that all are on the mesh."""
  found = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    assert leaf.committed
    assert not getattr(leaf, "weak_type", False)
    assert isinstance(leaf.sharding, jax.sharding.NamedSharding)
    assert leaf.sharding.mesh == MESH
    if leaf.sharding.spec != P():
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      found[name] = leaf.sharding.spec
  return found


@dataclasses.dataclass(frozen=True)
class Local(fs.wrappers.Base):
  """A wrapper with a per-replica copy of the parameters."""

  def init(self, params, tx):
    return {"local": params, "count": 0}

  def specs(self, state):
    local = jax.tree.map(lambda _: P("replica"), state["local"])
    return {"local": local, "count": P()}


def repeat_for_four_replicas(state):
  """Returns a state with the wrapper `Local` for four replicas."""
  repeat = lambda x: jnp.repeat(x, 4, axis=0)
  local = {**state.wrapper_states["local"]}
  local["local"] = jax.tree.map(repeat, local["local"])
  return state.replace(wrapper_states={**state.wrapper_states, "local": local})


class Norm(nn.Module):
  @nn.compact
  def __call__(self, x, train=True):
    x = nn.Dense(8, name="in")(x)
    x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
    return nn.Dense(4, name="out")(x)


RULES = (("in/kernel", P("replica", "model")), ("in/bias", P("model")))


MODEL, ADAM = Norm(), optax.adam(0.1)


def make(model=MODEL, rng=KEY, x=X, tx=ADAM, **kwargs):
  return fs.create_train_state(model, rng, x, tx, **kwargs)


# Linen.


def test_every_leaf_has_its_sharding():
  wrappers = [fs.LossScale("dynamic"), Local()]
  state = make(wrappers=wrappers, strategy=STRATEGY, rules=RULES)
  wanted = {"in/kernel": P("replica", "model"), "in/bias": P("model")}
  assert specs(state.params) == wanted
  assert specs(state.opt_state) == {
    f"0/{slot}/{path}": spec
    for slot in ("mu", "nu")
    for path, spec in wanted.items()
  }
  local = state.wrapper_states["local"]["local"]
  paths = ["in/kernel", "in/bias", "norm/scale", "norm/bias"]
  paths += ["out/kernel", "out/bias"]
  assert specs(local) == {
    **dict.fromkeys(paths, P("replica")),
    # Within a replica, the copies are split like the parameters.
    "in/kernel": P("replica", None, "model"),
    "in/bias": P("replica", "model"),
  }
  assert specs(state.wrapper_states["loss_scale"]) == {}
  assert specs(state.batch_stats) == {}
  assert specs(state.step) == {}
  assert len(specs(state)) == 2 + 4 + 6
  shards = state.params["in"]["kernel"].addressable_shards
  assert {shard.data.shape for shard in shards} == {(4, 4)}
  # The values are equal to those of a state without a strategy.
  assert_trees_close(state, repeat_for_four_replicas(make(wrappers=wrappers)))


class Annotated(nn.Module):
  @nn.compact
  def __call__(self, x):
    init = nn.initializers.ones
    x = nn.Dense(8, kernel_init=nn.with_partitioning(init, ("replica",)))(x)
    init = nn.with_logical_partitioning(init, ("in", "out"))
    mean = self.variable(
      "stats", "mean", nn.with_partitioning(jnp.zeros, ("model",)), (8,)
    )
    return nn.Dense(4, kernel_init=init)(x + mean.value)


def test_partitioning_metadata_and_logical_names():
  with nn.logical_axis_rules((("in", "model"), ("out", None))):
    state = make(Annotated(), strategy=STRATEGY)
  wanted = {"Dense_0/kernel": P("replica"), "Dense_1/kernel": P("model")}
  assert specs(state.params) == wanted
  assert specs(state.stats) == {"mean": P("model")}
  with pytest.raises(ValueError, match=r"params\[Dense_1/kernel\]"):
    make(Annotated(), strategy=STRATEGY)
  state = make(Annotated(), strategy=STRATEGY, strict=False)
  assert specs(state.params) == {"Dense_0/kernel": P("replica")}


class Large(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(512)(nn.relu(nn.Dense(1024)(x)))


def test_no_device_holds_the_whole_state():
  x = np.ones((1, 512), np.float32)
  wrappers = [fs.LossScale("dynamic")]
  kwargs = dict(wrappers=wrappers, strategy=fs.Strategy(), rules="fsdp")
  create = lambda key: make(Large(), key, x, **kwargs)
  nbytes = sum(
    math.prod(x.shape) * x.dtype.itemsize
    for x in jax.tree.leaves(make(Large(), KEY, x, abstract=True, **kwargs))
  )
  memory = jax.jit(create).lower(KEY).compile().memory_analysis()
  assert nbytes > 12e6
  # One eighth on each device, and the biases, which are not split.
  assert memory.output_size_in_bytes < 0.13 * nbytes
  assert memory.temp_size_in_bytes < 0.13 * nbytes
  # jit drops the sample input: its values are not used.
  assert memory.argument_size_in_bytes < 1000


def test_step_in_the_global_view_keeps_the_shardings():
  # The gradient of the bias is split as the kernel is; XLA would leave it so.
  state = make(nn.Dense(32), strategy=STRATEGY, rules=(FSDP(min_size=64),))
  shardings = jax.tree.map(lambda x: x.sharding, state)

  def step(state):
    loss = lambda p: (state.apply_fn({"params": p}, X) ** 2).mean()
    return state.minimize(loss)

  jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
  state, _ = jitted(state)
  with compilations.count() as compiled:
    state, _ = jitted(state)
  assert compiled.total == 0
  assert jax.tree.map(lambda x: x.sharding, state) == shardings


def test_keys_and_inputs_on_any_device():
  make_dense = lambda **kwargs: make(
    nn.Dense(8), tx=optax.sgd(0.1), strategy=STRATEGY, **kwargs
  )
  wanted = nn.Dense(8).init(KEY, X)["params"]
  for rng in (
    jax.random.PRNGKey(0),
    {"params": jax.device_put(KEY, jax.devices()[3])},
    put(KEY),
  ):
    assert_trees_close(make_dense(rng=rng, x=put(X, "model")).params, wanted)
  other = jax.sharding.Mesh(MESH.devices[::-1], MESH.axis_names)
  with pytest.raises(ValueError, match=r"sample_input\)\[1/0\]"):
    make_dense(x=put(X, "model", mesh=other))


# NNX.


class Net(nnx.Module):
  def __init__(self, rngs, names=None):
    init = nnx.initializers.lecun_normal()
    if names:
      init = nnx.with_partitioning(init, names)
    self.dense = nnx.Linear(16, 8, kernel_init=init, rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)
    self.raw = nnx.data(jnp.ones(8))
    self.policy = fs.Policy("mixed_float16")

  def __call__(self, x):
    return self.drop(self.norm(self.dense(x))) * self.raw


def call(state):
  names = ("params", "batch_stats", "rngs", "arrays")
  variables = {name: getattr(state, name) for name in names}
  out, _ = state.apply_fn(variables, X, mutable=["batch_stats", "rngs"])
  return np.asarray(out)


@pytest.mark.parametrize("instance", [False, True])
def test_nnx_metadata_rules_and_values(instance):
  model = lambda rngs: Net(rngs, (None, "model"))
  if instance:
    with jax.set_mesh(MESH):
      model = model(nnx.Rngs(KEY))
  state = make(model, x=None, strategy=STRATEGY)
  assert specs(state.params) == {"dense/kernel": P(None, "model")}
  state = make(model, x=None, strategy=STRATEGY, rules=FSDP(min_size=64))
  prefixes = ("params", "opt_state/0/mu", "opt_state/0/nu")
  assert specs(state) == {
    f"{prefix}/dense/kernel": P("replica", "model") for prefix in prefixes
  }
  plain = make(lambda rngs: Net(rngs), x=None)
  for name in ("params", "batch_stats", "rngs", "arrays", "opt_state"):
    assert_trees_close(getattr(state, name), getattr(plain, name))
  np.testing.assert_allclose(call(state), call(plain), rtol=1e-5, atol=1e-6)


# TrainState.create.


def test_create_keeps_the_sharding_of_given_arrays():
  params = {
    "split": put(X, None, "model"),
    "whole": put(X),
    "one": jnp.asarray(X),
    "numpy": X,
  }
  state = fs.TrainState.create(
    apply_fn=None,
    params=params,
    tx=ADAM,
    wrappers=[Local()],
    strategy=STRATEGY,
    batch_stats={"mean": put(X, "model"), "var": X},
  )
  assert specs(state.params) == {"split": P(None, "model")}
  assert specs(state.batch_stats) == {"mean": P("model")}
  assert specs(state.opt_state) == {
    "0/mu/split": P(None, "model"),
    "0/nu/split": P(None, "model"),
  }
  assert len(specs(state.wrapper_states)) == 4
  assert specs(state.step) == {}
  plain = fs.TrainState.create(
    apply_fn=None,
    params=jax.device_get(params),
    tx=ADAM,
    wrappers=[Local()],
    batch_stats={"mean": X, "var": X},
  )
  assert_trees_close(state, repeat_for_four_replicas(plain))
  step = lambda s: s.apply_gradients(grads=s.params)
  new = STRATEGY.run(step, (state,))
  assert new.params["split"].sharding.spec == P(None, "model")


# abstract=True.


class Nested(nn.Module):
  """Has a collection with a PRNG key besides its parameters."""

  @nn.compact
  def __call__(self, x):
    self.variable("keys", "noise", lambda: jax.random.key(3))
    return nn.Dense(8, dtype=jnp.bfloat16)(x)


def assert_abstract(model, x=X, **kwargs):
  """Compares the abstract state with the concrete one, leaf by leaf."""
  concrete = make(model, x=x, **kwargs)
  before = jax.live_arrays()
  with compilations.count() as compiled:
    state = make(model, x=x, abstract=True, **kwargs)
  assert compiled.total == 0
  known = set(map(id, before))
  assert all(id(array) in known for array in jax.live_arrays())
  assert type(state) is type(concrete)
  # NNX functions create new initializers at each call, so apply_fn differs.
  assert jax.tree.structure(state.replace(apply_fn=None)) == jax.tree.structure(
    concrete.replace(apply_fn=None)
  )
  flat = jax.tree_util.tree_leaves_with_path(state)
  for (path, leaf), wanted in zip(flat, jax.tree.leaves(concrete), strict=True):
    where = jax.tree_util.keystr(path)
    assert isinstance(leaf, jax.ShapeDtypeStruct), where
    assert leaf.shape == wanted.shape, where
    assert leaf.dtype == wanted.dtype, where
    assert leaf.sharding == wanted.sharding, where
  return state


@pytest.mark.parametrize(
  "wrappers", [(), (fs.LossScale("dynamic"), fs.AGN(communication_period=2))]
)
def test_abstract_linen_state_equals_the_concrete_state(wrappers):
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # AGN on its stability without replicas
    # Without a strategy, and with one, whose arrays are replicated or split.
    assert_abstract(Nested(), wrappers=wrappers)
    if not wrappers:
      assert_abstract(Nested(), strategy=STRATEGY)
    state = assert_abstract(
      Norm(), wrappers=wrappers, strategy=STRATEGY, rules=RULES
    )
  if wrappers:
    local = state.wrapper_states["agn"].local_params["in"]["kernel"]
    assert local.shape == (4, 16, 8)
    assert local.sharding.spec == P("replica", None, "model")


def test_abstract_nnx_state_equals_the_concrete_state():
  named = lambda rngs: Net(rngs, (None, "model"))
  module = Net(nnx.Rngs(KEY))
  state = assert_abstract(module, x=None, wrappers=[fs.LossScale("auto")])
  # The scale follows the policy of the module, mixed_float16.
  assert state.wrapper_states["loss_scale"].scale.dtype == jnp.float32
  state = assert_abstract(named, x=None, strategy=STRATEGY)
  assert state.params["dense"]["kernel"].sharding.spec == P(None, "model")
  # An abstract module is enough.
  module = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
  from_abstract = make(module, x=None, abstract=True)
  shapes = lambda state: jax.tree.map(lambda x: x.shape, state.params)
  assert shapes(from_abstract) == shapes(state)


# Keys, inputs and keyword arguments of models.


class Batch(NamedTuple):
  image: Any
  weight: Any


class TakesBatch(nn.Module):
  @nn.compact
  def __call__(self, batch):
    assert isinstance(batch, Batch)
    return nn.Dense(2)(batch.image) * batch.weight


def test_named_tuple_is_one_argument():
  batch = Batch(X, np.ones((2, 1), np.float32))
  wanted = TakesBatch().init(KEY, batch)["params"]
  for sample_input in (batch, (batch,)):
    state = make(TakesBatch(), x=sample_input)
    assert_trees_close(state.params, wanted)
  out = state.apply_fn({"params": state.params}, batch)
  assert out.shape == (2, 2)


class Branching(nn.Module):
  """Branches on `train` and `extra`; `scale` is an array."""

  @nn.compact
  def __call__(self, x, train, *, scale=None, extra=False):
    x = nn.Dense(2 if train else 16)(x)
    x = nn.BatchNorm(use_running_average=not train)(x)
    if scale is not None:
      x = x * self.param("gain", lambda key: scale * 2)
    return nn.Dense(4)(x) if extra else x


@pytest.mark.parametrize(
  "kwargs",
  [{}, {"strategy": STRATEGY, "rules": (("kernel", P(None, "model")),)}],
  ids=["one_device", "rules"],
)
def test_flags_and_arrays_by_name(kwargs):
  scale = np.arange(16, dtype=np.float32)
  state = make(Branching(), train=False, extra=True, scale=scale, **kwargs)
  np.testing.assert_array_equal(state.params["gain"], scale * 2)
  assert state.params["Dense_1"]["kernel"].shape == (16, 4)
  kernel = state.params["Dense_0"]["kernel"]
  wanted = P(None, "model") if kwargs else P()
  assert getattr(kernel.sharding, "spec", P()) == wanted
  # The values are those of Linen's own `init`.
  own = Branching().init(KEY, X, train=False, extra=True, scale=scale)["params"]
  np.testing.assert_allclose(kernel, own["Dense_0"]["kernel"], rtol=1e-6)
  # Beside the input, which may be a shape.
  shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
  for train, features in ((True, 2), (False, 16)):
    state = make(Branching(), x=(shape, train), **kwargs, abstract=True)
    assert state.params["Dense_0"]["kernel"].shape == (16, features)
    mean = state.batch_stats["BatchNorm_0"]["mean"]
    assert mean.shape == (features,)


# The precision in which a model computes, and the scale of its loss.


class AnyPolicy(nn.Module):
  policy: Any = None
  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    return nn.Dense(2)(x)


class InnerFloat16(nn.Module):
  """No `dtype` and no `policy` of its own."""

  dtype_of_layer: object = jnp.float16

  @nn.compact
  def __call__(self, x):
    return nn.Dense(2, dtype=self.dtype_of_layer)(x).astype(jnp.float32)


class ElementwiseFloat16(nn.Module):
  """Its matrix product is in float32."""

  @nn.compact
  def __call__(self, x):
    half = nn.Dense(2)(x).astype(jnp.float16)
    return (half * half).astype(jnp.float32)


class InnerNNX(nnx.Module):
  def __init__(self, rngs):
    self.hidden = nnx.Linear(16, 2, dtype=jnp.float16, rngs=rngs)

  def __call__(self, x):
    return self.hidden(x).astype(jnp.float32)


def create_and_listen(model, *wrappers, **kwargs):
  """Returns the state, and what is said when it is created."""
  with warnings.catch_warnings(record=True) as record:
    warnings.simplefilter("always")
    state = make(model, wrappers=wrappers, **kwargs)
  said = [w for w in record if w.category is UserWarning]
  assert all(w.filename == __file__ for w in said)
  return state, [str(w.message) for w in said]


HALF = {
  "linen": lambda: InnerFloat16(),
  "elementwise": lambda: ElementwiseFloat16(),
  "nnx": lambda: InnerNNX(nnx.Rngs(0)),
  "nnx function": lambda: lambda rngs: InnerNNX(rngs),
  "policy": lambda: AnyPolicy(policy=fs.Policy("mixed_float16")),
  "dtype": lambda: AnyPolicy("no policy", "float16"),
}
OTHERS = {
  "float32": lambda: InnerFloat16(jnp.float32),
  "bfloat16": lambda: InnerFloat16(jnp.bfloat16),
  "policy first": lambda: AnyPolicy(fs.Policy("float32"), jnp.float16),
  "dtype bfloat16": lambda: AnyPolicy(dtype=jnp.bfloat16),
  # The names mean something else.
  "other names": lambda: AnyPolicy("mixed_float16", "auto"),
}


@pytest.mark.parametrize("strategy", [None, fs.Strategy()], ids=["", "mesh"])
@pytest.mark.parametrize("name", [*HALF, *OTHERS])
def test_auto_loss_scale_follows_the_precision(name, strategy):
  make = (HALF | OTHERS)[name]
  auto = fs.LossScale("auto")
  state, said = create_and_listen(make(), auto, strategy=strategy)
  assert ("loss_scale" in state.metrics()) == (name in HALF)
  assert said == []
  shapes = jax.ShapeDtypeStruct(X.shape, X.dtype)
  _, said = create_and_listen(make(), x=shapes, strategy=strategy)
  assert len(said) == (name in HALF)
  assert all("computes in float16" in text for text in said)
  # It may be restored for an evaluation, which needs no scale.
  assert create_and_listen(make(), abstract=True)[1] == []
