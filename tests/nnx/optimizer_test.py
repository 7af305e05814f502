"""`fs.nnx.Optimizer` in the train steps of NNX's users."""

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tree_equality import assert_trees_equal

import flaxshard as fs

# One object, so that optimizers share the programs that `nnx.jit` compiles.
TX = optax.adam(1e-2)
DYNAMIC = (fs.LossScale("dynamic"),)
STRATEGY = fs.Strategy()


class Net(nnx.Module):
  def __init__(self, rngs):
    # A bias before BatchNorm would have gradients of rounding errors alone,
    # which Adam scales up to its learning rate.
    hidden = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
    self.layers = nnx.List([hidden, nnx.Linear(8, 1, rngs=rngs)])
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    x = nnx.relu(self.drop(self.norm(self.layers[0](x))))
    return self.layers[1](x)


def linear(outputs=1, **options):
  return nnx.Linear(4, outputs, rngs=nnx.Rngs(0), **options)


def lora(seed=0):
  return nnx.LoRALinear(4, 1, lora_rank=2, rngs=nnx.Rngs(seed))


def loss_fn(model, batch):
  return ((model(batch["x"]) - batch["y"]) ** 2).mean()


@nnx.jit
def our_step(model, optimizer, batch):
  loss, grads = optimizer.value_and_grad(loss_fn, model, batch)
  optimizer.update(model, grads)
  return loss


@nnx.jit
def nnx_step(model, optimizer, batch):
  loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
  optimizer.update(model, grads)
  return loss


def batches(n=4, overflow=None):
  rng = np.random.RandomState(0)
  made = [
    {"x": rng.randn(8, 4).astype("f"), "y": rng.randn(8, 1).astype("f")}
    for _ in range(n)
  ]
  if overflow is not None:
    made[overflow]["x"][0, 0] = np.inf
  return made


def stacked(made):
  return jax.tree.map(lambda *x: jnp.stack(x), *made)


def create(wrappers=DYNAMIC, model=None, *, tx=TX, wrt=nnx.Param, **options):
  model = Net(nnx.Rngs(0)) if model is None else model
  return model, fs.nnx.Optimizer(
    model, tx, wrt=wrt, wrappers=wrappers, **options
  )


def create_state(model, **options):
  return fs.create_train_state(model, None, None, TX, **options)


def arrays(*objects):
  """Returns the arrays of NNX objects, by path; keys as integers."""
  found = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(objects)):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.random.key_data(leaf)
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    found[name] = np.asarray(leaf)
  return found


def plain(optimizer):
  """Returns the arrays that NNX's own optimizer has too."""
  return nnx.state(optimizer, nnx.Not(fs.nnx.WrapperState))


def assert_same(a, b, rtol=0.0):
  assert a.keys() == b.keys()
  for path in a:
    np.testing.assert_allclose(a[path], b[path], rtol, rtol, err_msg=path)


# Equal to NNX's optimizer, and to a TrainState.


@pytest.mark.parametrize("wrappers", [(), DYNAMIC])
def test_same_arrays_as_nnx_optimizer(wrappers):
  model, optimizer = create(wrappers)
  other = Net(nnx.Rngs(0))
  of_nnx = nnx.Optimizer(other, TX, wrt=nnx.Param)
  for batch in batches():
    loss = our_step(model, optimizer, batch)
    expected = nnx_step(other, of_nnx, batch)
    # XLA fuses a conditional update otherwise. In float64 the differences are
    # 1e-16, as between two ways to compile NNX's own step.
    rtol = 1e-4 if wrappers else 0.0
    np.testing.assert_allclose(loss, expected, rtol)
  assert isinstance(optimizer, nnx.Optimizer)
  assert_same(arrays(model), arrays(other), rtol)
  assert_same(arrays(plain(optimizer)), arrays(nnx.state(of_nnx)), rtol)
  # With this, Orbax restores one into the other.
  structure = jax.tree.structure
  assert structure(plain(optimizer)) == structure(nnx.state(of_nnx))


