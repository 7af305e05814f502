"""`fs.nnx.Optimizer` in the train steps of NNX's users."""

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import flaxshard as fs

# One object, so that optimizers share the programs that `nnx.jit` compiles.
TX = optax.adam(1e-2)
DYNAMIC = (fs.LossScale("dynamic"),)


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


def create(wrappers=DYNAMIC, model=None, **options):
  model = Net(nnx.Rngs(0)) if model is None else model
  options = {"wrt": nnx.Param, **options}
  return model, fs.nnx.Optimizer(model, TX, wrappers=wrappers, **options)


def arrays(*objects):
  """Returns the arrays of NNX objects, by path; keys as integers."""
  found = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(objects)):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.random.key_data(leaf)
    found[jax.tree_util.keystr(path)] = np.asarray(leaf)
  return found


def assert_same(a, b, rtol=0.0):
  assert a.keys() == b.keys()
  for path in a:
    np.testing.assert_allclose(a[path], b[path], rtol, rtol, err_msg=path)


@pytest.mark.parametrize("wrappers", [(), DYNAMIC])
def test_same_arrays_as_nnx_optimizer(wrappers):
  model, optimizer = create(wrappers)
  plain_model = Net(nnx.Rngs(0))
  plain = nnx.Optimizer(plain_model, TX, wrt=nnx.Param)
  for batch in batches():
    loss = our_step(model, optimizer, batch)
    expected = nnx_step(plain_model, plain, batch)
    # XLA fuses a conditional update otherwise. In float64 the differences are
    # 1e-16, as between two ways to compile NNX's own step.
    rtol = 1e-4 if wrappers else 0.0
    np.testing.assert_allclose(loss, expected, rtol)
  assert isinstance(optimizer, nnx.Optimizer)
  assert_same(arrays(model), arrays(plain_model), rtol)
  ours = nnx.state(optimizer, nnx.Not(fs.nnx.WrapperState))
  assert_same(arrays(ours), arrays(nnx.state(plain)), rtol)


def test_skipped_step_changes_nothing_in_the_module_or_the_optimizer():
  model, optimizer = create()
  before = None
  for i, batch in enumerate(batches(overflow=2)):
    if i == 2:
      plain = nnx.state(optimizer, nnx.Not(fs.nnx.WrapperState))
      before = arrays(model, plain)
    our_step(model, optimizer, batch)
    if i == 2:
      plain = nnx.state(optimizer, nnx.Not(fs.nnx.WrapperState))
      assert_same(arrays(model, plain), before)
  assert int(optimizer.step[...]) == 3
  assert float(optimizer.metrics()["loss_scale"]) == 2.0**14
  assert int(optimizer.metrics()["skipped_steps"]) == 1
  assert int(model.drop.rngs.count[...]) == 3


def test_bit_equal_to_train_state():
  model, optimizer = create()
  state = fs.create_train_state(
    Net(nnx.Rngs(0)), None, None, TX, wrappers=DYNAMIC
  )

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

  for batch in batches(overflow=1):
    our_step(model, optimizer, batch)
    state = step(state, batch)
  other = Net(nnx.Rngs(1))
  # Lists of layers too, whose keys are strings in the TrainState.
  fs.nnx.update(other, state)
  assert_same(arrays(other), arrays(model))
  jax.tree.map(lambda x: x.delete(), state.params)
  assert_same(arrays(other), arrays(model))


def linear(outputs=1, **options):
  return nnx.Linear(4, outputs, rngs=nnx.Rngs(0), **options)


def test_update_with_the_state_of_another_module():
  model = linear()
  state = fs.create_train_state(model, None, None, TX)
  model.sown = nnx.Intermediate(jnp.ones(2))
  fs.nnx.update(model, state)
  unbiased = linear(use_bias=False)
  without = fs.create_train_state(unbiased, None, None, TX)
  for other, given, fact in (
    (linear(2), state, r"shape \(1,\).*\(2,\)"),
    (unbiased, state, r"float32\[1\], where nothing"),
    (linear(), without, "missing"),
  ):
    with pytest.raises(ValueError, match=f"params/bias: {fact}"):
      fs.nnx.update(other, given)


