"""create_train_state and TrainState.create: shardings, inputs, precision."""

from collections.abc import Callable
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
import quadratic_states
from tree_equality import assert_trees_close

import flaxshard as fs

P = jax.sharding.PartitionSpec
STRATEGY = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
MESH = STRATEGY.mesh
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)
KEY = jax.random.key(0)
ADAM = optax.adam(0.1)
WRAPPERS = (fs.LossScale("dynamic"), fs.AGN(10))


def put(x, *spec, mesh=MESH):
  return jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))


def specs(tree):
  """Returns the non-empty specs by path; checks that all are on the mesh."""
  found = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    assert leaf.committed and not getattr(leaf, "weak_type", False)
    assert leaf.sharding.mesh == MESH
    if leaf.sharding.spec != P():
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      found[name] = leaf.sharding.spec
  return found


class Norm(nn.Module):
  """Has batch statistics, and a PRNG key in a collection."""

  @nn.compact
  def __call__(self, x, train=True):
    self.variable("keys", "noise", lambda: jax.random.key(3))
    x = nn.Dense(8, name="in")(x)
    x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
    return nn.Dense(4, dtype=jnp.bfloat16, name="out")(x)


MODEL = Norm()
RULES = (("in/kernel", P("replica", "model")), ("in/bias", P("model")))


def make(model=MODEL, rng=KEY, x=X, tx=ADAM, **kwargs):
  return fs.create_train_state(model, rng, x, tx, **kwargs)


# Shardings.


def test_a_step_in_the_global_view_keeps_the_shardings():
  # The gradient of the bias is split as the kernel is; XLA would leave it so.
  rules = (fs.FSDP(min_size=64),)
  state = make(nn.Dense(32), strategy=STRATEGY, rules=rules)
  loss = lambda p: (state.apply_fn({"params": p}, X) ** 2).mean()
  shardings = jax.tree.map(lambda x: x.sharding, state)
  step = jax.jit(lambda s: s.minimize(loss)[0], out_shardings=shardings)
  new = step(state)
  with compilations.count() as compiled:
    new = step(new)
  assert compiled.total == 0
  assert jax.tree.map(lambda x: x.sharding, new) == shardings


def test_every_leaf_has_its_sharding():
  state = make(wrappers=WRAPPERS, strategy=STRATEGY, rules=RULES)
  wanted = {"in/kernel": P("replica", "model"), "in/bias": P("model")}
  assert specs(state.params) == wanted
  assert specs(state.opt_state) == {
    f"0/{slot}/{path}": spec
    for slot in ("mu", "nu")
    for path, spec in wanted.items()
  }
  agn = state.wrapper_states["agn"]
  paths = ["norm/scale", "norm/bias", "out/kernel", "out/bias"]
  local = {
    **dict.fromkeys(paths, P("replica")),
    # Within a replica, the copies are split like the parameters.
    "in/kernel": P("replica", None, "model"),
    "in/bias": P("replica", "model"),
  }
  assert specs(agn.local_params) == specs(agn.grad_accum) == local
  fields = state.step, state.batch_stats, state.wrapper_states["loss_scale"]
  assert specs(fields) == {}
  shards = state.params["in"]["kernel"].addressable_shards
  assert {shard.data.shape for shard in shards} == {(4, 4)}
  # They are what `describe` shows, with their bytes.
  rows = STRATEGY.describe(state).rows
  found = {(row.group, row.path): (row.nbytes, row.spec) for row in rows}
  assert len(found) == len(jax.tree.leaves(state))
  assert found["step", "step"] == (4, "P()")
  kernel = found["wrapper_states", "agn/local_params/in/kernel"]
  assert kernel == (4 * 512, "P('replica', None, 'model')")
  # The values are equal to those of a state without a strategy.
  assert_trees_close(state.without_wrappers(), make())
  repeat = lambda p: jnp.stack([p] * 4)
  assert_trees_close(agn.local_params, jax.tree.map(repeat, state.params))


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


def test_no_device_holds_the_whole_state():
  model = nn.Sequential([nn.Dense(1024), nn.relu, nn.Dense(512)])
  x = np.ones((1, 512), np.float32)
  kwargs = dict(wrappers=WRAPPERS[:1], strategy=fs.Strategy(), rules="fsdp")
  create = lambda key, **more: make(model, key, x, **kwargs, **more)
  nbytes = sum(
    math.prod(x.shape) * x.dtype.itemsize
    for x in jax.tree.leaves(create(KEY, abstract=True))
  )
  memory = jax.jit(create).lower(KEY).compile().memory_analysis()
  assert nbytes > 12e6
  # One eighth on each device, and the biases, which are not split.
  assert memory.output_size_in_bytes < 0.13 * nbytes
  assert memory.temp_size_in_bytes < 0.13 * nbytes
  # jit drops the sample input: its values are not used.
  assert memory.argument_size_in_bytes < 1000


def test_keys_and_inputs_on_any_device():
  make_dense = lambda **kwargs: make(nn.Dense(8), strategy=STRATEGY, **kwargs)
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