@pytest.mark.parametrize(
  "others",
  [
    (),
    pytest.param((fs.Accumulate(2), fs.EMA(0.5)), marks=pytest.mark.slow),
    pytest.param((fs.AGN(2),), marks=pytest.mark.slow),
  ],
)
def test_steps_and_skipped_steps_equal_those_of_a_train_state(others):
  wrappers = (*DYNAMIC, *others)
  model, optimizer = create(wrappers)
  state = create_state(Net(nnx.Rngs(0)), wrappers=wrappers)

  @jax.jit
  def step(state, batch):
    def loss_fn(params):
      variables = {"batch_stats": state.batch_stats, "rngs": state.rngs}
      outputs, new = state.apply_fn(
        {"params": params, **variables}, batch["x"], mutable=True
      )
      return ((outputs - batch["y"]) ** 2).mean(), new

    (_, new), grads = state.value_and_grad(loss_fn, has_aux=True)
    return state.apply_gradients(grads=grads, **new)

  for i, batch in enumerate(batches(overflow=2)):
    before = arrays(model, plain(optimizer))
    our_step(model, optimizer, batch)
    state = step(state, batch)
    if i == 2:
      assert_same(arrays(model, plain(optimizer)), before)
  saved = optimizer.train_state(model)
  assert_trees_equal(saved, state.replace(apply_fn=None))
  optimizer.set_train_state(model, saved)
  assert optimizer.metrics() == state.metrics()
  assert int(model.drop.rngs.count[...]) == 3
  average = jax.tree.leaves(optimizer.eval_params(model))
  assert_trees_equal(average, jax.tree.leaves(state.eval_params))
  # Lists of layers too, whose keys are strings in the TrainState.
  other = Net(nnx.Rngs(1))
  other.sown = nnx.Intermediate(jnp.ones(2))
  fs.nnx.update(other, state)
  del other.sown
  assert_same(arrays(other), arrays(model))
  jax.tree.map(lambda x: x.delete(), state.params)
  assert_same(arrays(other), arrays(model))


# Steps in other forms.


def test_the_call_that_nnx_has_with_aux_and_other_objects():
  model, optimizer = create()
  metrics = nnx.metrics.Average()

  @nnx.jit
  def step(model, optimizer, metrics, batch):
    def loss_fn(model, metrics, *, batch, flag):
      assert flag is True
      outputs = model(batch["x"])
      loss = ((outputs - batch["y"]) ** 2).mean()
      metrics.update(values=loss)
      model.made = nnx.Intermediate(outputs)
      return loss, {"outputs": outputs}

    value_and_grad = optimizer.value_and_grad(loss_fn, has_aux=True)
    (loss, aux), grads = value_and_grad(model, metrics, batch=batch, flag=True)
    optimizer.update(model, grads)
    return loss, aux

  loss, aux = step(model, optimizer, metrics, batches()[0])
  assert aux["outputs"].shape == (8, 1)
  np.testing.assert_array_equal(model.made[...], aux["outputs"])
  assert float(metrics.compute()) == float(loss)


def test_a_step_of_several_calls_and_programs():
  model, optimizer = create()
  before = arrays(model)
  shape = jax.tree.structure(nnx.split((model, optimizer)))

  @nnx.jit
  def begin(model, optimizer, batch):
    return optimizer.value_and_grad(loss_fn, model, batch)[1]

  @nnx.jit
  def accumulate(model, optimizer, grads, batches):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def add(carry, batch):
      model, optimizer, grads = carry
      _, more = optimizer.value_and_grad(loss_fn, model, batch)
      return model, optimizer, jax.tree.map(jnp.add, grads, more)

    return add((model, optimizer, grads), batches)[2]

  @nnx.jit
  def end(model, optimizer, grads):
    # By name, which NNX's optimizer takes too.
    return optimizer.update(model, grads=grads)

  for overflow in (0, 2, None):
    assert_same(arrays(model), before)
    first, *others = batches(overflow=overflow)
    grads = begin(model, optimizer, first)
    grads = accumulate(model, optimizer, grads, stacked(others))
    updates = end(model, optimizer, grads)
    is_changed = any(np.any(x) for x in jax.tree.leaves(updates))
    assert is_changed == (overflow is None)
  assert int(optimizer.step[...]) == 1
  assert int(model.drop.rngs.count[...]) == 4
  assert jax.tree.structure(nnx.split((model, optimizer))) == shape