@pytest.mark.slow
def test_loops_and_cached_partial():
  model, optimizer = create()
  expected = [our_step(model, optimizer, b) for b in batches(overflow=1)]
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches(overflow=1))
  scanned, scanned_optimizer = create()

  @nnx.jit
  def loop(model, optimizer, stacked):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def body(carry, batch):
      loss, grads = carry[1].value_and_grad(loss_fn, carry[0], batch)
      carry[1].update(carry[0], grads)
      return carry, loss

    return body((model, optimizer), stacked)[1]

  losses = loop(scanned, scanned_optimizer, stacked)
  np.testing.assert_allclose(losses, expected, rtol=1e-5)
  assert int(scanned_optimizer.metrics()["skipped_steps"]) == 1
  cached, cached_optimizer = create()
  step = nnx.cached_partial(our_step, cached, cached_optimizer)
  losses = [step(b) for b in batches(2)]
  assert losses[0] == expected[0]
  assert int(cached_optimizer.step[...]) == 2


def test_aux_keyword_arguments_and_other_objects():
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

    (loss, aux), grads = optimizer.value_and_grad(
      loss_fn, model, metrics, batch=batch, flag=True, has_aux=True
    )
    optimizer.update(model, grads)
    return loss, aux

  loss, aux = step(model, optimizer, metrics, batches()[0])
  assert aux["outputs"].shape == (8, 1)
  np.testing.assert_array_equal(model.made[...], aux["outputs"])
  assert float(metrics.compute()) == float(loss)


def test_a_step_of_two_programs():
  """Gradients pass through functions, and the limits of compiled programs."""
  model, optimizer = create()
  shape = jax.tree.structure(nnx.split((model, optimizer)))

  @nnx.jit
  def compute(model, optimizer, batch):
    return optimizer.value_and_grad(loss_fn, model, batch)[1]

  @nnx.jit
  def apply(model, optimizer, grads):
    optimizer.update(model, jax.tree.map(lambda g: 2 * g, grads))

  for i, batch in enumerate(batches(overflow=1)):
    before = arrays(model)
    apply(model, optimizer, compute(model, optimizer, batch))
    if i == 1:
      assert_same(arrays(model), before)
  assert int(optimizer.step[...]) == int(model.drop.rngs.count[...]) == 3
  assert jax.tree.structure(nnx.split((model, optimizer))) == shape


def test_wrt_trains_what_it_selects():
  model = nnx.LoRALinear(4, 1, lora_rank=2, rngs=nnx.Rngs(0))
  before = arrays(model)
  model, optimizer = create(model=model, wrt=nnx.LoRAParam)
  for batch in batches():
    our_step(model, optimizer, batch)
  after = arrays(model)
  changed = {p for p in after if not np.array_equal(after[p], before[p])}
  assert len(changed) == 2 and all("lora_" in path for path in changed)


class ArrayLinear(nnx.Module):
  def __init__(self):
    self.w = jnp.ones((4, 1))
    self.count = jnp.array(0)

  def __call__(self, x):
    self.count += 1
    return x @ self.w


def test_plain_arrays_are_trained_by_a_filter_of_paths():
  model = ArrayLinear()
  model, optimizer = create(model=model, wrt=lambda path, _: path[-1] == "w")
  for batch in batches(overflow=1):
    our_step(model, optimizer, batch)
  assert int(model.count) == 3
  assert not np.array_equal(model.w, np.ones((4, 1)))