def test_create_keeps_the_sharding_of_given_arrays():
  split = put(X, None, "model")
  params = {"split": split, "whole": put(X), "one": jnp.asarray(X), "numpy": X}
  stats = {"mean": put(X, "model"), "var": X}
  wrappers = [fs.EMA(), fs.Accumulate(2)]
  create = lambda params, stats, **kwargs: quadratic_states.create(
    wrappers, ADAM, params, batch_stats=stats, **kwargs
  )
  plain = create(*jax.device_get((params, stats)))
  state = create(params, stats, strategy=STRATEGY)
  assert specs(state) == {
    "params/split": P(None, "model"),
    "opt_state/0/mu/split": P(None, "model"),
    "opt_state/0/nu/split": P(None, "model"),
    "batch_stats/mean": P("model"),
    "wrapper_states/ema/params/split": P(None, "model"),
    "wrapper_states/accumulate/grads/split": P(None, "model"),
  }
  assert_trees_close(state, plain)


# abstract=True. For NNX: nnx_adapter_test.


@pytest.mark.filterwarnings("ignore:AGN")  # It has one replica.
@pytest.mark.parametrize(
  "kwargs",
  [
    {},
    {"wrappers": WRAPPERS},
    {"wrappers": WRAPPERS, "strategy": STRATEGY, "rules": RULES},
  ],
  ids=["", "wrappers", "strategy"],
)
def test_abstract_state_equals_the_concrete_state(kwargs):
  concrete = make(**kwargs)
  known = set(map(id, jax.live_arrays()))
  with compilations.count() as compiled:
    state = make(abstract=True, **kwargs)
  assert compiled.total == 0
  assert known.issuperset(map(id, jax.live_arrays()))
  assert jax.tree.structure(state) == jax.tree.structure(concrete)
  describe = lambda x: (x.shape, x.dtype, x.sharding)
  leaves = jax.tree.leaves(state)
  assert all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
  assert [*map(describe, leaves)] == [*map(describe, jax.tree.leaves(concrete))]


# Inputs and keyword arguments of models.


class Computes(nn.Module):
  """Calls `layer`; may declare a precision."""

  layer: Callable[..., Any] = lambda x: nn.Dense(2)(x)
  policy: Any = None
  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    return self.layer(x).astype(jnp.float32)


class Batch(NamedTuple):
  image: Any
  weight: Any


def test_named_tuple_is_one_argument():
  batch = Batch(X, np.ones((2, 1), np.float32))
  model = Computes(lambda batch: nn.Dense(2)(batch.image) * batch.weight)
  wanted = model.init(KEY, batch)["params"]
  for sample_input in (batch, (batch,)):
    state = make(model, x=sample_input, rules=())
    assert_trees_close(state.params, wanted)


class Branching(nn.Module):
  """Branches on `train` and `extra`; `scale` is an array."""

  @nn.compact
  def __call__(self, x, train, *, scale=None, extra=False):
    x = nn.Dense(2 if train else 16)(x)
    if scale is not None:
      x = x * self.param("gain", lambda key: scale * 2)
    return nn.Dense(4)(x) if extra else x


@pytest.mark.parametrize("strategy", [None, STRATEGY], ids=["", "mesh"])
def test_flags_and_arrays_by_name(strategy):
  kwargs = dict(train=False, extra=True, scale=np.arange(16.0, dtype="f"))
  state = make(Branching(), strategy=strategy, **kwargs)
  wanted = Branching().init(KEY, X, **kwargs)["params"]
  assert_trees_close(state.params, wanted)
  # Beside the input, which may be a shape.
  shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
  for train, features in ((True, 2), (False, 16)):
    state = make(Branching(), x=(shape, train), strategy=strategy)
    assert state.params["Dense_0"]["kernel"].shape == (16, features)


# The precision in which a model computes, and the scale of its loss.


def half_nnx(rngs):
  layer = nnx.Linear(16, 2, dtype=jnp.float16, rngs=rngs)
  return nnx.Sequential(layer)


def dense(dtype):
  return Computes(lambda x: nn.Dense(2, dtype=dtype)(x))


# Its matrix product is in float32.
ELEMENTWISE = Computes(lambda x: nn.Dense(2)(x).astype(jnp.float16) ** 2)
HALF = {
  "linen": dense(jnp.float16),
  "elementwise": ELEMENTWISE,
  "nnx": half_nnx(nnx.Rngs(0)),
  "nnx_function": half_nnx,
  "policy": Computes(policy=fs.Policy("mixed_float16")),
  "dtype": Computes(policy="no policy", dtype="float16"),
}
OTHERS = {
  "bfloat16": dense(jnp.bfloat16),
  "policy first": Computes(policy=fs.Policy("float32"), dtype=jnp.float16),
  # The names mean something else.
  "other names": Computes(policy="mixed_float16", dtype="auto"),
}


AUTO = [fs.LossScale("auto")]


@pytest.mark.parametrize("name", [*HALF, *OTHERS])
def test_auto_loss_scale_follows_the_precision(name):
  model = (HALF | OTHERS)[name]
  strategy = fs.Strategy() if name in ("linen", "nnx", "bfloat16") else None
  shapes = jax.ShapeDtypeStruct(X.shape, X.dtype)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    state = make(model, wrappers=AUTO, strategy=strategy, abstract=True)
    # It may be restored for an evaluation, which needs no scale.
    make(model, abstract=True)
  assert ("loss_scale" in state.metrics()) == (name in HALF)
  with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    jax.eval_shape(lambda: make(model, x=shapes, strategy=strategy))
  assert ["computes in float16" in str(w.message) for w in said] == (
    [True] * (name in HALF)
  )
  assert all(w.filename == __file__ for w in said)