# What is trained.


FROZEN = {"tx": fs.freeze(optax.adamw(0.1), ["^layers/0/"])}
KEPT = {"0/drop/rngs/key/value", "0/layers/0/kernel/value"}


class ArrayLinear(nnx.Module):
  def __init__(self):
    self.w = jnp.ones((4, 1))
    self.count = jnp.array(0)

  def __call__(self, x):
    self.count += 1
    return x @ self.w


class Masked(nnx.Module):
  def __init__(self):
    self.w = nnx.Param(jnp.ones((4, 1)))
    self.mask, self.n = nnx.Param(jnp.arange(4) < 3), nnx.Param(jnp.array(2))

  def __call__(self, x):
    return self.n * (x * self.mask) @ self.w


@pytest.mark.parametrize(
  ("model", "options", "kept"),
  [
    (Masked, {}, {"0/mask/value", "0/n/value"}),
    (Masked, {"wrappers": ()}, {"0/mask/value", "0/n/value"}),
    # Arrays that are no variables.
    (ArrayLinear, {"wrt": lambda path, _: path[-1] == "w"}, set()),
    (lora, {"wrt": nnx.LoRAParam}, {"0/kernel/value", "0/bias/value"}),
    (lambda: Net(nnx.Rngs(0)), FROZEN, KEPT),
    (lambda: Net(nnx.Rngs(0)), {**FROZEN, "wrappers": ()}, KEPT),
  ],
)
def test_what_is_selected_is_trained(model, options, kept):
  model, optimizer = create(model=model(), **options)
  before = arrays(model)
  for batch in batches():
    our_step(model, optimizer, batch)
  after = arrays(model)
  same = {p for p in after if np.array_equal(after[p], before[p])}
  assert same == kept


def test_auto_finds_float16_in_inner_modules():
  linen = nn.Dense(1, dtype=jnp.float16)
  half = nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(0))
  nnx.bridge.lazy_init(half, jnp.ones((2, 4)))
  for module, names in ((half, {"loss_scale", "skipped_steps"}), (None, set())):
    _, optimizer = create([fs.LossScale("auto")], module)
    assert optimizer.metrics().keys() == names
  with pytest.warns(match="computes in float16.*LossScale"):
    create([fs.EMA()], half)


def test_strategy_shards_parameters_and_slots():
  rules = [("kernel", jax.P(None, "replica"))]
  make = lambda: create(model=linear(16), strategy=STRATEGY, rules=rules)
  for model, optimizer in (make(), nnx.jit(make)()):
    moment = optimizer.opt_state[0].mu["kernel"]
    for kernel in (model.kernel, moment):
      shard = kernel.get_raw_value().addressable_shards[0]
      assert shard.data.shape == (4, 2)
    batch = {"x": np.ones((8, 4), "f"), "y": np.zeros((8, 16), "f")}
    our_step(model, optimizer, STRATEGY.shard_batch(batch))
    assert moment.get_raw_value().addressable_shards[0].data.shape == (4, 2)


# Checkpoints.