@pytest.mark.slow
def test_checkpoints_with_and_without_wrappers_restore_into_each_other(
  tmp_path,
):
  model, optimizer = create()
  for batch in batches(overflow=1):
    our_step(model, optimizer, batch)
  not_wrappers = nnx.Not(fs.nnx.WrapperState)
  with ocp.StandardCheckpointer() as checkpointer:
    saved = nnx.state(optimizer, not_wrappers)
    checkpointer.save(tmp_path / "optimizer", saved)
    checkpointer.save(
      tmp_path / "wrappers", nnx.state(optimizer, fs.nnx.WrapperState)
    )
    checkpointer.wait_until_finished()

    # Into NNX's optimizer, with Orbax's strict restore.
    plain_model = Net(nnx.Rngs(1))
    plain = nnx.Optimizer(plain_model, TX, wrt=nnx.Param)
    restored = checkpointer.restore(tmp_path / "optimizer", nnx.state(plain))
    nnx.update(plain, restored)
    assert_same(arrays(nnx.state(plain)), arrays(saved))

    # What NNX's optimizer saves, into ours; the scale starts fresh.
    checkpointer.save(tmp_path / "plain", nnx.state(plain))
    checkpointer.wait_until_finished()
    _, ours = create()
    restored = checkpointer.restore(
      tmp_path / "plain", nnx.state(ours, not_wrappers)
    )
    nnx.update(ours, restored)
    assert_same(arrays(nnx.state(ours, not_wrappers)), arrays(saved))
    assert float(ours.metrics()["loss_scale"]) == 2.0**15

    # The wrappers beside it.
    wrappers = nnx.state(ours, fs.nnx.WrapperState)
    nnx.update(ours, checkpointer.restore(tmp_path / "wrappers", wrappers))
    assert_same(arrays(ours), arrays(optimizer))


def test_checkpointer_takes_the_module_and_the_optimizer(tmp_path):
  model, optimizer = create()
  for batch in batches(overflow=1):
    our_step(model, optimizer, batch)
  other, other_optimizer = create(model=Net(nnx.Rngs(1)))
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(4, optimizer.train_state(model))
    state = checkpointer.restore(other_optimizer.train_state(other))
    other_optimizer.set_train_state(other, state)
    assert_same(arrays(other, other_optimizer), arrays(model, optimizer))
    our_step(other, other_optimizer, batches()[0])
    # It is the checkpoint of a TrainState of the module.
    module = Net(nnx.Rngs(2))
    state = fs.create_train_state(module, None, None, TX, wrappers=DYNAMIC)
    state = checkpointer.restore(state)
  fs.nnx.update(module, state)
  assert_same(arrays(module), arrays(model))


def test_state_of_many_layers():
  """Layers are counted by integers in NNX, and by strings in a TrainState."""
  make = lambda seed: nnx.List(
    [nnx.Linear(1, 1, rngs=nnx.Rngs(seed)) for _ in range(11)]
  )
  state = fs.create_train_state(make(0), None, None, TX, wrappers=[fs.EMA(0.5)])
  # Every slot has a value of its own.
  leaves, treedef = jax.tree.flatten(state)
  numbers = [jnp.full_like(x, i) for i, x in enumerate(leaves)]
  state = jax.tree.unflatten(treedef, numbers)
  model, optimizer = create([fs.EMA(0.5)], make(1))
  optimizer.set_train_state(model, state)
  found = optimizer.train_state(model)
  for name in ("step", "params", "opt_state", "wrapper_states"):
    jax.tree.map(
      np.testing.assert_array_equal, getattr(found, name), getattr(state, name)
    )
  plain = fs.create_train_state(make(0), None, None, TX)
  with pytest.raises(ValueError, match=r"ema/params/0/bias: missing"):
    optimizer.set_train_state(model, plain)


def test_checkpoint_of_lora_layers_has_the_frozen_parameters(tmp_path):
  make = lambda seed: create(
    model=nnx.LoRALinear(4, 1, lora_rank=2, rngs=nnx.Rngs(seed)),
    wrt=nnx.LoRAParam,
  )
  (model, optimizer), (other, other_optimizer) = make(0), make(1)
  our_step(model, optimizer, batches()[0])
  state = optimizer.train_state(model)
  assert set(state.params) == {"lora"} and "kernel" in state.frozen
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, {"adapter": state})
    state = other_optimizer.train_state(other)
    state = checkpointer.restore({"adapter": state})["adapter"]
  other_optimizer.set_train_state(other, state)
  assert_same(arrays(other, other_optimizer), arrays(model, optimizer))