@pytest.mark.parametrize(
  ("make", "wrt"),
  [(lambda seed: Net(nnx.Rngs(seed)), nnx.Param), (lora, nnx.LoRAParam)],
)
def test_checkpointer_takes_the_module_and_the_optimizer(make, wrt, tmp_path):
  model, optimizer = create(model=make(0), wrt=wrt)
  for batch in batches(overflow=1):
    our_step(model, optimizer, batch)
  other, other_optimizer = create(model=make(1), wrt=wrt)
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(4, optimizer.train_state(model))
    state = checkpointer.restore(other_optimizer.train_state(other))
  # LoRA's is that of the adapter.
  assert hasattr(state, "frozen") == (wrt is nnx.LoRAParam)
  other_optimizer.set_train_state(other, state)
  assert_same(arrays(other, other_optimizer), arrays(model, optimizer))
  our_step(other, other_optimizer, batches()[0])


def test_state_of_many_layers():
  """Layers are counted by integers in NNX, and by strings in a TrainState."""
  make = lambda seed: nnx.List([lora(seed) for _ in range(11)])
  state = create_state(make(0), wrappers=[fs.EMA(0.5)])
  # Every slot has a value of its own.
  leaves, treedef = jax.tree.flatten(state)
  numbers = [jnp.full_like(x, i) for i, x in enumerate(leaves)]
  state = treedef.unflatten(numbers).replace(apply_fn=None)
  model, optimizer = create([fs.EMA(0.5)], make(1))
  optimizer.set_train_state(model, state)
  assert_trees_equal(optimizer.train_state(model), state)
  with pytest.raises(ValueError, match=r"ema/params/0/bias: missing"):
    optimizer.set_train_state(model, create_state(make(0)))


# Mistakes.


def gradients(loss=loss_fn):
  model, optimizer = create(model=linear())
  return model, optimizer, optimizer.value_and_grad(loss, model, batches()[0])


def apply(change, **extra):
  model, optimizer, (_, grads) = gradients()
  optimizer.update(model, change(grads), **extra)


def update(model, **options):
  """Updates a module with the state of another one."""
  fs.nnx.update(model, create_state(linear(**options)))


def run_on_replicas():
  model, optimizer = create((), linear())
  STRATEGY.run(our_step, (nnx.state(model), optimizer, batches()[0]))


STORE = fs.AGN(2, transport="store")
# They act on the gradients of each replica.
EACH = [fs.AGN(9)], [fs.Accumulate(2, per_replica=True)], [fs.CrossShard()]
UNBIASED = dict(use_bias=False)

MISTAKES = [
  (lambda: create(wrt=nnx.LoRAParam), ValueError, "LoRAParam.*Net"),
  (lambda: create(rules="fsdp"), ValueError, "rules='fsdp' need a strategy"),
  (lambda: create([STORE]), ValueError, "AGN.*create_train_state"),
  (lambda: create(EACH[0], strategy=STRATEGY), ValueError, "AGN.*8 replicas"),
  (lambda: create(EACH[1], strategy=STRATEGY), ValueError, "Accumulate"),
  (lambda: create(EACH[2], strategy=STRATEGY), ValueError, "CrossShard"),
  (run_on_replicas, TypeError, r"argument 1 .*nnx\.jit"),
  (lambda: gradients(lambda m, b: m(b["x"])), ValueError, "scalar.*32.8,1"),
  (lambda: apply(lambda grads: (1.0, grads)), ValueError, "grads"),
  (lambda: apply(lambda grads: {}), ValueError, "grads.*bias"),
  (lambda: apply(lambda grads: linear()), TypeError, "Linear.*update.model, g"),
  # optax.chain alone takes any name, and does nothing with it.
  (lambda: apply(lambda g: g, valeu=1.0), TypeError, "Did you mean 'value'"),
  (lambda: update(linear(2)), ValueError, r"params/bias: shape \(1,\).*\(2,\)"),
  (lambda: update(linear(**UNBIASED)), ValueError, "bias: .*, where nothing"),
  (lambda: update(linear(), **UNBIASED), ValueError, "params/bias: missing"),
]


@pytest.mark.parametrize(("call", "error", "words"), MISTAKES)
def test_mistakes(call, error, words):
  with pytest.raises(error, match=words):
    call()