def test_auto_finds_float16_in_inner_modules():
  model = Net(nnx.Rngs(0))
  model.layers[1].dtype = jnp.float16
  _, optimizer = create([fs.LossScale("auto")], model)
  assert float(optimizer.metrics()["loss_scale"]) == 2.0**15
  _, optimizer = create([fs.LossScale("auto")])
  assert optimizer.metrics() == {}
  linen = nnx.bridge.ToNNX(nn.Dense(1, dtype=jnp.float16), rngs=nnx.Rngs(0))
  nnx.bridge.lazy_init(linen, jnp.ones((2, 4)))
  _, optimizer = create([fs.LossScale("auto")], linen)
  assert float(optimizer.metrics()["loss_scale"]) == 2.0**15


def test_strategy_shards_parameters_and_slots():
  strategy = fs.Strategy()
  n = strategy.num_replicas_in_sync
  rules = [("kernel", jax.P(None, "replica"))]

  @nnx.jit
  def born_sharded():
    return create(model=linear(2 * n), strategy=strategy, rules=rules)

  eager = create(model=linear(2 * n), strategy=strategy, rules=rules)
  for model, optimizer in (eager, born_sharded()):
    moment = optimizer.opt_state[0].mu["kernel"]
    for kernel in (model.kernel, moment):
      shard = kernel.get_raw_value().addressable_shards[0]
      assert shard.data.shape == (4, 2)
    batch = {"x": np.ones((n, 4), "f"), "y": np.zeros((n, 2 * n), "f")}
    our_step(model, optimizer, strategy.shard_batch(batch))
    assert moment.get_raw_value().addressable_shards[0].data.shape == (4, 2)


@pytest.mark.parametrize(
  ("call", "error", "facts"),
  [
    (lambda: create(fs.LossScale("dynamic")), TypeError, ["LossScale"]),
    (lambda: create(wrt=nnx.LoRAParam), ValueError, ["LoRAParam", "Net"]),
    (lambda: create(rules="fsdp"), ValueError, ["rules='fsdp'", "strategy"]),
    (
      lambda: create([fs.AGN(2, transport="store")]),
      ValueError,
      ["AGN", "create_train_state"],
    ),
    (
      lambda: gradients(lambda model, batch: model(batch["x"])),
      ValueError,
      ["scalar", "float32[8,1]"],
    ),
    (lambda: apply(lambda grads: (1.0, grads)), ValueError, ["grads"]),
    (lambda: apply(lambda grads: {}), ValueError, ["grads", "bias"]),
    # In the place of the module.
    (
      lambda: apply(lambda grads: Net(nnx.Rngs(0))),
      TypeError,
      ["grads", "Net", "update(model, grads)"],
    ),
    # optax.chain alone takes any name, and does nothing with it.
    (
      lambda: apply(lambda grads: grads, valeu=1.0),
      TypeError,
      ["'valeu'", "Did you mean 'value'"],
    ),
  ],
)
def test_mistakes(call, error, facts):
  with pytest.raises(error) as e:
    call()
  assert all(fact in str(e.value) for fact in facts), str(e.value)


def gradients(loss):
  model, optimizer = create(model=linear())
  return model, optimizer, optimizer.value_and_grad(loss, model, batches()[0])


def apply(change, **extra):
  model, optimizer, (_, grads) = gradients(loss_fn)
  optimizer.update(model, change(grads), **extra)


def test_strategy_run_refuses_an_optimizer():
  model, optimizer = create((), linear())
  strategy = fs.Strategy()
  with pytest.raises(TypeError, match=r"argument 1 .*nnx\.jit"):
    strategy.run(our_step, args=(nnx.state(model), optimizer, batches()[0]))
  # Nor are there wrappers that act on the gradients of each replica.
  per_replica = fs.Accumulate(2, per_replica=True)
  for wrapper in (fs.CrossShard("sum"), fs.AGN(100), per_replica):
    with pytest.raises(ValueError, match=type(wrapper).__name__):
      create([wrapper], model, strategy=strategy)


def test_the_call_that_nnx_has_is_a_step_too():
  model, optimizer = create(model=linear())
  other, same = create(model=linear())
  batch = batches(1)[0]
  loss, grads = optimizer.value_and_grad(loss_fn, model, batch)
  want, same_grads = same.value_and_grad(loss_fn)(other, batch)
  np.testing.assert_array_equal(loss, want)
  assert_same(arrays(grads), arrays(same_grads))


# Averages, accumulation and frozen parameters.


def bias_of(model):
  return np.asarray(model.layers[1].bias[...])


@pytest.mark.parametrize("wrappers", [(), DYNAMIC])
def test_frozen_layer_does_not_change(wrappers):
  model = Net(nnx.Rngs(0))
  tx = fs.freeze(optax.adamw(0.1), ["^layers/0/"])
  optimizer = fs.nnx.Optimizer(model, tx, wrt=nnx.Param, wrappers=wrappers)
  before = arrays(model.layers)
  for batch in batches(2):
    our_step(model, optimizer, batch)
  after = arrays(model.layers)
  changed = [path for path in after if (after[path] != before[path]).any()]
  assert len(changed) == 2 and all("[1]" in path for path in changed)
  # Without EMA these are the parameters of the module.
  params = optimizer.eval_params(model)
  np.testing.assert_array_equal(params["layers"][1]["bias"], bias_of(model))


def test_accumulation_in_a_scan():
  model, optimizer = create()
  before = arrays(model)

  @nnx.jit
  def step(model, optimizer, first, others):
    # Outside of the scan: it begins the step, whose state the scan carries.
    _, grads = optimizer.value_and_grad(loss_fn, model, first)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def add(carry, batch):
      model, optimizer, grads = carry
      _, more = optimizer.value_and_grad(loss_fn, model, batch)
      return model, optimizer, jax.tree.map(jnp.add, grads, more)

    # By name, which NNX's optimizer takes too.
    grads = add((model, optimizer, grads), others)[2]
    return optimizer.update(model, grads=grads)

  stacked = lambda made: jax.tree.map(lambda *x: jnp.stack(x), *made)
  for overflow in (0, 2):
    first, *others = batches(overflow=overflow)
    updates = step(model, optimizer, first, stacked(others))
    assert_same(arrays(model), before)
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
  first, *others = batches()
  step(model, optimizer, first, stacked(others))
  assert int(model.drop.rngs.count[...]) == 4


@pytest.mark.slow
def test_average_of_the_updates():
  wrappers = [fs.LossScale("dynamic"), fs.Accumulate(2), fs.EMA(0.5)]
  model, optimizer = create(wrappers)
  biases = []
  # One batch is left out, so updates end with the third and the last batch.
  for batch in batches(5, overflow=1):
    our_step(model, optimizer, batch)
    biases.append(bias_of(model))
  assert int(optimizer.step[...]) == 2
  average = nnx.clone(model)
  nnx.update(average, optimizer.eval_params(model))
  np.testing.assert_allclose(
    bias_of(average), (biases[2] + 2 * biases[4]) / 3, rtol=1e-5
  )
  np.testing.assert_array_equal(bias_of(model), biases[4])


@pytest.mark.slow
def test_agn_and_a_custom_wrapper():
  class Halve(fs.wrappers.Base):
    def apply(self, state, target, grads, next):
      return next(target, jax.tree.map(lambda g: g / 2, grads)), state

  model, optimizer = create([*DYNAMIC, Halve(), fs.AGN(2)])
  for batch in batches(overflow=1):
    our_step(model, optimizer, batch)
  assert int(optimizer.metrics()["commits"]) == 1
  assert all(np.isfinite(x).all() for x in arrays(model).values())
